"""Benchmarks of a mesh: its throughput, and the cost of its requests, router and telemetry."""
