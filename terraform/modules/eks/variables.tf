variable "name" {
  description = "Name of the cluster, and prefix of everything around it."
  type        = string
  nullable    = false

  validation {
    condition     = can(regex("^[a-z][a-z0-9-]{1,28}[a-z0-9]$", var.name))
    error_message = "name must be 3 to 30 lower-case letters, digits and '-', and begin with a letter."
  }
}

variable "kubernetes_version" {
  description = "Minor version of the control plane and of all nodes. EKS does not upgrade automatically while a version is supported."
  type        = string
  default     = "1.34"
  nullable    = false

  validation {
    condition     = can(regex("^1\\.[0-9]{2}$", var.kubernetes_version))
    error_message = "kubernetes_version must be a minor version such as \"1.34\"."
  }
}

variable "tags" {
  description = "Tags of all resources that support tags."
  type        = map(string)
  default     = {}
  nullable    = false
}

# The network

variable "zones" {
  description = "Availability zones of the subnets. Empty: the region's first three. GPU capacity differs from zone to zone."
  type        = list(string)
  default     = []
  nullable    = false

  validation {
    condition     = length(var.zones) == 0 || (length(var.zones) >= 2 && length(var.zones) <= 6 && length(distinct(var.zones)) == length(var.zones))
    error_message = "zones must be empty, or two to six different zones: EKS requires subnets in at least two."
  }
}

variable "vpc_cidr" {
  description = "Address range of the VPC. Each zone's nodes and pods get an eighth of it."
  type        = string
  default     = "10.40.0.0/16"
  nullable    = false

  validation {
    condition     = can(cidrhost(var.vpc_cidr, 0)) && try(tonumber(split("/", var.vpc_cidr)[1]), 0) >= 16 && try(tonumber(split("/", var.vpc_cidr)[1]), 32) <= 20
    error_message = "vpc_cidr must be an IPv4 range of /16 to /20."
  }
}

variable "nat_per_zone" {
  description = "One NAT gateway per zone instead of one for all: survives the loss of a zone, at the cost of one gateway per zone."
  type        = bool
  default     = false
  nullable    = false
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

variable "admin_principal_arns" {
  description = "IAM roles or users that administer the cluster, in addition to its creator."
  type        = set(string)
  default     = []
  nullable    = false

  validation {
    condition     = alltrue([for arn in var.admin_principal_arns : can(regex("^arn:[^:]+:iam::[0-9]{12}:(role|user)/", arn))])
    error_message = "admin_principal_arns must be ARNs of IAM roles or users."
  }
}

variable "log_retention_days" {
  description = "Days for which the control plane's logs are kept."
  type        = number
  default     = 365
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
  description = "Permanent nodes: router, scheduler, Redis, KEDA and the cluster's own pods."
  type = object({
    instance_types = optional(list(string), ["m6i.large"])
    min            = optional(number, 3)
    max            = optional(number, 8)
    disk_gib       = optional(number, 50)
  })
  default  = {}
  nullable = false

  validation {
    condition     = var.system_nodes.min >= 1 && var.system_nodes.max >= var.system_nodes.min && length(var.system_nodes.instance_types) > 0
    error_message = "system_nodes must have an instance type, and 1 <= min <= max."
  }
}

variable "gpu_pools" {
  description = <<-EOT
    GPU node groups by the name of their pool, scaled from nothing by the cluster autoscaler.
    accelerator: L4, A100 or H100. capacity: spot, on-demand or capacity-block. min, max: nodes. zones: a part of var.zones; empty: all.
    instance_types: of that accelerator and all with as many GPUs, the smallest first; empty: a usual choice. disk_gib: of the root
    volume, with /var/lib/shoal; instance storage, where there is some, takes images and pods' own volumes. reservation: id of a
    capacity reservation or capacity block.
  EOT
  type = map(object({
    accelerator    = string
    capacity       = optional(string, "spot")
    min            = optional(number, 0)
    max            = number
    zones          = optional(list(string), [])
    instance_types = optional(list(string), [])
    disk_gib       = optional(number, 100)
    reservation    = optional(string)
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
    condition     = alltrue([for pool in values(var.gpu_pools) : contains(["spot", "on-demand", "capacity-block"], pool.capacity)])
    error_message = "capacity of gpu_pools must be spot, on-demand or capacity-block."
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
    condition     = alltrue([for pool in values(var.gpu_pools) : pool.capacity == "spot" ? pool.reservation == null : pool.capacity == "on-demand" || pool.reservation != null])
    error_message = "gpu_pools with capacity-block need a reservation; those with spot must not have one."
  }
}

# Storage

variable "model_bucket" {
  description = "Name of the bucket for models. Empty: the cluster's name and the account's id, which is globally unique."
  type        = string
  default     = ""
  nullable    = false
}

variable "force_destroy" {
  description = "Whether `terraform destroy` may delete a bucket with models and repositories with images in them."
  type        = bool
  default     = false
  nullable    = false
}

variable "repositories" {
  description = "Image repositories, each as <name>/<repository>."
  type        = set(string)
  default     = ["edge", "router", "scheduler", "worker-cpu", "worker-cuda"]
  nullable    = false
}

# Redis

variable "redis" {
  description = "A managed Redis (ElastiCache for Valkey) instead of the one in the cluster. replicas: number of replicas in other zones, which take over on failure."
  type = object({
    enabled        = optional(bool, false)
    node_type      = optional(string, "cache.t4g.medium")
    replicas       = optional(number, 1)
    engine_version = optional(string, "8.0")
  })
  default  = {}
  nullable = false

  validation {
    condition     = var.redis.replicas >= 0 && var.redis.replicas <= 5
    error_message = "redis.replicas must be 0 to 5."
  }
}

variable "redis_passwords" {
  description = "Passwords of Redis' users shoal-router and shoal-scheduler, required if redis is enabled. They are in Terraform's state."
  type = object({
    router    = optional(string, "")
    scheduler = optional(string, "")
  })
  default   = {}
  nullable  = false
  sensitive = true

  validation {
    condition     = !var.redis.enabled || alltrue([for password in values(var.redis_passwords) : can(regex("^[A-Za-z0-9]{16,128}$", password))])
    error_message = "redis_passwords must both be 16 to 128 letters and digits where redis is enabled: openssl rand -hex 32."
  }
}
