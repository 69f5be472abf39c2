# H100s (p5) of a capacity block or a reservation, with a managed Redis: for k8s/overlays/eks-p5.
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
  nat_per_zone        = true
  public_access_cidrs = var.public_access_cidrs

  gpu_pools = {
    h100 = {
      accelerator = "H100"
      capacity    = var.capacity
      reservation = var.reservation
      zones       = var.gpu_zones
      max         = 3
      disk_gib    = 500 # /var/lib/shoal, the models of eight workers
    }
  }

  redis           = { enabled = true, node_type = "cache.m7g.large" }
  redis_passwords = var.redis_passwords
}
