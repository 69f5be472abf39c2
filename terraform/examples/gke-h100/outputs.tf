output "kubectl_command" {
  description = "Makes kubectl speak to the cluster."
  value       = module.mesh.kubectl_command
}

output "cluster_name" {
  description = "Name of the cluster."
  value       = module.mesh.cluster_name
}

output "registry" {
  description = "Prefix of the images."
  value       = module.mesh.registry
}

output "model_store" {
  description = "SHOAL_STORES of the workers."
  value       = module.mesh.model_store
}

output "pools" {
  description = "Labels, taints and node selectors of the GPU pools."
  value       = module.mesh.pools
}

output "worker_principals" {
  description = "The workers' service accounts as IAM knows them."
  value       = module.mesh.worker_principals
}

output "redis_url" {
  description = "SHOAL_REDIS_URL of routers and schedulers."
  value       = module.mesh.redis_url
}

output "redis_password" {
  description = "For SHOAL_REDIS_PASSWORD_FILE."
  value       = module.mesh.redis_password
  sensitive   = true
}

output "redis_ca" {
  description = "For SHOAL_REDIS_CA."
  value       = module.mesh.redis_ca
}
