mock_provider "aws" {
  source = "./tests/mocks"

  mock_resource "aws_elasticache_replication_group" {
    defaults = {
      primary_endpoint_address = "master.shoal.example.cache.amazonaws.com"
    }
  }
}

variables {
  name = "shoal"
}

run "none_unless_asked_for" {
  command = plan

  assert {
    condition     = length(aws_elasticache_replication_group.this) == 0 && length(aws_elasticache_user.this) == 0 && length(aws_security_group.redis) == 0
    error_message = "Redis is in the cluster by default."
  }
}

run "encrypted_and_for_those_with_a_password" {
  command = apply

  variables {
    redis           = { enabled = true }
    redis_passwords = { router = "0123456789abcdef", scheduler = "fedcba9876543210" }
  }

  assert {
    condition     = aws_elasticache_replication_group.this[0].transit_encryption_enabled && tobool(aws_elasticache_replication_group.this[0].at_rest_encryption_enabled)
    error_message = "Encrypted on its way and at rest."
  }
  assert {
    condition     = aws_elasticache_replication_group.this[0].multi_az_enabled && aws_elasticache_replication_group.this[0].num_cache_clusters == 2
    error_message = "A replica in another zone takes over."
  }
  assert {
    condition     = one(aws_elasticache_parameter_group.this[0].parameter) == { name = "maxmemory-policy", value = "noeviction" } && aws_elasticache_parameter_group.this[0].family == "valkey8"
    error_message = "Nothing queued is evicted."
  }
  assert {
    condition     = { for key, user in aws_elasticache_user.this : user.user_name => user.authentication_mode[0].type } == { "shoal-router" = "password", "shoal-scheduler" = "password" }
    error_message = "Two users with passwords."
  }
  assert {
    condition     = alltrue([for user in aws_elasticache_user.this : strcontains(user.access_string, " -@all ")])
    error_message = "They may run only the commands that they use."
  }
  assert {
    condition     = aws_vpc_security_group_ingress_rule.redis[0].referenced_security_group_id == output.cluster_security_group_id && aws_vpc_security_group_ingress_rule.redis[0].from_port == 6379
    error_message = "Only the cluster's nodes reach it."
  }
  assert {
    condition     = output.redis_url == "rediss://shoal-router@master.shoal.example.cache.amazonaws.com:6379/0"
    error_message = "With TLS, without a password in the URL."
  }
}

run "without_replicas" {
  command = plan

  variables {
    redis           = { enabled = true, replicas = 0 }
    redis_passwords = { router = "0123456789abcdef", scheduler = "fedcba9876543210" }
  }

  assert {
    condition     = !aws_elasticache_replication_group.this[0].automatic_failover_enabled && aws_elasticache_replication_group.this[0].num_cache_clusters == 1
    error_message = "No replica exists to take over."
  }
}
