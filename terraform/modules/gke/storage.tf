locals {
  bucket   = var.model_bucket != "" ? var.model_bucket : "${var.project}-${var.name}-models"
  registry = "${var.region}-docker.pkg.dev/${var.project}/${var.name}"
}

resource "google_storage_bucket" "models" {
  #checkov:skip=CKV_GCP_62: who read what is told by Cloud Audit Logs; access logs need a bucket of their own
  project                     = var.project
  location                    = var.region
  name                        = local.bucket
  labels                      = var.labels
  force_destroy               = var.force_destroy
  uniform_bucket_level_access = true
  public_access_prevention    = "enforced"

  versioning {
    enabled = true
  }

  lifecycle_rule {
    condition {
      days_since_noncurrent_time = 30
    }

    action {
      type = "Delete"
    }
  }
}

resource "google_storage_bucket_iam_member" "worker" {
  for_each = local.workers

  bucket = google_storage_bucket.models.name
  role   = "roles/storage.objectViewer"
  member = each.value

  # The identity pool comes with the first cluster of a project that has one.
  depends_on = [google_container_cluster.this]
}

resource "google_artifact_registry_repository" "this" {
  #checkov:skip=CKV_GCP_84: images hold code and no secrets; Google encrypts them with a key of its own
  project       = var.project
  location      = var.region
  repository_id = var.name
  description   = "Images of the mesh ${var.name}"
  format        = "DOCKER"
  labels        = var.labels

  docker_config {
    immutable_tags = true
  }
}

resource "google_artifact_registry_repository_iam_member" "nodes" {
  project    = var.project
  location   = var.region
  repository = google_artifact_registry_repository.this.name
  role       = "roles/artifactregistry.reader"
  member     = google_service_account.nodes.member
}
