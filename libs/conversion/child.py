"""The program of a process that converts one file, from one open descriptor to another: `python -I
-S child.py PATHS KIND IN OUT`.

`PATHS`: `sys.path` of the parent, as JSON. `IN`, `OUT`: descriptors of the source and of an empty
file, opened by the parent. After importing its libraries and before reading the source, the process
gives up all that it does not need: it cannot open files or sockets (no descriptors are left) or
start processes, it writes at most the size of the source and 32 MiB, and its address space and
processor time are limited. It ends when its parent does. The parent reads its output as an
untrusted file.

Each line on standard output is a JSON object: `{"done": .., "total": ..}` during the conversion; at
the end `{"report": ..}`, or `{"refused": ..}` with the fault.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import resource
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any, BinaryIO, Final

MEMORY_BYTES: Final = {
    "torch": 256 << 20,
    "tokenizer": 1 << 30,
    "gguf": 1 << 30,
    "gguf_settings": 2 << 30,
    "onnx": 512 << 20,
}
"""Address space of the child, beyond the libraries and the mapping of the source."""

EXTRA_BYTES: Final = 32 << 20
EXPANSION: Final = {"gguf": 13, "onnx": 4}
"""Maximum ratio of the bytes of a dequantised output to those of the source: 32 bits of each number
for 2.6 (Q2_K), or for 8.
"""

CPU_SECONDS: Final = 60
BYTES_A_SECOND: Final = 16 << 20
"""Processor time for large files, in addition to CPU_SECONDS. A core copies and digests several
hundred MiB in a second.
"""

_PROGRESS_SECONDS: Final = 0.5
_PR_SET_PDEATHSIG: Final = 1

Work = Callable[[BinaryIO, mmap.mmap, BinaryIO, Callable[[int, int], None]], Any]
"""A conversion of a source, which gets the source, the same in memory, the output, and a callback
for progress in bytes.
"""


def main() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    sys.path[:] = json.loads(sys.argv[1])
    kind, source_fd, output_fd = sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    from libs.conversion.archive import CheckpointRefused

    work = _work(kind)
    with os.fdopen(source_fd, "rb") as source, os.fdopen(output_fd, "wb", buffering=0) as output:
        size = os.fstat(source.fileno()).st_size
        if not size:
            return _say(refused="is empty")
        mapping = mmap.mmap(source_fd, 0, access=mmap.ACCESS_COPY)
        confine(size, MEMORY_BYTES[kind], highest_descriptor(), size * EXPANSION.get(kind, 1))
        try:
            _say(report=asdict(work(source, mapping, output, ConversionProgress())))
        except CheckpointRefused as error:
            _say(refused=str(error))
        except MemoryError:
            _say(refused=f"takes more than {MEMORY_BYTES[kind] >> 20} MiB of memory to read")
        except Exception as error:  # whatever a damaged file makes libraries raise
            _say(refused=f"is damaged: {type(error).__name__}: {str(error)[:200]}")


def _work(kind: str) -> Work:
    """Return the function of a kind of conversion, with its libraries imported and used once: later
    they could not open their files.
    """
    if kind == "torch":
        from libs.conversion import tensors

        tensors.warm()
        return tensors.convert
    if kind == "tokenizer":
        from libs.conversion import vocabularies

        return vocabularies.convert
    if kind == "gguf":
        from libs.conversion.formats import gguf_tensors

        return gguf_tensors.convert
    if kind == "gguf_settings":
        from libs.conversion.formats import gguf_settings

        return gguf_settings.convert
    if kind == "onnx":
        from libs.conversion.formats import onnx_file

        return onnx_file.convert
    raise ValueError(f"no such conversion: {kind}")


def highest_descriptor() -> int:
    return max(int(name) for name in os.listdir("/proc/self/fd"))


def confine(size: int, memory_bytes: int, highest: int, output_bytes: int) -> None:
    """Lower the limits of this process for a source of `size` bytes; `highest`: the highest
    descriptor in use.
    """
    with open("/proc/self/statm", encoding="ascii") as statm:
        pages = int(statm.read().split()[0])
    memory = pages * resource.getpagesize() + memory_bytes
    for name, most in (
        ("RLIMIT_AS", memory),
        ("RLIMIT_CPU", CPU_SECONDS + size // BYTES_A_SECOND),
        ("RLIMIT_CORE", 0),
        ("RLIMIT_FSIZE", output_bytes + EXTRA_BYTES),
        ("RLIMIT_NOFILE", highest + 1),
        ("RLIMIT_NPROC", 0),
    ):
        resource.setrlimit(getattr(resource, name), (most, most))


class ConversionProgress:
    """Reports progress, now and then."""

    def __init__(self) -> None:
        # Mutable state: when progress was last reported.
        self._reported_at = 0.0

    def __call__(self, done: int, total: int) -> None:
        now = time.monotonic()
        if now - self._reported_at >= _PROGRESS_SECONDS:
            self._reported_at = now
            _say(done=done, total=total)


def _say(**values: object) -> None:
    print(json.dumps(values), flush=True)


if __name__ == "__main__":
    main()
