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
  description = "Region with g2 machines."
  type        = string
  default     = "europe-west4"
  nullable    = false
}

variable "zones" {
  description = "Zones of the cluster, two or more. Empty: the default zones, which may not have such machines."
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
