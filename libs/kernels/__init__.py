"""Tensor kernels with one signature each: the device and the installed packages decide which implementation runs."""
