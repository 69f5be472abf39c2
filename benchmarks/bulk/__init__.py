"""Benchmarks of bulk jobs."""
