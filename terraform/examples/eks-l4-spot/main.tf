# L4s on spot instances (g6), from none to twenty: for k8s/overlays/eks-g6-spot, with Redis in the cluster.
provider "aws" {
  region = var.region

  default_tags {
    tags = { "shoal.dev/mesh" = var.name }
  }
}

module "mesh" {
  source = "../../modules/eks"

  name                = var.name
  zones               = var.zones
  public_access_cidrs = var.public_access_cidrs

  gpu_pools = {
    l4-spot = { accelerator = "L4", max = 20 }
  }
}
