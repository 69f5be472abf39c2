"""Measurements on a GPU, one module a step, each with one JSON of results: `python -m
benchmarks.gpu`, docs/gpu.md.
"""
