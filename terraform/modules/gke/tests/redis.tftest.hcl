mock_provider "google" {
  source = "./tests/mocks"
}

variables {
  name    = "shoal"
  project = "my-project"
  region  = "europe-west4"
}

run "none_unless_asked_for" {
  command = plan

  assert {
    condition     = length(google_redis_instance.this) == 0 && output.redis_url == null
    error_message = "Redis is in the cluster by default."
  }
}

run "encrypted_and_for_those_with_the_password" {
  command = apply

  variables {
    redis = { enabled = true }
  }

  assert {
    condition     = google_redis_instance.this[0].auth_enabled && google_redis_instance.this[0].transit_encryption_mode == "SERVER_AUTHENTICATION" && google_redis_instance.this[0].tier == "STANDARD_HA"
    error_message = "A password, TLS, and a replica that takes over."
  }
  assert {
    condition     = google_redis_instance.this[0].redis_configs == tomap({ maxmemory-policy = "noeviction" })
    error_message = "Nothing queued is evicted."
  }
  assert {
    condition     = output.redis_url == "rediss://10.40.16.3:6378/0" && output.redis_ca == "-----BEGIN CERTIFICATE-----"
    error_message = "Its address, and whom to trust."
  }
}

run "without_tls" {
  command = apply

  variables {
    redis = { enabled = true, tls = false }
  }

  assert {
    condition     = startswith(output.redis_url, "redis://") && output.redis_ca == null
    error_message = "In plain text where it was asked for."
  }
}
