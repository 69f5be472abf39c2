mock_provider "aws" {
  source = "./tests/mocks"
}

variables {
  name = "shoal"
}

run "a_private_cluster" {
  command = plan

  assert {
    condition     = aws_eks_cluster.this.vpc_config[0].endpoint_private_access && !aws_eks_cluster.this.vpc_config[0].endpoint_public_access
    error_message = "No internet address may reach the Kubernetes API unless it is listed."
  }
  assert {
    condition     = aws_eks_cluster.this.access_config[0].authentication_mode == "API" && length(aws_vpc_security_group_ingress_rule.api) == 0
    error_message = "Access entries are the only way to get access."
  }
  assert {
    condition     = aws_eks_cluster.this.encryption_config[0].resources == toset(["secrets"]) && aws_kms_key.cluster.enable_key_rotation
    error_message = "Secrets are encrypted with our rotated key."
  }
  assert {
    condition     = length(aws_eks_cluster.this.enabled_cluster_log_types) == 5 && aws_cloudwatch_log_group.cluster.name == "/aws/eks/shoal/cluster"
    error_message = "All logs of the control plane go to the log group that is encrypted and ends."
  }
  assert {
    condition = jsondecode(aws_kms_key.cluster.policy).Statement[1].Condition.ArnEquals == {
      "kms:EncryptionContext:aws:logs:arn" = "arn:aws:logs:eu-central-1:123456789012:log-group:/aws/eks/shoal/cluster"
    }
    error_message = "CloudWatch may use the key for this log group only."
  }
  assert {
    condition     = [for subnet in aws_subnet.private : subnet.cidr_block] == ["10.40.0.0/19", "10.40.32.0/19", "10.40.64.0/19"]
    error_message = "Each zone has an eighth of the VPC."
  }
  assert {
    condition     = length(aws_nat_gateway.this) == 1 && length(aws_route.nat) == 3
    error_message = "One NAT gateway serves all zones."
  }
  assert {
    condition     = aws_vpc_endpoint.s3.vpc_endpoint_type == "Gateway" && aws_vpc_endpoint.s3.service_name == "com.amazonaws.eu-central-1.s3"
    error_message = "Models do not go through the NAT gateway."
  }
  assert {
    condition     = length(aws_default_security_group.this.ingress) == 0 && length(aws_default_security_group.this.egress) == 0
    error_message = "The VPC's default group lets nothing through."
  }
  assert {
    condition     = aws_eks_node_group.system.capacity_type == "ON_DEMAND" && aws_eks_node_group.system.scaling_config[0].min_size == 3
    error_message = "Three nodes that stay."
  }
  assert {
    condition     = length(aws_eks_node_group.system.taint) == 0 && length(aws_eks_node_group.gpu) == 0
    error_message = "They take any pod, and no GPU pool exists by default."
  }
  assert {
    condition = alltrue([
      aws_launch_template.node["system"].metadata_options[0].http_tokens == "required",
      aws_launch_template.node["system"].metadata_options[0].http_put_response_hop_limit == 1,
      tobool(aws_launch_template.node["system"].block_device_mappings[0].ebs[0].encrypted),
    ])
    error_message = "IMDSv2 only, out of reach of pods, and encrypted disks."
  }
  assert {
    condition     = jsondecode(aws_eks_addon.before_nodes["vpc-cni"].configuration_values).enableNetworkPolicy == "true"
    error_message = "Network policies are enforced."
  }
  assert {
    condition     = toset(concat(keys(aws_eks_addon.before_nodes), keys(aws_eks_addon.on_nodes))) == toset(["vpc-cni", "kube-proxy", "eks-pod-identity-agent", "coredns", "aws-ebs-csi-driver", "metrics-server"])
    error_message = "All addons are there."
  }
}

run "storage" {
  command = plan

  assert {
    condition     = aws_s3_bucket.models.bucket == "shoal-models-123456789012" && !aws_s3_bucket.models.force_destroy
    error_message = "Its name is globally unique, and it is not deleted while it has models."
  }
  assert {
    condition = alltrue([
      aws_s3_bucket_public_access_block.models.block_public_acls,
      aws_s3_bucket_public_access_block.models.block_public_policy,
      aws_s3_bucket_public_access_block.models.ignore_public_acls,
      aws_s3_bucket_public_access_block.models.restrict_public_buckets,
    ])
    error_message = "It cannot become public."
  }
  assert {
    condition     = aws_s3_bucket_versioning.models.versioning_configuration[0].status == "Enabled"
    error_message = "It keeps replaced versions."
  }
  assert {
    condition     = one(one(aws_s3_bucket_server_side_encryption_configuration.models.rule).apply_server_side_encryption_by_default).sse_algorithm == "AES256"
    error_message = "With S3's own keys an object's ETag is its MD5, which workers check."
  }
  assert {
    condition     = jsondecode(aws_s3_bucket_policy.models.policy).Statement[0].Effect == "Deny" && jsondecode(aws_s3_bucket_policy.models.policy).Statement[0].Condition.Bool == { "aws:SecureTransport" = "false" }
    error_message = "Reading it requires TLS."
  }
  assert {
    condition     = toset([for repository in aws_ecr_repository.this : repository.name]) == toset(["shoal/edge", "shoal/router", "shoal/scheduler", "shoal/worker-cpu", "shoal/worker-cuda"])
    error_message = "One repository for each image."
  }
  assert {
    condition     = alltrue([for repository in aws_ecr_repository.this : repository.image_tag_mutability == "IMMUTABLE" && repository.image_scanning_configuration[0].scan_on_push])
    error_message = "Tags are immutable, and images are scanned."
  }
  assert {
    condition = jsonencode([output.registry, output.model_store, output.kubectl_command, output.redis_url]) == jsonencode([
      "123456789012.dkr.ecr.eu-central-1.amazonaws.com/shoal", "s3://shoal-models-123456789012",
      "aws eks update-kubeconfig --region eu-central-1 --name shoal", null,
    ])
    error_message = "Registry, models, kubectl and Redis."
  }
  assert {
    condition = alltrue([
      for statement in jsondecode(aws_iam_role_policy.pod["cluster-autoscaler"].policy).Statement :
      can(statement.Condition.StringEquals["aws:ResourceTag/k8s.io/cluster-autoscaler/shoal"]) || alltrue([for action in flatten([statement.Action]) : can(regex(":(Describe|Get)", action))])
    ])
    error_message = "All permissions but reading are limited to groups of this cluster."
  }
}

run "those_who_are_named" {
  command = plan

  variables {
    public_access_cidrs     = ["203.0.113.7/32"]
    private_access_cidrs    = ["10.0.0.0/16"]
    admin_principal_arns    = ["arn:aws:iam::123456789012:role/operators"]
    worker_service_accounts = { names = ["worker-l4-spot", "worker-h100"] }
    nat_per_zone            = true
    zones                   = ["eu-central-1a", "eu-central-1b"]
  }

  assert {
    condition     = aws_eks_cluster.this.vpc_config[0].endpoint_public_access && aws_eks_cluster.this.vpc_config[0].public_access_cidrs == toset(["203.0.113.7/32"])
    error_message = "The public endpoint is limited to the listed ranges."
  }
  assert {
    condition     = aws_vpc_security_group_ingress_rule.api["10.0.0.0/16"].from_port == 443 && aws_vpc_security_group_ingress_rule.api["10.0.0.0/16"].to_port == 443
    error_message = "A VPN reaches the API and nothing else."
  }
  assert {
    condition     = endswith(aws_eks_access_policy_association.admin["arn:aws:iam::123456789012:role/operators"].policy_arn, "/AmazonEKSClusterAdminPolicy")
    error_message = "The listed administrators have access."
  }
  assert {
    condition = jsondecode(aws_iam_role_policy.pod["worker"].policy).Statement == [
      { Action = "s3:ListBucket", Effect = "Allow", Resource = "arn:aws:s3:::shoal-models-123456789012" },
      { Action = "s3:GetObject", Effect = "Allow", Resource = "arn:aws:s3:::shoal-models-123456789012/*" },
    ]
    error_message = "They may list and read."
  }
  assert {
    condition     = toset([for name, one in aws_eks_pod_identity_association.this : name if one.namespace == "shoal"]) == toset(["shoal/worker-l4-spot", "shoal/worker-h100"])
    error_message = "The role is limited to the listed service accounts."
  }
  assert {
    condition     = toset([for attachment in aws_iam_role_policy_attachment.node : attachment.policy_arn]) == toset(["arn:aws:iam::aws:policy/AmazonEC2ContainerRegistryPullOnly", "arn:aws:iam::aws:policy/AmazonEKSWorkerNodePolicy"])
    error_message = "Nodes may join and pull."
  }
  assert {
    condition     = keys(aws_nat_gateway.this) == ["eu-central-1a", "eu-central-1b"]
    error_message = "Each zone has one."
  }
}
