# One password for all, made by Google: Memorystore has no users. Memorystore for Valkey has, but by tokens of IAM alone, which
# routers and schedulers do not have.
resource "google_redis_instance" "this" {
  #checkov:skip=CKV_GCP_97: TLS is on unless it was turned off, for the reason in the README
  count = var.redis.enabled ? 1 : 0

  project                 = var.project
  region                  = var.region
  name                    = var.name
  display_name            = "Queue of the mesh ${var.name}"
  tier                    = var.redis.replicated ? "STANDARD_HA" : "BASIC"
  memory_size_gb          = var.redis.memory_gib
  redis_version           = var.redis.version
  authorized_network      = google_compute_network.this.id
  connect_mode            = "DIRECT_PEERING"
  auth_enabled            = true
  transit_encryption_mode = var.redis.tls ? "SERVER_AUTHENTICATION" : "DISABLED"
  labels                  = var.labels

  # A queue must not forget: routers refuse to start on a Redis that evicts.
  redis_configs = {
    maxmemory-policy = "noeviction"
  }
}
