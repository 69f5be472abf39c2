"""Check whether the Triton kernels (`*_triton.py`, imported only where they run) can run on a
tensor.
"""

from __future__ import annotations

import importlib.util
from functools import cache

from torch import Tensor

# In Triton's interpreter they also run on CPU tensors; a test then replaces this.
_DEVICES = ("cuda",)


def has_triton(x: Tensor) -> bool:
    """Return whether `x` is on a CUDA device and Triton is installed, as in torch's CUDA builds for
    Linux.
    """
    return x.device.type in _DEVICES and _installed()


@cache
def _installed() -> bool:
    return importlib.util.find_spec("triton") is not None
