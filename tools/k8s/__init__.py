"""Generators of files in `k8s/` and `charts/`, their schemas, and the programs that render them."""
