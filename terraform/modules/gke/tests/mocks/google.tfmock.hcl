mock_data "google_project" {
  defaults = {
    number = "123456789012"
  }
}

mock_resource "google_service_account" {
  defaults = {
    email  = "shoal-nodes@my-project.iam.gserviceaccount.com"
    member = "serviceAccount:shoal-nodes@my-project.iam.gserviceaccount.com"
  }
}

mock_resource "google_redis_instance" {
  defaults = {
    host            = "10.40.16.3"
    port            = 6378
    auth_string     = "made-by-google"
    server_ca_certs = [{ cert = "-----BEGIN CERTIFICATE-----" }]
  }
}
