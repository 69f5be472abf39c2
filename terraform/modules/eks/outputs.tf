output "cluster_name" {
  description = "Name of the EKS cluster."
  value       = aws_eks_cluster.this.name
}

output "cluster_endpoint" {
  description = "Address of the Kubernetes API."
  value       = aws_eks_cluster.this.endpoint
}

output "cluster_security_group_id" {
  description = "Security group of the control plane, the nodes and their pods."
  value       = aws_eks_cluster.this.vpc_config[0].cluster_security_group_id
}

output "vpc_id" {
  description = "The VPC, for peering, a VPN or flow logs."
  value       = aws_vpc.this.id
}

output "kubectl_command" {
  description = "Command that configures kubectl for the cluster."
  value       = "aws eks update-kubeconfig --region ${local.region} --name ${var.name}"
}

output "registry" {
  description = "Prefix of the images, for kustomize's `images`: <registry>/router and so on."
  value       = local.registry
}

output "model_bucket" {
  description = "Name of the bucket for models."
  value       = aws_s3_bucket.models.bucket
}

output "model_store" {
  description = "SHOAL_STORES of the workers, with models as <org>/<name>."
  value       = "s3://${aws_s3_bucket.models.bucket}"
}

output "worker_role_arn" {
  description = "Role of the workers' service accounts. EKS Pod Identity gives it; they need no annotation."
  value       = aws_iam_role.pod["worker"].arn
}

output "cluster_autoscaler_role_arn" {
  description = "Role of the service account kube-system/cluster-autoscaler, given by EKS Pod Identity."
  value       = aws_iam_role.pod["cluster-autoscaler"].arn
}

output "pools" {
  description = "Node selectors, tolerations and GPUs per node of each GPU pool."
  value = {
    for name, pool in local.gpu_pools : name => {
      node_selector = {
        "shoal.dev/accelerator"          = pool.labels["shoal.dev/accelerator"]
        "eks.amazonaws.com/capacityType" = pool.capacity_type
      }
      labels        = pool.labels
      taints        = [local.gpu_taint]
      gpus_per_node = pool.gpus[0]
      max_nodes     = pool.max
    }
  }
}

output "redis_url" {
  description = "SHOAL_REDIS_URL of the routers, null without a managed Redis. The scheduler's has shoal-scheduler@ in it. The system's authorities are trusted: no SHOAL_REDIS_CA."
  value       = var.redis.enabled ? "rediss://shoal-router@${aws_elasticache_replication_group.this[0].primary_endpoint_address}:6379/0" : null
}
