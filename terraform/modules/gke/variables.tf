variable "name" {
  description = "Name of the cluster, and prefix of everything around it."
  type        = string
  nullable    = false

  validation {
    condition     = can(regex("^[a-z][a-z0-9-]{1,22}[a-z0-9]$", var.name))
    error_message = "name must be 3 to 24 lower-case letters, digits and '-', and begin with a letter: ids of service accounts have 30."
  }
}

variable "project" {
  description = "Id of the Google Cloud project."
  type        = string
  nullable    = false
}

variable "region" {
  description = "Region of everything."
  type        = string
  nullable    = false

  validation {
    condition     = can(regex("^[a-z]+-[a-z]+[0-9]+$", var.region))
    error_message = "region must be a region such as \"europe-west4\", not a zone."
  }
}

variable "labels" {
  description = "Labels of every resource that can have some."
  type        = map(string)
  default     = {}
  nullable    = false
}

# The network

variable "zones" {
  description = "Zones of the nodes. Empty: Google chooses. GPU capacity differs from zone to zone."
  type        = list(string)
  default     = []
  nullable    = false

  validation {
    condition     = alltrue([for zone in var.zones : startswith(zone, "${var.region}-")])
    error_message = "zones must be zones of the region."
  }
}

variable "cidrs" {
  description = "Addresses of nodes, pods, services and the control plane (a /28). They must not overlap."
  type = object({
    nodes         = optional(string, "10.40.0.0/20")
    pods          = optional(string, "10.44.0.0/14")
    services      = optional(string, "10.41.0.0/20")
    control_plane = optional(string, "172.16.0.0/28")
  })
  default  = {}
  nullable = false

  validation {
    condition     = alltrue([for cidr in values(var.cidrs) : can(cidrhost(cidr, 0))]) && endswith(var.cidrs.control_plane, "/28")
    error_message = "cidrs must be IPv4 ranges, the control plane's a /28."
  }
}

variable "public_access_cidrs" {
  description = "Address ranges that may reach the Kubernetes API from the internet. Empty: none; the endpoint is private."
  type        = list(string)
  default     = []
  nullable    = false

  validation {
    condition     = alltrue([for cidr in var.public_access_cidrs : can(cidrhost(cidr, 0)) && !endswith(cidr, "/0")])
    error_message = "public_access_cidrs must be ranges such as \"203.0.113.7/32\", and not the whole internet."
  }
}

variable "private_access_cidrs" {
  description = "Address ranges, such as a VPN or a peered network, that may reach the Kubernetes API's private endpoint in addition to the nodes."
  type        = list(string)
  default     = []
  nullable    = false

  validation {
    condition     = alltrue([for cidr in var.private_access_cidrs : can(cidrhost(cidr, 0)) && !endswith(cidr, "/0")])
    error_message = "private_access_cidrs must be ranges such as \"10.0.0.0/16\", and not the whole internet."
  }
}

# The cluster

variable "release_channel" {
  description = "By which GKE upgrades control plane and nodes."
  type        = string
  default     = "REGULAR"
  nullable    = false

  validation {
    condition     = contains(["RAPID", "REGULAR", "STABLE", "EXTENDED"], var.release_channel)
    error_message = "release_channel must be RAPID, REGULAR, STABLE or EXTENDED."
  }
}

variable "deletion_protection" {
  description = "Whether Terraform refuses to delete the cluster."
  type        = bool
  default     = true
  nullable    = false
}

variable "secrets_key" {
  description = "Id of a Cloud KMS key in the region that encrypts Kubernetes' secrets, usable by GKE's service agent. Empty: Google's own key."
  type        = string
  default     = ""
  nullable    = false
}

variable "worker_service_accounts" {
  description = "Kubernetes service accounts of the workers, one for each worker Deployment: they may read the model bucket."
  type = object({
    namespace = optional(string, "shoal")
    names     = optional(set(string), ["worker"])
  })
  default  = {}
  nullable = false

  validation {
    condition     = length(var.worker_service_accounts.names) > 0
    error_message = "worker_service_accounts must name at least one."
  }
}

# Nodes

variable "system_nodes" {
  description = "Permanent nodes: router, scheduler, Redis, KEDA and the cluster's own pods. min, max: nodes in all."
  type = object({
    machine_type = optional(string, "e2-standard-2")
    min          = optional(number, 3)
    max          = optional(number, 8)
    disk_gib     = optional(number, 50)
  })
  default  = {}
  nullable = false

  validation {
    condition     = var.system_nodes.min >= 1 && var.system_nodes.max >= var.system_nodes.min
    error_message = "system_nodes must have 1 <= min <= max."
  }
}

variable "gpu_pools" {
  description = <<-EOT
    GPU node pools by the name of their pool, scaled from nothing by GKE's autoscaler.
    accelerator: L4, A100 or H100. capacity: spot or on-demand. min, max: nodes in all. zones: a part of var.zones; empty: all.
    machine_type: g2-standard-*, a2-highgpu-* or a3-highgpu-*, by the accelerator; empty: a usual choice. disk_gib: of the boot disk.
    local_ssd: ephemeral storage, and so the model cache, on the machine's own disks. reservation: name of a reservation.
  EOT
  type = map(object({
    accelerator  = string
    capacity     = optional(string, "spot")
    min          = optional(number, 0)
    max          = number
    zones        = optional(list(string), [])
    machine_type = optional(string, "")
    disk_gib     = optional(number, 100)
    local_ssd    = optional(bool, true)
    reservation  = optional(string)
  }))
  default  = {}
  nullable = false

  validation {
    condition     = alltrue([for name in keys(var.gpu_pools) : can(regex("^[a-z0-9]([a-z0-9-]{0,28}[a-z0-9])?$", name)) && name != "system"])
    error_message = "Names of gpu_pools must be 1 to 30 lower-case letters, digits and '-', and not \"system\"."
  }
  validation {
    condition     = alltrue([for pool in values(var.gpu_pools) : contains(["L4", "A100", "H100"], pool.accelerator)])
    error_message = "accelerator of gpu_pools must be L4, A100 or H100."
  }
  validation {
    condition     = alltrue([for pool in values(var.gpu_pools) : contains(["spot", "on-demand"], pool.capacity)])
    error_message = "capacity of gpu_pools must be spot or on-demand."
  }
  validation {
    condition     = alltrue([for pool in values(var.gpu_pools) : pool.min >= 0 && pool.max >= 1 && pool.max >= pool.min])
    error_message = "gpu_pools must have 0 <= min <= max and a max of at least 1."
  }
  validation {
    condition     = alltrue([for pool in values(var.gpu_pools) : length(var.zones) == 0 || length(setsubtract(pool.zones, var.zones)) == 0])
    error_message = "zones of gpu_pools must be among var.zones."
  }
  validation {
    condition = alltrue([
      for pool in values(var.gpu_pools) : pool.machine_type == "" || can(regex(
        { L4 = "^g2-standard-[0-9]+$", A100 = "^a2-highgpu-[0-9]+g$", H100 = "^a3-highgpu-[0-9]+g$" }[pool.accelerator], pool.machine_type
      ))
    ])
    error_message = "machine_type of gpu_pools must be g2-standard-* for L4, a2-highgpu-* for A100, a3-highgpu-* for H100."
  }
  validation {
    condition     = alltrue([for pool in values(var.gpu_pools) : pool.local_ssd || pool.accelerator != "H100"])
    error_message = "gpu_pools with H100 cannot go without local_ssd: a3 machines always have their disks."
  }
  validation {
    condition     = alltrue([for pool in values(var.gpu_pools) : pool.capacity != "spot" || pool.reservation == null])
    error_message = "gpu_pools of spot machines cannot have a reservation."
  }
}

# Storage

variable "model_bucket" {
  description = "Name of the bucket for models. Empty: made of the project and the name."
  type        = string
  default     = ""
  nullable    = false
}

variable "force_destroy" {
  description = "Whether `terraform destroy` may delete a bucket with models in it."
  type        = bool
  default     = false
  nullable    = false
}

# Redis

variable "redis" {
  description = "A managed Redis (Memorystore) instead of the one in the cluster. replicated: a second one in another zone. tls: see the README."
  type = object({
    enabled    = optional(bool, false)
    memory_gib = optional(number, 4)
    replicated = optional(bool, true)
    tls        = optional(bool, true)
    version    = optional(string, "REDIS_7_2")
  })
  default  = {}
  nullable = false

  validation {
    condition     = var.redis.memory_gib >= 1 && var.redis.memory_gib <= 300
    error_message = "redis.memory_gib must be 1 to 300."
  }
}
