"""Tensor kernels with one signature each. The device and the installed packages select the
implementation.

Packages: `attention/`, `linear/`, `rows/` and `pooling/`. C++ kernels for CPUs are in `native/`.
`layout.py` defines which queries of a batch attend to which keys.
"""
