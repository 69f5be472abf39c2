"""`python -m tests.chaos.machine services.worker`: a service as on a separate machine, as far as
one process can imitate it.

CHAOS_CLOCK: a file with one double, by how many seconds the machine's clock is wrong. It may be
written at any time; the monotonic clock is never wrong. CHAOS_DISK: a directory where the process
finds a small disk of CHAOS_DISK_BYTES that no other process sees (others reach it through
/proc/<pid>/root) and that ends with it. Where mounting is not allowed, it is an ordinary directory.
"""

from __future__ import annotations

import ctypes
import importlib
import mmap
import os
import runpy
import struct
import sys
import time
from types import ModuleType
from typing import Final

_CLONE_NEWNS, _CLONE_NEWUSER = 0x00020000, 0x10000000  # sched.h
_MS_REC, _MS_PRIVATE = 16384, 1 << 18  # mount.h
CLOCK: Final = "CHAOS_CLOCK"
DISK: Final = "CHAOS_DISK"
DISK_BYTES: Final = "CHAOS_DISK_BYTES"


def have_a_wrong_clock(path: str) -> None:
    """Shift Python's wall clock by the seconds in the file, from now on.

    gRPC keeps the true one: it reckons deadlines, and what remains of them, by `time.time()` and
    its core's clock, which cannot be put wrong here. On a machine both are wrong alike, and a call
    has its time.
    """
    true = ModuleType("time")
    vars(true).update(vars(time))
    for name in ("grpc._cython.cygrpc", "grpc.aio._utils"):
        vars(importlib.import_module(name))["time"] = true
    with open(path, "rb") as file:
        shared = mmap.mmap(file.fileno(), 8, prot=mmap.PROT_READ)
    real, real_ns = time.time, time.time_ns

    def wrong() -> float:
        error: float = struct.unpack_from("d", shared)[0]
        return error

    time.time = lambda: real() + wrong()
    time.time_ns = lambda: real_ns() + int(wrong() * 1e9)


def have_a_small_disk(path: str, size: int) -> None:
    """Mounts a tmpfs that only this process and its children see. Where that is not allowed,
    nothing happens.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    user, group = os.getuid(), os.getgid()
    if libc.unshare(_CLONE_NEWNS) != 0:
        if libc.unshare(_CLONE_NEWNS | _CLONE_NEWUSER) != 0:
            return
        for name, text in (
            ("setgroups", "deny"),
            ("uid_map", f"{user} {user} 1"),
            ("gid_map", f"{group} {group} 1"),
        ):
            with open(f"/proc/self/{name}", "w") as file:
                file.write(text)
    if libc.mount(b"none", b"/", None, _MS_REC | _MS_PRIVATE, None) == 0:
        libc.mount(b"none", path.encode(), b"tmpfs", 0, f"size={size}".encode())


def main() -> None:
    if CLOCK in os.environ:
        have_a_wrong_clock(os.environ[CLOCK])
    if DISK in os.environ:
        have_a_small_disk(os.environ[DISK], int(os.environ[DISK_BYTES]))
    sys.argv = sys.argv[1:]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
