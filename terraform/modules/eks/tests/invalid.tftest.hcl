mock_provider "aws" {
  source = "./tests/mocks"
}

variables {
  name = "shoal"
}

run "each_input" {
  command = plan

  variables {
    name                    = "Shoal"
    kubernetes_version      = "1.34.1"
    zones                   = ["eu-central-1a"]
    vpc_cidr                = "10.0.0.0/24"
    public_access_cidrs     = ["0.0.0.0/0"]
    private_access_cidrs    = ["0.0.0.0/0"]
    admin_principal_arns    = ["alice"]
    system_nodes            = { min = 0 }
    worker_service_accounts = { names = [] }
    redis                   = { replicas = 6 }
  }

  expect_failures = [
    var.name,
    var.kubernetes_version,
    var.zones,
    var.vpc_cidr,
    var.public_access_cidrs,
    var.private_access_cidrs,
    var.admin_principal_arns,
    var.system_nodes,
    var.worker_service_accounts,
    var.redis,
  ]
}

run "an_unknown_accelerator" {
  command         = plan
  expect_failures = [var.gpu_pools]

  variables {
    gpu_pools = { t4 = { accelerator = "T4", max = 1 } }
  }
}

run "an_unknown_capacity" {
  command         = plan
  expect_failures = [var.gpu_pools]

  variables {
    gpu_pools = { l4 = { accelerator = "L4", capacity = "preemptible", max = 1 } }
  }
}

run "more_at_least_than_at_most" {
  command         = plan
  expect_failures = [var.gpu_pools]

  variables {
    gpu_pools = { l4 = { accelerator = "L4", min = 2, max = 1 } }
  }
}

run "a_pool_named_system" {
  command         = plan
  expect_failures = [var.gpu_pools]

  variables {
    gpu_pools = { system = { accelerator = "L4", max = 1 } }
  }
}

run "a_zone_that_the_cluster_has_not" {
  command         = plan
  expect_failures = [var.gpu_pools]

  variables {
    zones     = ["eu-central-1a", "eu-central-1b"]
    gpu_pools = { l4 = { accelerator = "L4", zones = ["eu-central-1c"], max = 1 } }
  }
}

run "a_capacity_block_without_a_reservation" {
  command         = plan
  expect_failures = [var.gpu_pools]

  variables {
    gpu_pools = { h100 = { accelerator = "H100", capacity = "capacity-block", max = 1 } }
  }
}

run "a_reservation_of_spot_machines" {
  command         = plan
  expect_failures = [var.gpu_pools]

  variables {
    gpu_pools = { h100 = { accelerator = "H100", reservation = "cr-0123456789abcdef0", max = 1 } }
  }
}

run "a_redis_without_passwords" {
  command         = plan
  expect_failures = [var.redis_passwords]

  variables {
    redis = { enabled = true }
  }
}
