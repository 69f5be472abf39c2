mock_provider "google" {
  source = "./tests/mocks"
}

variables {
  name    = "shoal"
  project = "my-project"
  region  = "europe-west4"
  gpu_pools = {
    l4-spot = { accelerator = "L4", max = 10 }
    l4-four = { accelerator = "L4", machine_type = "g2-standard-48", max = 1 }
    a100    = { accelerator = "A100", local_ssd = false, max = 4 }
    h100    = { accelerator = "H100", capacity = "on-demand", reservation = "mine", zones = ["europe-west4-b"], max = 2 }
  }
}

run "four_pools" {
  command = plan

  assert {
    condition     = alltrue([for pool in google_container_node_pool.gpu : pool.initial_node_count == 0 && pool.autoscaling[0].total_min_node_count == 0 && pool.autoscaling[0].location_policy == "ANY"])
    error_message = "Without work there is no GPU, and one comes from where there is one."
  }
  assert {
    condition     = google_container_node_pool.gpu["l4-spot"].autoscaling[0].total_max_node_count == 10
    error_message = "max is the pool's, of all zones."
  }
  assert {
    condition = jsonencode({ for name, pool in google_container_node_pool.gpu : name => [pool.node_config[0].machine_type, pool.node_config[0].guest_accelerator[0].type, pool.node_config[0].guest_accelerator[0].count] }) == jsonencode({
      l4-spot = ["g2-standard-4", "nvidia-l4", 1]
      l4-four = ["g2-standard-48", "nvidia-l4", 4]
      a100    = ["a2-highgpu-1g", "nvidia-tesla-a100", 1]
      h100    = ["a3-highgpu-8g", "nvidia-h100-80gb", 8]
    })
    error_message = "Machine, accelerator and how many of it belong together."
  }
  assert {
    condition     = jsonencode({ for name, pool in google_container_node_pool.gpu : name => pool.node_config[0].ephemeral_storage_local_ssd_config[*].local_ssd_count }) == jsonencode({ l4-spot = [1], l4-four = [4], a100 = [], h100 = [16] })
    error_message = "Local disks, as many as the machine has or may have."
  }
  assert {
    condition     = { for name, pool in google_container_node_pool.gpu : name => pool.node_config[0].spot } == { l4-spot = true, l4-four = true, a100 = true, h100 = false }
    error_message = "Spot unless something else is said."
  }
  assert {
    condition     = google_container_node_pool.gpu["h100"].node_config[0].reservation_affinity[0].values == toset(["mine"]) && length(google_container_node_pool.gpu["a100"].node_config[0].reservation_affinity) == 0
    error_message = "A reservation where one is named."
  }
  assert {
    condition     = google_container_node_pool.gpu["h100"].node_locations == toset(["europe-west4-b"])
    error_message = "A pool stays in its zones."
  }
  assert {
    condition     = google_container_node_pool.gpu["l4-spot"].node_config[0].labels == tomap({ "shoal.dev/pool" = "l4-spot", "shoal.dev/accelerator" = "l4" })
    error_message = "Pods select their nodes by these labels."
  }
  assert {
    condition     = jsonencode([output.pools["l4-spot"].node_selector, output.pools["h100"].node_selector]) == jsonencode([{ "cloud.google.com/gke-accelerator" = "nvidia-l4", "cloud.google.com/gke-spot" = "true" }, { "cloud.google.com/gke-accelerator" = "nvidia-h100-80gb" }])
    error_message = "And by what GKE says of them."
  }
}
