locals {
  managed_policies = "arn:${local.partition}:iam::aws:policy"

  # Permissions of service accounts in the AWS account, by EKS Pod Identity: a managed policy or our statements.
  pod_identities = {
    worker = {
      namespace        = var.worker_service_accounts.namespace
      service_accounts = var.worker_service_accounts.names
      managed          = null
      statements = [
        { Effect = "Allow", Action = "s3:ListBucket", Resource = local.bucket_arn },
        { Effect = "Allow", Action = "s3:GetObject", Resource = "${local.bucket_arn}/*" },
      ]
    }
    vpc-cni = {
      namespace        = "kube-system"
      service_accounts = ["aws-node"]
      managed          = "AmazonEKS_CNI_Policy"
      statements       = []
    }
    ebs-csi = {
      namespace        = "kube-system"
      service_accounts = ["ebs-csi-controller-sa"]
      managed          = "service-role/AmazonEBSCSIDriverPolicy"
      statements       = []
    }
    cluster-autoscaler = {
      namespace        = "kube-system"
      service_accounts = ["cluster-autoscaler"]
      managed          = null
      statements = [
        {
          Effect = "Allow"
          Action = [
            "autoscaling:DescribeAutoScalingGroups",
            "autoscaling:DescribeAutoScalingInstances",
            "autoscaling:DescribeLaunchConfigurations",
            "autoscaling:DescribeScalingActivities",
            "ec2:DescribeImages",
            "ec2:DescribeInstanceTypes",
            "ec2:DescribeLaunchTemplateVersions",
            "ec2:GetInstanceTypesFromInstanceRequirements",
          ]
          Resource = "*"
        },
        {
          Effect   = "Allow"
          Action   = "eks:DescribeNodegroup"
          Resource = "arn:${local.partition}:eks:${local.region}:${local.account}:nodegroup/${var.name}/*"
        },
        {
          Effect    = "Allow"
          Action    = ["autoscaling:SetDesiredCapacity", "autoscaling:TerminateInstanceInAutoScalingGroup"]
          Resource  = "*"
          Condition = { StringEquals = { "aws:ResourceTag/k8s.io/cluster-autoscaler/${var.name}" = "owned" } }
        },
      ]
    }
  }
  pod_identity_associations = merge([
    for role, identity in local.pod_identities : {
      for service_account in identity.service_accounts :
      "${identity.namespace}/${service_account}" => { role = role, namespace = identity.namespace, service_account = service_account }
    }
  ]...)
}

resource "aws_iam_role" "cluster" {
  name = "${var.name}-cluster"
  tags = var.tags

  assume_role_policy = jsonencode({
    Version   = "2012-10-17"
    Statement = [{ Effect = "Allow", Principal = { Service = "eks.amazonaws.com" }, Action = "sts:AssumeRole" }]
  })
}

resource "aws_iam_role_policy_attachment" "cluster" {
  role       = aws_iam_role.cluster.name
  policy_arn = "${local.managed_policies}/AmazonEKSClusterPolicy"
}

resource "aws_iam_role_policy" "cluster_key" {
  name = "secrets-key"
  role = aws_iam_role.cluster.id

  policy = jsonencode({
    Version = "2012-10-17"
    Statement = [{
      Effect   = "Allow"
      Action   = ["kms:Encrypt", "kms:Decrypt", "kms:ListGrants", "kms:DescribeKey"]
      Resource = aws_kms_key.cluster.arn
    }]
  })
}

# Nodes may join, and pull images. All other permissions belong to service accounts.
resource "aws_iam_role" "node" {
  name = "${var.name}-node"
  tags = var.tags

  assume_role_policy = jsonencode({
    Version   = "2012-10-17"
    Statement = [{ Effect = "Allow", Principal = { Service = "ec2.amazonaws.com" }, Action = "sts:AssumeRole" }]
  })
}

resource "aws_iam_role_policy_attachment" "node" {
  for_each = toset(["AmazonEKSWorkerNodePolicy", "AmazonEC2ContainerRegistryPullOnly"])

  role       = aws_iam_role.node.name
  policy_arn = "${local.managed_policies}/${each.key}"
}

resource "aws_iam_role" "pod" {
  for_each = local.pod_identities

  name = "${var.name}-${each.key}"
  tags = var.tags

  assume_role_policy = jsonencode({
    Version = "2012-10-17"
    Statement = [{
      Effect    = "Allow"
      Principal = { Service = "pods.eks.amazonaws.com" }
      Action    = ["sts:AssumeRole", "sts:TagSession"]
      Condition = { StringEquals = { "aws:SourceAccount" = local.account } }
    }]
  })
}

resource "aws_iam_role_policy" "pod" {
  for_each = { for name, identity in local.pod_identities : name => identity if identity.managed == null }

  name   = each.key
  role   = aws_iam_role.pod[each.key].id
  policy = jsonencode({ Version = "2012-10-17", Statement = each.value.statements })
}

resource "aws_iam_role_policy_attachment" "pod" {
  for_each = { for name, identity in local.pod_identities : name => identity if identity.managed != null }

  role       = aws_iam_role.pod[each.key].name
  policy_arn = "${local.managed_policies}/${each.value.managed}"
}

resource "aws_eks_pod_identity_association" "this" {
  for_each = local.pod_identity_associations

  cluster_name    = aws_eks_cluster.this.name
  namespace       = each.value.namespace
  service_account = each.value.service_account
  role_arn        = aws_iam_role.pod[each.value.role].arn
  tags            = var.tags

  depends_on = [aws_iam_role_policy.pod, aws_iam_role_policy_attachment.pod]
}
