resource "google_compute_network" "this" {
  project                 = var.project
  name                    = var.name
  auto_create_subnetworks = false
}

resource "google_compute_subnetwork" "nodes" {
  project                  = var.project
  region                   = var.region
  name                     = "${var.name}-nodes"
  network                  = google_compute_network.this.id
  ip_cidr_range            = var.cidrs.nodes
  private_ip_google_access = true

  secondary_ip_range {
    range_name    = "pods"
    ip_cidr_range = var.cidrs.pods
  }

  secondary_ip_range {
    range_name    = "services"
    ip_cidr_range = var.cidrs.services
  }

  log_config {
    aggregation_interval = "INTERVAL_10_MIN"
    flow_sampling        = 0.1
    metadata             = "EXCLUDE_ALL_METADATA"
  }
}

resource "google_compute_router" "this" {
  project = var.project
  region  = var.region
  name    = var.name
  network = google_compute_network.this.id
}

# Nodes have private addresses only. Google's own services, the bucket and the images, do not go through it.
resource "google_compute_router_nat" "this" {
  project                            = var.project
  region                             = var.region
  name                               = var.name
  router                             = google_compute_router.this.name
  nat_ip_allocate_option             = "AUTO_ONLY"
  source_subnetwork_ip_ranges_to_nat = "ALL_SUBNETWORKS_ALL_IP_RANGES"

  log_config {
    enable = true
    filter = "ERRORS_ONLY"
  }
}

# GKE itself opens 443 and 10250 to the control plane; KEDA's metrics and webhooks listen elsewhere.
resource "google_compute_firewall" "control_plane" {
  project       = var.project
  name          = "${var.name}-control-plane"
  network       = google_compute_network.this.id
  description   = "Control plane to the metrics API and webhooks of KEDA"
  direction     = "INGRESS"
  source_ranges = [var.cidrs.control_plane]
  target_tags   = [local.node_tag]

  allow {
    protocol = "tcp"
    ports    = ["6443", "9443"]
  }
}
