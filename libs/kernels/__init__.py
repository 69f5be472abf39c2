"""Tensor kernels with one signature each: the device and the installed packages decide which
implementation runs.

Packages by what is computed: `attention/`, `linear/`, `rows/` and `pooling/`. Those in C++ for CPUs
lie in `native/`. `layout.py` says which queries of a batch see which keys.
"""
