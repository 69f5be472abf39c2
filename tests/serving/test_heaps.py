"""Memory that malloc keeps of a large message after another thread than the first one freed it."""

from __future__ import annotations

import subprocess
import sys
from typing import Final

import pytest

MESSAGE_BYTES: Final = 3_000_000
KEPT_BYTES: Final = 1 << 20
"""Bytes that a process may keep of a message: a fixed number, so that it does not follow the tested
settings.
"""
_PROGRAM: Final = """
import ctypes, sys, threading
from libs import memory

malloc, free = ctypes.CDLL(None).malloc, ctypes.CDLL(None).free
malloc.restype, malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
free.argtypes = [ctypes.c_void_p]
message, piece = int(sys.argv[2]), 64 << 10
if sys.argv[1] == "limited":
    memory.limit_heaps(heaps=1)

def receive():
    free(malloc(message))
    pieces = [malloc(piece) for _ in range(message // piece)]
    for one in pieces:
        ctypes.memset(one, 1, piece)
    for one in pieces:
        free(one)

thread = threading.Thread(target=receive)
before = memory.resident_bytes()
thread.start()
thread.join()
memory.trim()
print(memory.resident_bytes() - before)
"""


def kept(way: str) -> int:
    """Bytes that a process keeps of a message."""
    command = [sys.executable, "-c", _PROGRAM, way, str(MESSAGE_BYTES)]
    return int(
        subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
    )


@pytest.mark.skipif(sys.platform != "linux", reason="is about glibc's malloc")
def test_thread_s_heap_keeps_little_of_a_large_message() -> None:
    free, limited = kept("free"), kept("limited")
    assert free > MESSAGE_BYTES / 2, "glibc has become better at this: limit_heaps may go"
    assert limited < KEPT_BYTES
