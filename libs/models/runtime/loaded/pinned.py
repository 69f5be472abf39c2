"""Host memory for copies of a CUDA device, page-locked if the driver allows it.

Memory is registered with the driver instead of allocated as page-locked: torch never frees such
allocations, and rounds them up to powers of two.
"""

from __future__ import annotations

import ctypes
import logging
import os
import weakref
from contextlib import suppress
from functools import cache
from typing import Final

import torch
from torch import Tensor

log = logging.getLogger(__name__)

ALIGNMENT: Final = 256
"""Bytes; the largest alignment that kernels and copies need."""

PAGE_BYTES: Final = os.sysconf("SC_PAGE_SIZE")
"""The unit in which the driver locks memory."""


class HostBuffer:
    """`size` bytes of aligned host memory, page-locked for a CUDA device.

    It consists of whole pages: the driver locks no page twice, so two small models that share a
    page of the heap could not both be locked, and unlocking one would unlock the other's page.

    If the driver refuses to lock it, for instance beyond `ulimit -l` or without enough physical
    memory, it stays pageable: copies are correct, but slower.
    """

    def __init__(self, size: int, device: torch.device) -> None:
        whole_pages = -(-size // PAGE_BYTES) * PAGE_BYTES
        memory = torch.empty(whole_pages + PAGE_BYTES, dtype=torch.uint8)
        skipped = -memory.data_ptr() % PAGE_BYTES
        self._bytes = memory[skipped : skipped + whole_pages]
        self.is_pinned = size > 0 and device.type == "cuda" and self._register(device)

    def part(self, begin: int, size: int) -> Tensor:
        return self._bytes[begin : begin + size]

    def _register(self, device: torch.device) -> bool:
        runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        status = int(runtime.cudaHostRegister(self._bytes.data_ptr(), self._bytes.numel(), 0))
        if status == 0:
            weakref.finalize(self, runtime.cudaHostUnregister, self._bytes.data_ptr())
            return True
        clear_error(device)
        _warn_once(status)
        return False


def clear_error(device: torch.device) -> None:
    """Forget the error of this thread's last call to the CUDA runtime.

    The runtime keeps the error of a failed call until it is read. torch reads it after its next
    kernel launch, which would then raise although it succeeded.
    """
    library = _runtime_library()
    if library is not None:
        library.cudaGetLastError()
        return
    with suppress(RuntimeError):  # a launch that raises the error also clears it
        torch.empty(1, device=device).fill_(0)


@cache
def _runtime_library() -> ctypes.CDLL | None:
    """Return the CUDA runtime that torch has loaded; None if torch has none, or one without a file
    name.

    RTLD_NOLOAD: a second runtime would have a separate error state.
    """
    version = torch.version.cuda
    if version is None:
        return None
    with suppress(OSError):
        return ctypes.CDLL(
            f"libcudart.so.{version.partition('.')[0]}", mode=os.RTLD_NOLOAD | os.RTLD_NOW
        )
    return None


@cache
def _warn_once(status: int) -> None:
    log.warning(
        "host memory could not be page-locked (cudaHostRegister returned %d): models return "
        "from host memory more slowly; "
        "raise the limit of locked memory (ulimit -l)",
        status,
    )
