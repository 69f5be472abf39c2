variable "name" {
  description = "Name of the cluster."
  type        = string
  default     = "shoal"
  nullable    = false
}

variable "region" {
  description = "Region with p5 instances."
  type        = string
  default     = "us-east-2"
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

variable "capacity" {
  description = "on-demand, spot or capacity-block."
  type        = string
  default     = "on-demand"
  nullable    = false
}

variable "reservation" {
  description = "Id of the capacity reservation or capacity block."
  type        = string
  default     = null
}

variable "redis_passwords" {
  description = "Passwords of Redis' users, as TF_VAR_redis_passwords; 16 to 128 letters and digits each."
  type        = object({ router = string, scheduler = string })
  nullable    = false
  sensitive   = true
}
