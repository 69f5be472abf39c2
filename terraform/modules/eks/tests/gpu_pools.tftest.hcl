mock_provider "aws" {
  source = "./tests/mocks"

  override_data {
    target = data.aws_ec2_instance_type.gpu["p5.48xlarge"]
    values = {
      gpus                   = [{ count = 8, manufacturer = "NVIDIA", memory_size = 81920, name = "H100" }]
      total_instance_storage = 30400
    }
  }

  override_data {
    target = data.aws_ec2_instance_type.gpu["g6.12xlarge"]
    values = {
      gpus                   = [{ count = 4, manufacturer = "NVIDIA", memory_size = 22888, name = "L4" }]
      total_instance_storage = 3760
    }
  }
}

variables {
  name = "shoal"
  gpu_pools = {
    l4-spot = { accelerator = "L4", max = 10 }
    h100    = { accelerator = "H100", capacity = "on-demand", max = 2, zones = ["eu-central-1b"] }
  }
}

run "two_pools" {
  command = apply

  assert {
    condition     = alltrue([for group in aws_eks_node_group.gpu : group.scaling_config[0].min_size == 0 && group.scaling_config[0].desired_size == 0])
    error_message = "Without work there is no GPU."
  }
  assert {
    condition     = aws_eks_node_group.gpu["l4-spot"].scaling_config[0].max_size == 10
    error_message = "max is the pool's."
  }
  assert {
    condition     = alltrue([for group in aws_eks_node_group.gpu : group.ami_type == "AL2023_x86_64_NVIDIA"])
    error_message = "The image has the driver."
  }
  assert {
    condition     = aws_eks_node_group.gpu["l4-spot"].capacity_type == "SPOT" && aws_eks_node_group.gpu["l4-spot"].instance_types == tolist(["g6.xlarge", "g6.2xlarge"])
    error_message = "Spot by default, of several types."
  }
  assert {
    condition     = aws_eks_node_group.gpu["h100"].capacity_type == "ON_DEMAND" && aws_eks_node_group.gpu["h100"].instance_types == tolist(["p5.48xlarge"])
    error_message = "On demand if requested."
  }
  assert {
    condition = aws_eks_node_group.gpu["l4-spot"].labels == tomap({
      "shoal.dev/pool"                = "l4-spot"
      "shoal.dev/accelerator"         = "l4"
      "k8s.amazonaws.com/accelerator" = "nvidia-l4"
      "nvidia.com/gpu.present"        = "true"
    })
    error_message = "Pods select their nodes by these labels."
  }
  assert {
    condition     = alltrue([for group in aws_eks_node_group.gpu : one(group.taint) == { key = "nvidia.com/gpu", value = "true", effect = "NO_SCHEDULE" }])
    error_message = "Nothing else runs on GPU nodes."
  }
  assert {
    condition     = output.pools["l4-spot"].node_selector == { "shoal.dev/accelerator" = "l4", "eks.amazonaws.com/capacityType" = "SPOT" } && output.pools["h100"].gpus_per_node == 8
    error_message = "Outputs contain the pools."
  }
  assert {
    condition = { for key, one in aws_autoscaling_group_tag.node_template : one.tag[0].key => one.tag[0].value if startswith(key, "l4-spot ") } == {
      "k8s.io/cluster-autoscaler/node-template/label/shoal.dev/pool"                 = "l4-spot"
      "k8s.io/cluster-autoscaler/node-template/label/shoal.dev/accelerator"          = "l4"
      "k8s.io/cluster-autoscaler/node-template/label/k8s.amazonaws.com/accelerator"  = "nvidia-l4"
      "k8s.io/cluster-autoscaler/node-template/label/nvidia.com/gpu.present"         = "true"
      "k8s.io/cluster-autoscaler/node-template/label/eks.amazonaws.com/capacityType" = "SPOT"
      "k8s.io/cluster-autoscaler/node-template/taint/nvidia.com/gpu"                 = "true:NoSchedule"
      "k8s.io/cluster-autoscaler/node-template/resources/nvidia.com/gpu"             = "1"
      "k8s.io/cluster-autoscaler/node-template/resources/ephemeral-storage"          = "405G"
    }
    error_message = "Tags describe all node properties that a pod of the pool requires."
  }
  assert {
    condition     = aws_autoscaling_group_tag.node_template["h100 resources/nvidia.com/gpu"].tag[0].value == "8"
    error_message = "The number of GPUs is the instance type's."
  }
  assert {
    condition     = alltrue([for template in aws_launch_template.node : template.metadata_options[0].http_tokens == "required" && tobool(template.block_device_mappings[0].ebs[0].encrypted)])
    error_message = "IMDSv2 and encryption everywhere."
  }
  assert {
    condition     = aws_launch_template.node["l4-spot"].metadata_options[0].http_put_response_hop_limit == 2 && aws_launch_template.node["h100"].metadata_options[0].http_put_response_hop_limit == 1
    error_message = "Only workers on spot nodes reach the metadata service, for the notice."
  }
  assert {
    condition = alltrue([
      for wanted in ["install -d -o 65532 -g 65532 /var/lib/shoal", "strategy: RAID0", "\n--shoal--\n"] :
      strcontains(base64decode(aws_launch_template.node["l4-spot"].user_data), wanted)
    ])
    error_message = "GPU nodes have the folder for models, and use instance storage where there is some."
  }
  assert {
    condition     = aws_launch_template.node["system"].user_data == null
    error_message = "System nodes are as EKS makes them."
  }
  assert {
    condition     = aws_eks_node_group.gpu["h100"].subnet_ids == toset([aws_subnet.private["eu-central-1b"].id])
    error_message = "A pool stays in its zones."
  }
  assert {
    condition     = length(aws_eks_node_group.gpu["l4-spot"].subnet_ids) == 3
    error_message = "A pool that names none is in all zones."
  }
  assert {
    condition     = alltrue([for template in aws_launch_template.node : length(template.instance_market_options) == 0 && length(template.capacity_reservation_specification) == 0])
    error_message = "Neither block nor reservation."
  }
}

run "a_capacity_block" {
  command = plan

  variables {
    gpu_pools = {
      h100 = { accelerator = "H100", capacity = "capacity-block", reservation = "cr-0123456789abcdef0", max = 1 }
    }
  }

  assert {
    condition     = aws_eks_node_group.gpu["h100"].capacity_type == "CAPACITY_BLOCK" && aws_launch_template.node["h100"].instance_market_options[0].market_type == "capacity-block"
    error_message = "Bought as a block."
  }
  assert {
    condition     = aws_launch_template.node["h100"].capacity_reservation_specification[0].capacity_reservation_target[0].capacity_reservation_id == "cr-0123456789abcdef0"
    error_message = "This block."
  }
}

run "instance_types_of_another_accelerator" {
  command = plan

  variables {
    gpu_pools = {
      h100 = { accelerator = "H100", instance_types = ["g6.2xlarge"], max = 1 }
    }
  }

  expect_failures = [aws_eks_node_group.gpu]
}

run "instance_types_with_more_gpus_than_others" {
  command = plan

  variables {
    gpu_pools = {
      l4 = { accelerator = "L4", instance_types = ["g6.2xlarge", "g6.12xlarge"], max = 1 }
    }
  }

  expect_failures = [aws_eks_node_group.gpu]
}
