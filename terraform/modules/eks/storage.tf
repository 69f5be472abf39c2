locals {
  bucket     = var.model_bucket != "" ? var.model_bucket : "${var.name}-models-${local.account}"
  bucket_arn = "arn:${local.partition}:s3:::${local.bucket}"
  registry   = "${local.account}.dkr.ecr.${local.region}.amazonaws.com/${var.name}"
}

resource "aws_s3_bucket" "models" {
  #checkov:skip=CKV_AWS_18: the account's CloudTrail data events record reads; access logs need a separate bucket
  #checkov:skip=CKV_AWS_144: models can be fetched again from their source
  #checkov:skip=CKV2_AWS_62: no event is needed when a model is uploaded
  #checkov:skip=CKV_AWS_145: with KMS an object's ETag is not its MD5, with which workers verify downloads (libs/store/objects.py)
  bucket        = local.bucket
  force_destroy = var.force_destroy
  tags          = var.tags
}

resource "aws_s3_bucket_public_access_block" "models" {
  bucket = aws_s3_bucket.models.id

  block_public_acls       = true
  block_public_policy     = true
  ignore_public_acls      = true
  restrict_public_buckets = true
}

resource "aws_s3_bucket_versioning" "models" {
  bucket = aws_s3_bucket.models.id

  versioning_configuration {
    status = "Enabled"
  }
}

resource "aws_s3_bucket_server_side_encryption_configuration" "models" {
  bucket = aws_s3_bucket.models.id

  rule {
    apply_server_side_encryption_by_default {
      sse_algorithm = "AES256"
    }
  }
}

resource "aws_s3_bucket_lifecycle_configuration" "models" {
  bucket = aws_s3_bucket.models.id

  rule {
    id     = "what-was-replaced"
    status = "Enabled"

    filter {}

    noncurrent_version_expiration {
      noncurrent_days = 30
    }

    abort_incomplete_multipart_upload {
      days_after_initiation = 7
    }
  }

  depends_on = [aws_s3_bucket_versioning.models]
}

resource "aws_s3_bucket_policy" "models" {
  bucket = aws_s3_bucket.models.id

  policy = jsonencode({
    Version = "2012-10-17"
    Statement = [{
      Sid       = "OnlyWithTls"
      Effect    = "Deny"
      Principal = "*"
      Action    = "s3:*"
      Resource  = [local.bucket_arn, "${local.bucket_arn}/*"]
      Condition = { Bool = { "aws:SecureTransport" = "false" } }
    }]
  })

  depends_on = [aws_s3_bucket_public_access_block.models]
}

resource "aws_ecr_repository" "this" {
  #checkov:skip=CKV_AWS_136: images hold code and no secrets; ECR encrypts them with its key
  for_each = var.repositories

  name                 = "${var.name}/${each.key}"
  image_tag_mutability = "IMMUTABLE"
  force_delete         = var.force_destroy
  tags                 = var.tags

  image_scanning_configuration {
    scan_on_push = true
  }
}

resource "aws_ecr_lifecycle_policy" "this" {
  for_each = aws_ecr_repository.this

  repository = each.value.name

  policy = jsonencode({
    rules = [{
      rulePriority = 1
      description  = "Untagged layers"
      selection    = { tagStatus = "untagged", countType = "sinceImagePushed", countUnit = "days", countNumber = 14 }
      action       = { type = "expire" }
    }]
  })
}
