output "cluster_name" {
  description = "Name of the GKE cluster."
  value       = google_container_cluster.this.name
}

output "cluster_endpoint" {
  description = "Address of the Kubernetes API."
  value       = google_container_cluster.this.endpoint
}

output "network_id" {
  description = "The VPC network, for peering or a VPN."
  value       = google_compute_network.this.id
}

output "kubectl_command" {
  description = "Command that configures kubectl for the cluster."
  value = join(" ", compact([
    "gcloud container clusters get-credentials ${var.name} --region ${var.region} --project ${var.project}",
    length(var.public_access_cidrs) == 0 ? "--internal-ip" : "",
  ]))
}

output "registry" {
  description = "Prefix of the images, for kustomize's `images`: <registry>/router and so on."
  value       = local.registry
}

output "model_bucket" {
  description = "Name of the bucket for models."
  value       = google_storage_bucket.models.name
}

output "model_store" {
  description = "SHOAL_STORES of the workers, with models as <org>/<name>."
  value       = "gs://${google_storage_bucket.models.name}"
}

output "worker_principals" {
  description = "IAM principals of the workers' service accounts (Workload Identity Federation); they need no annotation."
  value       = values(local.workers)
}

output "node_service_account" {
  description = "Google service account of all nodes."
  value       = google_service_account.nodes.email
}

output "pools" {
  description = "Node selectors, tolerations and GPUs per node of each GPU pool."
  value = {
    for name, pool in local.gpu_pools : name => {
      node_selector = merge(
        { "cloud.google.com/gke-accelerator" = pool.gpu_type },
        pool.capacity == "spot" ? { "cloud.google.com/gke-spot" = "true" } : {},
      )
      labels        = pool.labels
      taints        = [local.gpu_taint]
      gpus_per_node = pool.gpus
      max_nodes     = pool.max
    }
  }
}

output "redis_url" {
  description = "SHOAL_REDIS_URL of routers and schedulers, null without a managed Redis."
  value       = var.redis.enabled ? "${var.redis.tls ? "rediss" : "redis"}://${google_redis_instance.this[0].host}:${google_redis_instance.this[0].port}/0" : null
}

output "redis_password" {
  description = "For SHOAL_REDIS_PASSWORD_FILE, null without a managed Redis. Google makes it; it is in Terraform's state."
  value       = var.redis.enabled ? google_redis_instance.this[0].auth_string : null
  sensitive   = true
}

output "redis_ca" {
  description = "For SHOAL_REDIS_CA: the authorities of the managed Redis, null without one and without TLS."
  value       = var.redis.enabled && var.redis.tls ? join("\n", google_redis_instance.this[0].server_ca_certs[*].cert) : null
}
