"""Memory of a process that runs for long: what the collector of cycles need not read, and what the C library should give back."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import resource
from pathlib import Path
from typing import Final

TIDY_SECONDS: Final = 60.0
"""How often freed memory is given back, which takes milliseconds (docs/decisions.md)."""

_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # of glibc alone
_STATM: Final = Path("/proc/self/statm")


def resident_bytes() -> int:
    """What this process holds in memory; where the system does not say (macOS), the most that it ever held."""
    try:
        return int(_STATM.read_bytes().split()[1]) * resource.getpagesize()
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def freeze() -> None:
    """What is there now stays: modules, classes and functions, which live as long as the process.

    To be called once everything is imported. A full collection reads every object with all threads stopped; for what our imports
    leave alone that takes tens of milliseconds (docs/decisions.md).
    """
    gc.collect()
    gc.freeze()


def trim() -> None:
    """Gives freed memory back to the system. The C library keeps much of it else: a worker grows with the models that it had, a
    router with the longest backlog that it had."""
    if _trim is not None:
        _trim(0)


async def tidy() -> None:
    """`trim` once a minute, in a thread, until it is cancelled."""
    while True:
        await asyncio.sleep(TIDY_SECONDS)
        await asyncio.to_thread(trim)
