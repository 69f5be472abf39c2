data "google_project" "this" {
  project_id = var.project
}

locals {
  workload_pool = "${var.project}.svc.id.goog"
  node_tag      = "${var.name}-node"
  # Of the Kubernetes service accounts themselves: no Google service account stands between, and no annotation is needed.
  subjects = "principal://iam.googleapis.com/projects/${data.google_project.this.number}/locations/global/workloadIdentityPools/${local.workload_pool}/subject"
  workers  = { for name in var.worker_service_accounts.names : name => "${local.subjects}/ns/${var.worker_service_accounts.namespace}/sa/${name}" }
}

resource "google_container_cluster" "this" {
  #checkov:skip=CKV_GCP_65: groups for RBAC need a Google Workspace domain, which a module cannot assume
  #checkov:skip=CKV_GCP_66: which images may run is the policy of a project (Binary Authorization)
  #checkov:skip=CKV_GCP_61: Dataplane V2 sees traffic within a node, too
  #checkov:skip=CKV_GCP_12: Dataplane V2 enforces network policies; the addon that is looked for is for clusters without it
  project             = var.project
  location            = var.region
  node_locations      = length(var.zones) > 0 ? var.zones : null
  name                = var.name
  resource_labels     = var.labels
  deletion_protection = var.deletion_protection

  network           = google_compute_network.this.id
  subnetwork        = google_compute_subnetwork.nodes.id
  networking_mode   = "VPC_NATIVE"
  datapath_provider = "ADVANCED_DATAPATH"

  enable_shielded_nodes = true

  # All nodes are of pools of their own; the one that a cluster begins with goes at once.
  remove_default_node_pool = true
  initial_node_count       = 1

  node_config {
    machine_type    = var.system_nodes.machine_type
    service_account = google_service_account.nodes.email
    oauth_scopes    = ["https://www.googleapis.com/auth/cloud-platform"]

    shielded_instance_config {
      enable_secure_boot          = true
      enable_integrity_monitoring = true
    }

    workload_metadata_config {
      mode = "GKE_METADATA"
    }
  }

  ip_allocation_policy {
    cluster_secondary_range_name  = "pods"
    services_secondary_range_name = "services"
  }

  private_cluster_config {
    enable_private_nodes    = true
    enable_private_endpoint = length(var.public_access_cidrs) == 0
    master_ipv4_cidr_block  = var.cidrs.control_plane
  }

  master_authorized_networks_config {
    dynamic "cidr_blocks" {
      for_each = toset(concat(var.public_access_cidrs, var.private_access_cidrs))

      content {
        cidr_block   = cidr_blocks.key
        display_name = cidr_blocks.key
      }
    }
  }

  master_auth {
    client_certificate_config {
      issue_client_certificate = false
    }
  }

  workload_identity_config {
    workload_pool = local.workload_pool
  }

  release_channel {
    channel = var.release_channel
  }

  dynamic "database_encryption" {
    for_each = var.secrets_key == "" ? [] : [var.secrets_key]

    content {
      state    = "ENCRYPTED"
      key_name = database_encryption.value
    }
  }

  logging_config {
    enable_components = ["SYSTEM_COMPONENTS", "WORKLOADS", "APISERVER", "CONTROLLER_MANAGER", "SCHEDULER"]
  }

  monitoring_config {
    enable_components = ["SYSTEM_COMPONENTS"]

    managed_prometheus {
      enabled = true
    }
  }

  # Of the node pool that is gone.
  lifecycle {
    ignore_changes = [node_config]
  }

  depends_on = [google_project_iam_member.nodes]
}
