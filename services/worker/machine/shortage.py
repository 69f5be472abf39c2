"""Distinguishes out-of-memory errors from other failures of a load or a forward pass."""

from __future__ import annotations

from typing import Final

import torch

_SIGNS: Final = (
    "can't allocate memory",  # torch's allocator on Linux
    "not enough memory: you tried to allocate",  # on Windows and macOS
    "out of memory",  # from the CUDA driver, not a torch.OutOfMemoryError
    "ALLOC_FAILED",  # cuBLAS and cuDNN
)


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an allocation failed for lack of memory, on the device or on the host."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in _SIGNS)
