data "aws_caller_identity" "current" {}
data "aws_partition" "current" {}
data "aws_region" "current" {}

locals {
  account   = data.aws_caller_identity.current.account_id
  partition = data.aws_partition.current.partition
  region    = data.aws_region.current.id
  log_group = "/aws/eks/${var.name}/cluster"

  # kube-proxy and the network must be there for a node to be ready; Deployments need nodes to be healthy.
  addons_before_nodes = {
    vpc-cni                = { enableNetworkPolicy = "true" }
    kube-proxy             = {}
    eks-pod-identity-agent = {}
  }
  addons_on_nodes = {
    coredns            = {}
    aws-ebs-csi-driver = {}
    metrics-server     = {}
  }
}

resource "aws_kms_key" "cluster" {
  description         = "Secrets and logs of the EKS cluster ${var.name}"
  enable_key_rotation = true
  tags                = var.tags

  policy = jsonencode({
    Version = "2012-10-17"
    Statement = [
      {
        Sid       = "RightsAreGivenByIam"
        Effect    = "Allow"
        Principal = { AWS = "arn:${local.partition}:iam::${local.account}:root" }
        Action    = "kms:*"
        Resource  = "*"
      },
      {
        Sid       = "ControlPlaneLogs"
        Effect    = "Allow"
        Principal = { Service = "logs.${local.region}.amazonaws.com" }
        Action    = ["kms:Encrypt", "kms:Decrypt", "kms:ReEncrypt*", "kms:GenerateDataKey*", "kms:DescribeKey"]
        Resource  = "*"
        Condition = {
          ArnEquals = { "kms:EncryptionContext:aws:logs:arn" = "arn:${local.partition}:logs:${local.region}:${local.account}:log-group:${local.log_group}" }
        }
      },
    ]
  })
}

resource "aws_kms_alias" "cluster" {
  name          = "alias/${var.name}"
  target_key_id = aws_kms_key.cluster.key_id
}

# Created before the cluster, which would otherwise create one without expiry.
resource "aws_cloudwatch_log_group" "cluster" {
  name              = local.log_group
  retention_in_days = var.log_retention_days
  kms_key_id        = aws_kms_key.cluster.arn
  tags              = var.tags
}

resource "aws_eks_cluster" "this" {
  name                          = var.name
  version                       = var.kubernetes_version
  role_arn                      = aws_iam_role.cluster.arn
  enabled_cluster_log_types     = ["api", "audit", "authenticator", "controllerManager", "scheduler"]
  bootstrap_self_managed_addons = false
  tags                          = var.tags

  vpc_config {
    subnet_ids              = [for subnet in aws_subnet.private : subnet.id]
    endpoint_private_access = true
    endpoint_public_access  = length(var.public_access_cidrs) > 0
    public_access_cidrs     = length(var.public_access_cidrs) > 0 ? var.public_access_cidrs : null
  }

  encryption_config {
    resources = ["secrets"]

    provider {
      key_arn = aws_kms_key.cluster.arn
    }
  }

  access_config {
    authentication_mode                         = "API"
    bootstrap_cluster_creator_admin_permissions = true
  }

  upgrade_policy {
    support_type = "STANDARD"
  }

  depends_on = [aws_cloudwatch_log_group.cluster, aws_iam_role_policy_attachment.cluster, aws_iam_role_policy.cluster_key]
}

resource "aws_vpc_security_group_ingress_rule" "api" {
  for_each = toset(var.private_access_cidrs)

  security_group_id = aws_eks_cluster.this.vpc_config[0].cluster_security_group_id
  description       = "Kubernetes API from ${each.key}"
  cidr_ipv4         = each.key
  ip_protocol       = "tcp"
  from_port         = 443
  to_port           = 443
  tags              = var.tags
}

resource "aws_eks_access_entry" "admin" {
  for_each = var.admin_principal_arns

  cluster_name  = aws_eks_cluster.this.name
  principal_arn = each.key
  tags          = var.tags
}

resource "aws_eks_access_policy_association" "admin" {
  for_each = aws_eks_access_entry.admin

  cluster_name  = aws_eks_cluster.this.name
  principal_arn = each.value.principal_arn
  policy_arn    = "arn:${local.partition}:eks::aws:cluster-access-policy/AmazonEKSClusterAdminPolicy"

  access_scope {
    type = "cluster"
  }
}

resource "aws_eks_addon" "before_nodes" {
  for_each = local.addons_before_nodes

  cluster_name                = aws_eks_cluster.this.name
  addon_name                  = each.key
  configuration_values        = length(each.value) > 0 ? jsonencode(each.value) : null
  resolve_conflicts_on_create = "OVERWRITE"
  resolve_conflicts_on_update = "OVERWRITE"
  tags                        = var.tags

  depends_on = [aws_eks_pod_identity_association.this]
}

resource "aws_eks_addon" "on_nodes" {
  for_each = local.addons_on_nodes

  cluster_name                = aws_eks_cluster.this.name
  addon_name                  = each.key
  configuration_values        = length(each.value) > 0 ? jsonencode(each.value) : null
  resolve_conflicts_on_create = "OVERWRITE"
  resolve_conflicts_on_update = "OVERWRITE"
  tags                        = var.tags

  depends_on = [aws_eks_node_group.system]
}
