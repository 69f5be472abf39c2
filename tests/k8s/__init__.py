"""Kustomize, the Helm chart, images and policies, rendered and compared."""
