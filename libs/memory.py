"""Memory of a long-running process: excludes permanent objects from garbage collection, and returns freed memory to the system."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import resource
from pathlib import Path
from typing import Final

TIDY_SECONDS: Final = 30.0
"""How often freed memory is returned to the system, which takes milliseconds (docs/decisions/0013-returning-memory.md)."""

_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # of glibc alone
_STATM: Final = Path("/proc/self/statm")


def resident_bytes() -> int:
    """The resident bytes of this process; where the system does not report them (macOS), their peak."""
    try:
        return int(_STATM.read_bytes().split()[1]) * resource.getpagesize()
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def freeze() -> None:
    """Excludes all present objects from garbage collection: modules, classes and functions live as long as the process.

    To be called once everything is imported. A full collection reads every object with all threads stopped; for the objects of our
    imports alone that takes tens of milliseconds (docs/decisions/0013-returning-memory.md).
    """
    gc.collect()
    gc.freeze()


def trim() -> None:
    """Returns freed memory to the system. Otherwise the C library keeps much of it: a worker stays as large as its past models made
    it, a router as its longest backlog did."""
    if _trim is not None:
        _trim(0)


async def tidy() -> None:
    """`trim` every TIDY_SECONDS, in a thread, until it is cancelled."""
    while True:
        await asyncio.sleep(TIDY_SECONDS)
        await asyncio.to_thread(trim)
