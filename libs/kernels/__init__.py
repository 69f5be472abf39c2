"""Tensor kernels behind one signature each: the device and what is installed decide which implementation runs."""
