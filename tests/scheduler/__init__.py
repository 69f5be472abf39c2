"""Placement, orders, and the answers to KEDA."""
