locals {
  usual_machine_types = { L4 = "g2-standard-4", A100 = "a2-highgpu-1g", H100 = "a3-highgpu-8g" }
  accelerators        = { L4 = "nvidia-l4", A100 = "nvidia-tesla-a100", H100 = "nvidia-h100-80gb" }
  # https://cloud.google.com/compute/docs/gpus: names of a2 and a3 contain the number of GPUs; other g2 machines have one.
  gpus_of_g2     = { g2-standard-24 = 2, g2-standard-48 = 4, g2-standard-96 = 8 }
  disks_of_a_gpu = { L4 = 1, A100 = 1, H100 = 2 }
  machine_types  = { for name, pool in var.gpu_pools : name => pool.machine_type != "" ? pool.machine_type : local.usual_machine_types[pool.accelerator] }
  gpus           = { for name, type in local.machine_types : name => try(tonumber(regex("^a[23]-highgpu-([0-9]+)g$", type)[0]), local.gpus_of_g2[type], 1) }
  gpu_taint      = { key = "nvidia.com/gpu", value = "present", effect = "NoSchedule" }

  gpu_pools = {
    for name, pool in var.gpu_pools : name => merge(pool, {
      machine_type = local.machine_types[name]
      gpu_type     = local.accelerators[pool.accelerator]
      gpus         = local.gpus[name]
      local_ssds   = pool.local_ssd ? local.gpus[name] * local.disks_of_a_gpu[pool.accelerator] : 0
      labels = {
        "shoal.dev/pool"        = name
        "shoal.dev/accelerator" = lower(pool.accelerator)
      }
    })
  }
}

resource "google_service_account" "nodes" {
  project      = var.project
  account_id   = "${var.name}-nodes"
  display_name = "Nodes of the cluster ${var.name}"
}

# Logs and metrics only. Pods get permissions by their service accounts.
resource "google_project_iam_member" "nodes" {
  project = var.project
  role    = "roles/container.defaultNodeServiceAccount"
  member  = google_service_account.nodes.member
}

resource "google_container_node_pool" "system" {
  project            = var.project
  location           = var.region
  cluster            = google_container_cluster.this.name
  name               = "system"
  initial_node_count = 1

  autoscaling {
    total_min_node_count = var.system_nodes.min
    total_max_node_count = var.system_nodes.max
    location_policy      = "BALANCED"
  }

  management {
    auto_repair  = true
    auto_upgrade = true
  }

  node_config {
    machine_type    = var.system_nodes.machine_type
    image_type      = "COS_CONTAINERD"
    disk_type       = "pd-balanced"
    disk_size_gb    = var.system_nodes.disk_gib
    service_account = google_service_account.nodes.email
    oauth_scopes    = ["https://www.googleapis.com/auth/cloud-platform"]
    resource_labels = var.labels
    tags            = [local.node_tag]
    metadata        = { disable-legacy-endpoints = "true" }

    gcfs_config {
      enabled = true
    }

    shielded_instance_config {
      enable_secure_boot          = true
      enable_integrity_monitoring = true
    }

    workload_metadata_config {
      mode = "GKE_METADATA"
    }
  }

  lifecycle {
    ignore_changes = [initial_node_count]
  }
}

# GKE taints nodes with GPUs by itself (local.gpu_taint), and labels spot nodes cloud.google.com/gke-spot=true.
resource "google_container_node_pool" "gpu" {
  #checkov:skip=CKV_GCP_68: secure boot would refuse GPU drivers that are not signed
  for_each = local.gpu_pools

  project            = var.project
  location           = var.region
  node_locations     = length(each.value.zones) > 0 ? each.value.zones : null
  cluster            = google_container_cluster.this.name
  name               = each.key
  initial_node_count = 0

  autoscaling {
    total_min_node_count = each.value.min
    total_max_node_count = each.value.max
    location_policy      = "ANY"
  }

  management {
    auto_repair  = true
    auto_upgrade = true
  }

  # An upgrade needs no additional GPU, because GPUs are scarce.
  upgrade_settings {
    strategy        = "SURGE"
    max_surge       = 0
    max_unavailable = 1
  }

  node_config {
    machine_type    = each.value.machine_type
    image_type      = "COS_CONTAINERD"
    spot            = each.value.capacity == "spot"
    disk_type       = "pd-balanced"
    disk_size_gb    = each.value.disk_gib
    service_account = google_service_account.nodes.email
    oauth_scopes    = ["https://www.googleapis.com/auth/cloud-platform"]
    labels          = each.value.labels
    resource_labels = var.labels
    tags            = [local.node_tag]
    metadata        = { disable-legacy-endpoints = "true" }

    guest_accelerator {
      type  = each.value.gpu_type
      count = each.value.gpus

      gpu_driver_installation_config {
        gpu_driver_version = "LATEST"
      }
    }

    dynamic "ephemeral_storage_local_ssd_config" {
      for_each = each.value.local_ssds > 0 ? [each.value.local_ssds] : []

      content {
        local_ssd_count = ephemeral_storage_local_ssd_config.value
      }
    }

    dynamic "reservation_affinity" {
      for_each = each.value.reservation == null ? [] : [each.value.reservation]

      content {
        consume_reservation_type = "SPECIFIC_RESERVATION"
        key                      = "compute.googleapis.com/reservation-name"
        values                   = [reservation_affinity.value]
      }
    }

    # Image streaming: a container starts while its image is still downloading.
    gcfs_config {
      enabled = true
    }

    gvnic {
      enabled = true
    }

    shielded_instance_config {
      enable_secure_boot          = false
      enable_integrity_monitoring = true
    }

    workload_metadata_config {
      mode = "GKE_METADATA"
    }
  }

  lifecycle {
    ignore_changes = [initial_node_count]
  }
}
