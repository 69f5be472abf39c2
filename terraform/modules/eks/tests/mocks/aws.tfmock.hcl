mock_data "aws_availability_zones" {
  defaults = {
    names = ["eu-central-1a", "eu-central-1b", "eu-central-1c"]
  }
}

mock_data "aws_caller_identity" {
  defaults = {
    account_id = "123456789012"
  }
}

mock_data "aws_partition" {
  defaults = {
    partition = "aws"
  }
}

mock_data "aws_region" {
  defaults = {
    id = "eu-central-1"
  }
}

mock_data "aws_ec2_instance_type" {
  defaults = {
    gpus                   = [{ count = 1, manufacturer = "NVIDIA", memory_size = 22888, name = "L4" }]
    total_instance_storage = 450
  }
}

mock_resource "aws_iam_role" {
  defaults = {
    arn = "arn:aws:iam::123456789012:role/mocked"
  }
}

mock_resource "aws_kms_key" {
  defaults = {
    arn = "arn:aws:kms:eu-central-1:123456789012:key/mocked"
  }
}

mock_resource "aws_launch_template" {
  defaults = {
    id = "lt-0123456789abcdef0"
  }
}

mock_resource "aws_eks_node_group" {
  defaults = {
    resources = [{ autoscaling_groups = [{ name = "mocked" }] }]
  }
}
