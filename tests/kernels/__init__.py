"""Kernels against plain torch, on the CPU and in Triton's interpreter."""
