"""Benchmarks of models, kernels, adapters and swaps on one device, without a mesh."""
