variable "name" {
  description = "Name of the cluster."
  type        = string
  default     = "shoal"
  nullable    = false
}

variable "project" {
  description = "Id of the Google Cloud project."
  type        = string
  nullable    = false
}

variable "region" {
  description = "Region with a3 machines."
  type        = string
  default     = "us-central1"
  nullable    = false
}

variable "zones" {
  description = "Zones of the cluster, two or more. Empty: the default zones, which may not have such machines."
  type        = list(string)
  default     = []
  nullable    = false
}

variable "gpu_zones" {
  description = "Zones of the H100s, among zones: a reservation is in one of them. Empty: all."
  type        = list(string)
  default     = []
  nullable    = false
}

variable "public_access_cidrs" {
  description = "Address ranges that may reach the Kubernetes API from the internet: your address as a /32. Empty: none."
  type        = list(string)
  default     = []
  nullable    = false
}

variable "reservation" {
  description = "Name of the reservation. None: spot machines."
  type        = string
  default     = null
}
