mock_provider "google" {
  source = "./tests/mocks"
}

variables {
  name    = "shoal"
  project = "my-project"
  region  = "europe-west4"
}

run "a_private_cluster" {
  command = plan

  assert {
    condition     = google_container_cluster.this.private_cluster_config[0].enable_private_nodes && google_container_cluster.this.private_cluster_config[0].enable_private_endpoint
    error_message = "Neither nodes nor the Kubernetes API have public addresses."
  }
  assert {
    condition     = length(google_container_cluster.this.master_authorized_networks_config[0].cidr_blocks) == 0
    error_message = "Nobody but nodes may reach the API."
  }
  assert {
    condition     = endswith(output.kubectl_command, "--internal-ip")
    error_message = "kubectl takes the private endpoint."
  }
  assert {
    condition     = google_container_cluster.this.workload_identity_config[0].workload_pool == "my-project.svc.id.goog"
    error_message = "Workload Identity is on."
  }
  assert {
    condition     = google_container_cluster.this.datapath_provider == "ADVANCED_DATAPATH" && google_container_cluster.this.networking_mode == "VPC_NATIVE"
    error_message = "Dataplane V2 enforces network policies."
  }
  assert {
    condition     = google_project_iam_member.nodes.role == "roles/container.defaultNodeServiceAccount"
    error_message = "Nodes may write logs and metrics."
  }
  assert {
    condition     = google_compute_firewall.control_plane.source_ranges == toset(["172.16.0.0/28"])
    error_message = "KEDA's webhooks are open to the control plane only."
  }
  assert {
    condition     = google_container_node_pool.system.autoscaling[0].total_min_node_count == 3 && length(google_container_node_pool.gpu) == 0
    error_message = "Three nodes that stay, and no GPU unless one is asked for."
  }
  assert {
    condition     = google_container_node_pool.system.node_config[0].shielded_instance_config[0].enable_secure_boot && google_container_node_pool.system.node_config[0].workload_metadata_config[0].mode == "GKE_METADATA"
    error_message = "Shielded, and pods do not see the node's identity."
  }
  assert {
    condition     = google_artifact_registry_repository.this.docker_config[0].immutable_tags && output.registry == "europe-west4-docker.pkg.dev/my-project/shoal"
    error_message = "A tag stays what it is."
  }
  assert {
    condition     = google_artifact_registry_repository_iam_member.nodes.role == "roles/artifactregistry.reader"
    error_message = "Nodes may pull."
  }
}

run "those_who_are_named" {
  command = plan

  variables {
    public_access_cidrs     = ["203.0.113.7/32"]
    private_access_cidrs    = ["10.0.0.0/16"]
    worker_service_accounts = { names = ["worker-h100", "worker-l4-spot"] }
  }

  assert {
    condition     = !google_container_cluster.this.private_cluster_config[0].enable_private_endpoint && length(google_container_cluster.this.master_authorized_networks_config[0].cidr_blocks) == 2
    error_message = "The public endpoint is limited to the listed ranges."
  }
  assert {
    condition     = google_storage_bucket.models.uniform_bucket_level_access && google_storage_bucket.models.public_access_prevention == "enforced" && google_storage_bucket.models.versioning[0].enabled
    error_message = "Nothing of it can be public, and it keeps what was replaced."
  }
  assert {
    condition = { for name, one in google_storage_bucket_iam_member.worker : name => [one.role, one.member] } == {
      for name in ["worker-h100", "worker-l4-spot"] : name => [
        "roles/storage.objectViewer",
        "principal://iam.googleapis.com/projects/123456789012/locations/global/workloadIdentityPools/my-project.svc.id.goog/subject/ns/shoal/sa/${name}",
      ]
    }
    error_message = "The workers' service accounts may read it."
  }
}
