locals {
  # The smallest first: the autoscaler takes it for the measure of a node that is not there yet.
  usual_instance_types = {
    L4   = ["g6.xlarge", "g6.2xlarge"]
    A100 = ["p4d.24xlarge"]
    H100 = ["p5.48xlarge"]
  }
  capacity_types = { spot = "SPOT", on-demand = "ON_DEMAND", capacity-block = "CAPACITY_BLOCK" }
  gpu_taint      = { key = "nvidia.com/gpu", value = "true", effect = "NoSchedule" }

  instance_types = { for name, pool in var.gpu_pools : name => length(pool.instance_types) > 0 ? pool.instance_types : local.usual_instance_types[pool.accelerator] }

  gpu_pools = {
    for name, pool in var.gpu_pools : name => merge(pool, {
      instance_types = local.instance_types[name]
      capacity_type  = local.capacity_types[pool.capacity]
      zones          = length(pool.zones) > 0 ? pool.zones : local.zones
      gpus           = distinct([for type in local.instance_types[name] : sum(concat([0], data.aws_ec2_instance_type.gpu[type].gpus[*].count))])
      gpu_names      = distinct(flatten([for type in local.instance_types[name] : data.aws_ec2_instance_type.gpu[type].gpus[*].name]))
      storage_gb     = min([for type in local.instance_types[name] : coalesce(data.aws_ec2_instance_type.gpu[type].total_instance_storage, 0)]...)
      labels = {
        "shoal.dev/pool"        = name
        "shoal.dev/accelerator" = lower(pool.accelerator)
        # By this the autoscaler knows that a node without GPUs is not ready yet, and by the next NVIDIA's device plugin where to run.
        "k8s.amazonaws.com/accelerator" = "nvidia-${lower(pool.accelerator)}"
        "nvidia.com/gpu.present"        = "true"
      }
    })
  }

  # What the autoscaler cannot see of a group without nodes.
  node_templates = {
    for name, pool in local.gpu_pools : name => merge(
      { for key, value in pool.labels : "label/${key}" => value },
      {
        "label/eks.amazonaws.com/capacityType" = pool.capacity_type
        "taint/${local.gpu_taint.key}"         = "${local.gpu_taint.value}:${local.gpu_taint.effect}"
        "resources/nvidia.com/gpu"             = tostring(pool.gpus[0])
        "resources/ephemeral-storage"          = pool.storage_gb > 0 ? "${floor(pool.storage_gb * 0.9)}G" : "${pool.disk_gib}Gi"
      },
    )
  }
  node_template_tags = merge([
    for pool, template in local.node_templates : {
      for key, value in template : "${pool} ${key}" => { pool = pool, key = "k8s.io/cluster-autoscaler/node-template/${key}", value = value }
    }
  ]...)

  # Pods reach the metadata service (2) only where workers ask it for spot notices; what nodes may do there is to join and to pull.
  launch_templates = merge(
    { system = { disk_gib = var.system_nodes.disk_gib, hop_limit = 1, user_data = null, reservation = null, is_block = false } },
    {
      for name, pool in local.gpu_pools : name => {
        disk_gib    = pool.disk_gib
        hop_limit   = pool.capacity == "spot" ? 2 : 1
        user_data   = base64encode(templatefile("${path.module}/user-data.tftpl", { instance_store = pool.storage_gb > 0 }))
        reservation = pool.reservation
        is_block    = pool.capacity == "capacity-block"
      }
    },
  )
}

data "aws_ec2_instance_type" "gpu" {
  for_each = toset(flatten(values(local.instance_types)))

  instance_type = each.key
}

resource "aws_launch_template" "node" {
  #checkov:skip=CKV_AWS_341: workers on spot nodes ask the metadata service for the notice, from a pod that is one hop away
  for_each = local.launch_templates

  name                   = "${var.name}-${each.key}"
  update_default_version = true
  user_data              = each.value.user_data
  tags                   = var.tags

  metadata_options {
    http_endpoint               = "enabled"
    http_tokens                 = "required"
    http_put_response_hop_limit = each.value.hop_limit
  }

  block_device_mappings {
    device_name = "/dev/xvda"

    ebs {
      volume_type           = "gp3"
      volume_size           = each.value.disk_gib
      encrypted             = true
      delete_on_termination = true
    }
  }

  dynamic "instance_market_options" {
    for_each = each.value.is_block ? ["capacity-block"] : []

    content {
      market_type = instance_market_options.value
    }
  }

  dynamic "capacity_reservation_specification" {
    for_each = each.value.reservation == null ? [] : [each.value.reservation]

    content {
      capacity_reservation_target {
        capacity_reservation_id = capacity_reservation_specification.value
      }
    }
  }

  dynamic "tag_specifications" {
    for_each = toset(["instance", "volume"])

    content {
      resource_type = tag_specifications.key
      tags          = merge(var.tags, { Name = "${var.name}-${each.key}" })
    }
  }
}

resource "aws_eks_node_group" "system" {
  cluster_name    = aws_eks_cluster.this.name
  node_group_name = "system"
  version         = var.kubernetes_version
  node_role_arn   = aws_iam_role.node.arn
  subnet_ids      = [for subnet in aws_subnet.private : subnet.id]
  ami_type        = "AL2023_x86_64_STANDARD"
  capacity_type   = "ON_DEMAND"
  instance_types  = var.system_nodes.instance_types
  tags            = var.tags

  launch_template {
    id      = aws_launch_template.node["system"].id
    version = aws_launch_template.node["system"].latest_version
  }

  scaling_config {
    min_size     = var.system_nodes.min
    desired_size = var.system_nodes.min
    max_size     = var.system_nodes.max
  }

  update_config {
    max_unavailable = 1
  }

  # The autoscaler's from here on.
  lifecycle {
    ignore_changes = [scaling_config[0].desired_size]
  }

  depends_on = [aws_eks_addon.before_nodes, aws_iam_role_policy_attachment.node]
}

resource "aws_eks_node_group" "gpu" {
  for_each = local.gpu_pools

  cluster_name    = aws_eks_cluster.this.name
  node_group_name = each.key
  version         = var.kubernetes_version
  node_role_arn   = aws_iam_role.node.arn
  subnet_ids      = [for zone in each.value.zones : aws_subnet.private[zone].id]
  ami_type        = "AL2023_x86_64_NVIDIA"
  capacity_type   = each.value.capacity_type
  instance_types  = each.value.instance_types
  labels          = each.value.labels
  tags            = var.tags

  launch_template {
    id      = aws_launch_template.node[each.key].id
    version = aws_launch_template.node[each.key].latest_version
  }

  taint {
    key    = local.gpu_taint.key
    value  = local.gpu_taint.value
    effect = "NO_SCHEDULE"
  }

  scaling_config {
    min_size     = each.value.min
    desired_size = each.value.min
    max_size     = each.value.max
  }

  update_config {
    max_unavailable = 1
  }

  lifecycle {
    ignore_changes = [scaling_config[0].desired_size]

    precondition {
      condition     = join(", ", each.value.gpu_names) == each.value.accelerator
      error_message = "Pool ${each.key} is to have ${each.value.accelerator}, but ${join(", ", each.value.instance_types)} have ${join(", ", each.value.gpu_names)}."
    }
    precondition {
      condition     = length(each.value.gpus) == 1
      error_message = "Instance types of pool ${each.key} must all have as many GPUs: the autoscaler takes a node for any other of its group."
    }
  }

  depends_on = [aws_eks_addon.before_nodes, aws_iam_role_policy_attachment.node]
}

resource "aws_autoscaling_group_tag" "node_template" {
  for_each = local.node_template_tags

  autoscaling_group_name = aws_eks_node_group.gpu[each.value.pool].resources[0].autoscaling_groups[0].name

  tag {
    key                 = each.value.key
    value               = each.value.value
    propagate_at_launch = false
  }
}
