"""Memory of a long-running process: excludes permanent objects from garbage collection, and returns
freed memory to the system.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import resource
from collections.abc import MutableMapping
from pathlib import Path
from typing import Final

TIDY_SECONDS: Final = 30.0
"""Interval at which freed memory is returned to the system, which takes milliseconds
(docs/decisions/0013-returning-memory.md).
"""

_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # of glibc alone
_mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
# malloc.h
_M_TRIM_THRESHOLD: Final = -1
_M_MMAP_THRESHOLD: Final = -3
_M_ARENA_MAX: Final = -8
_MMAP_THRESHOLD_BYTES: Final = 32 << 20
"""A larger block is a mapping. This is the most that glibc accepts."""
_TRIM_THRESHOLD_BYTES: Final = 64 << 20
"""A larger free end of a heap is returned when a block is freed; smaller ones wait for `trim`."""
_STATM: Final = Path("/proc/self/statm")


def resident_bytes() -> int:
    """Return the resident bytes of this process; where the system does not report them (macOS),
    their peak.
    """
    try:
        return int(_STATM.read_bytes().split()[1]) * resource.getpagesize()
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def freeze() -> None:
    """Exclude all present objects from garbage collection: modules, classes and functions live as
    long as the process.

    To be called once everything is imported. A full collection reads every object with all threads
    stopped; for the objects of our imports alone that takes tens of milliseconds
    (docs/decisions/0013-returning-memory.md).
    """
    gc.collect()
    gc.freeze()


def use_expandable_segments(environment: MutableMapping[str, str]) -> None:
    """Configure torch's CUDA allocator to use expandable segments. Call this before torch is
    imported, because torch reads the variable once.

    Expandable segments reduce fragmentation: part of a segment of fixed size cannot be freed while
    another model uses the rest, so a larger model may not fit although enough memory is free
    (docs/decisions/0051-expandable-segments.md). A configuration that is already set, by the
    current or the older name of the variable, is kept.
    """
    if "PYTORCH_CUDA_ALLOC_CONF" not in environment:
        environment.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")


def limit_heaps(heaps: int) -> None:
    """Let all threads share a few of malloc's heaps, and fix the sizes of blocks and free ends that
    malloc gives back.

    glibc makes up to eight heaps a core for threads. `trim` returns the free end of the first heap
    alone, so that the heap of a thread that received one large message keeps it. glibc also adapts
    both thresholds to the largest block that was freed, so that the cost of a message depends on
    earlier ones; with a low threshold the kernel maps and zeroes each large block again, which
    costs several times as much as parsing the message (docs/decisions/0013-returning-memory.md).

    Args:
        heaps: the most heaps that threads share, at least 1.
    """
    if _mallopt is None:
        return
    _mallopt(_M_ARENA_MAX, heaps)
    _mallopt(_M_MMAP_THRESHOLD, _MMAP_THRESHOLD_BYTES)
    _mallopt(_M_TRIM_THRESHOLD, _TRIM_THRESHOLD_BYTES)


def trim() -> None:
    """Return freed memory to the system. Otherwise the C library keeps much of it: a worker stays
    as large as its past models made it, a router as its longest backlog did."""
    if _trim is not None:
        _trim(0)


async def tidy() -> None:
    """`trim` every TIDY_SECONDS, in a thread, until it is cancelled."""
    while True:
        await asyncio.sleep(TIDY_SECONDS)
        await asyncio.to_thread(trim)
