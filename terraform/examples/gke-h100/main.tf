# H100s (a3), reserved or spot: for k8s/overlays/gke-h100. Redis is the one in the cluster: whether Memorystore's certificate can be
# verified is untested (the module's README), and without TLS its one password would cross the network in plain text.
provider "google" {
  project = var.project
  region  = var.region
}

module "mesh" {
  source = "../../modules/gke"

  name                = var.name
  project             = var.project
  region              = var.region
  labels              = { mesh = var.name }
  zones               = var.zones
  public_access_cidrs = var.public_access_cidrs

  gpu_pools = {
    h100 = {
      accelerator = "H100"
      capacity    = var.reservation == null ? "spot" : "on-demand"
      reservation = var.reservation
      zones       = var.gpu_zones
      max         = 3
      disk_gib    = 500 # /var/lib/shoal, the models of eight workers
    }
  }
}
