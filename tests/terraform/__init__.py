"""Terraform's modules, validated and planned."""
