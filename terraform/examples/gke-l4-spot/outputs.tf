output "kubectl_command" {
  description = "Command that configures kubectl for the cluster."
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
  description = "IAM principals of the workers' service accounts."
  value       = module.mesh.worker_principals
}
