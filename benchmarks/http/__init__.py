"""Benchmarks of the cost of HTTP in front of a mesh."""
