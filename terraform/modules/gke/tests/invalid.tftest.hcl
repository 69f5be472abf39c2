mock_provider "google" {
  source = "./tests/mocks"
}

variables {
  name    = "shoal"
  project = "my-project"
  region  = "europe-west4"
}

run "each_input" {
  command = plan

  variables {
    name                    = "Shoal"
    region                  = "europe-west4-a"
    cidrs                   = { control_plane = "172.16.0.0/24" }
    public_access_cidrs     = ["0.0.0.0/0"]
    private_access_cidrs    = ["0.0.0.0/0"]
    release_channel         = "NIGHTLY"
    system_nodes            = { min = 0 }
    worker_service_accounts = { names = [] }
    redis                   = { memory_gib = 0 }
  }

  expect_failures = [
    var.name,
    var.region,
    var.cidrs,
    var.public_access_cidrs,
    var.private_access_cidrs,
    var.release_channel,
    var.system_nodes,
    var.worker_service_accounts,
    var.redis,
  ]
}

run "a_zone_elsewhere" {
  command         = plan
  expect_failures = [var.zones]

  variables {
    zones = ["us-central1-a"]
  }
}

run "an_unknown_accelerator" {
  command         = plan
  expect_failures = [var.gpu_pools]

  variables {
    gpu_pools = { t4 = { accelerator = "T4", max = 1 } }
  }
}

run "a_machine_of_another_accelerator" {
  command         = plan
  expect_failures = [var.gpu_pools]

  variables {
    gpu_pools = { h100 = { accelerator = "H100", machine_type = "g2-standard-8", max = 1 } }
  }
}

run "an_h100_without_its_disks" {
  command         = plan
  expect_failures = [var.gpu_pools]

  variables {
    gpu_pools = { h100 = { accelerator = "H100", local_ssd = false, max = 1 } }
  }
}

run "a_reservation_of_spot_machines" {
  command         = plan
  expect_failures = [var.gpu_pools]

  variables {
    gpu_pools = { h100 = { accelerator = "H100", reservation = "mine", max = 1 } }
  }
}
