"""Benchmarks of the quality and the speed of the scheduler's decisions."""
