locals {
  # The output of `shoal redis-acl` in ElastiCache's form; tests/terraform compares it with libs/queue/connection/acl.py.
  redis_access = {
    router    = "on ~v1:* resetchannels &v1:wakeup &v1:wakeup:* &v1:streamed:* -@all +@pubsub +asking +blpop +cluster|slots +del +evalsha +exists +get +hdel +hexists +hget +hgetall +hincrby +hkeys +hlen +hmget +hset +hsetnx +info +lpop +pexpire +ping +publish +rpush +script|load +select +set +subscribe +time +unsubscribe +xadd +zadd +zcard +zcount +zrange +zrangebyscore +zrem +zremrangebyscore +zscore"
    scheduler = "on ~v1:layout ~v1:{fleet}:workers ~v1:{fleet}:changes ~v1:{fleet}:gone ~v1:{fleet}:heard ~v1:{fleet}:usage ~v1:{fleet}:disks ~v1:{fleet}:disk_tags ~v1:{fleet}:generation ~v1:{fleet}:counter ~v1:{fleet}:cards ~v1:{fleet}:card_changes ~v1:{fleet}:failures ~v1:{fleet}:strikes ~v1:{fleet}:leader ~v1:{fleet}:fences ~v1:{fleet}:notes ~v1:{fleet}:claim:* ~v1:{fleet}:orders:* ~v1:{*}:lanes ~v1:{*}:lane:*:i ~v1:{*}:lane:*:b ~v1:{*}:lane:*:meta resetchannels &v1:wakeup &v1:wakeup:* -@all +asking +cluster|slots +del +evalsha +get +hdel +hget +hgetall +hmget +hset +info +pexpire +ping +publish +select +set +subscribe +time +unsubscribe +zadd +zcard +zrange +zrangebyscore +zrem +zremrangebyscore +zscore"
  }
  redis_users = var.redis.enabled ? local.redis_access : {}
}

resource "aws_elasticache_user" "this" {
  for_each = local.redis_users

  user_id       = "${var.name}-${each.key}"
  user_name     = "shoal-${each.key}"
  engine        = "valkey"
  access_string = each.value
  tags          = var.tags

  authentication_mode {
    type      = "password"
    passwords = [var.redis_passwords[each.key]]
  }
}

# A Valkey group needs no user `default`, so it has none.
resource "aws_elasticache_user_group" "this" {
  count = var.redis.enabled ? 1 : 0

  user_group_id = var.name
  engine        = "valkey"
  user_ids      = [for user in aws_elasticache_user.this : user.user_id]
  tags          = var.tags
}

# A queue must not forget: routers refuse to start on a Redis that evicts.
resource "aws_elasticache_parameter_group" "this" {
  count = var.redis.enabled ? 1 : 0

  name   = var.name
  family = "valkey${split(".", var.redis.engine_version)[0]}"
  tags   = var.tags

  parameter {
    name  = "maxmemory-policy"
    value = "noeviction"
  }
}

resource "aws_elasticache_subnet_group" "this" {
  count = var.redis.enabled ? 1 : 0

  name       = var.name
  subnet_ids = [for subnet in aws_subnet.private : subnet.id]
  tags       = var.tags
}

resource "aws_security_group" "redis" {
  count = var.redis.enabled ? 1 : 0

  name        = "${var.name}-redis"
  description = "Redis of the mesh ${var.name}"
  vpc_id      = aws_vpc.this.id
  tags        = merge(var.tags, { Name = "${var.name}-redis" })
}

resource "aws_vpc_security_group_ingress_rule" "redis" {
  count = var.redis.enabled ? 1 : 0

  security_group_id            = aws_security_group.redis[0].id
  description                  = "Redis from the cluster's nodes"
  referenced_security_group_id = aws_eks_cluster.this.vpc_config[0].cluster_security_group_id
  ip_protocol                  = "tcp"
  from_port                    = 6379
  to_port                      = 6379
  tags                         = var.tags
}

resource "aws_elasticache_replication_group" "this" {
  #checkov:skip=CKV_AWS_31: users (user_group_ids) define the permissions, which excludes an auth_token
  #checkov:skip=CKV2_AWS_50: it is on unless redis.replicas is 0; checkov cannot evaluate that
  count = var.redis.enabled ? 1 : 0

  replication_group_id       = var.name
  description                = "Queue of the mesh ${var.name}"
  engine                     = "valkey"
  engine_version             = var.redis.engine_version
  node_type                  = var.redis.node_type
  num_cache_clusters         = var.redis.replicas + 1
  automatic_failover_enabled = var.redis.replicas > 0
  multi_az_enabled           = var.redis.replicas > 0
  parameter_group_name       = aws_elasticache_parameter_group.this[0].name
  subnet_group_name          = aws_elasticache_subnet_group.this[0].name
  security_group_ids         = [aws_security_group.redis[0].id]
  user_group_ids             = [aws_elasticache_user_group.this[0].user_group_id]
  transit_encryption_enabled = true
  at_rest_encryption_enabled = true
  kms_key_id                 = aws_kms_key.cluster.arn
  snapshot_retention_limit   = 1
  tags                       = var.tags
}
