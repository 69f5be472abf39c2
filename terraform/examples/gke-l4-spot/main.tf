# L4s on spot machines (g2), from none to twenty: for k8s/overlays/gke-l4-spot, with Redis in the cluster.
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
    l4-spot = { accelerator = "L4", max = 20 }
  }
}
