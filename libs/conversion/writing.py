"""Writes a safetensors file block by block, and defines the report of a conversion. Imports no
framework.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, BinaryIO, Final

ITEM_BYTES: Final[Mapping[str, int]] = {"F32": 4, "F16": 2, "BF16": 2}
ALIGN: Final = 8

Progress = Callable[[int, int], None]
"""Called with the bytes that are written, and those of the whole output."""


@dataclass(frozen=True, slots=True)
class ConversionReport:
    """The result of a conversion.

    Args:
        tensors: how many tensors were written.
        sha256: the output's digest.
        library: the library that read the source, with its version.
        left_out: entries that are not written.
        tied: names that are not written, each with its equal.
    """

    tensors: int
    sha256: str
    library: str
    left_out: tuple[str, ...]
    tied: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Output:
    """A tensor to write. `blocks` returns its bytes in order, in parts that are made one at a
    time.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    blocks: Callable[[], Iterable[Any]]

    @property
    def bytes(self) -> int:
        return prod(self.shape) * ITEM_BYTES[self.dtype]


def write(tensors: Sequence[Output], output: BinaryIO, progress: Progress) -> str:
    """Write a header and the tensors, and return the file's SHA-256. Larger items go first, so that
    all are aligned.
    """
    ordered = sorted(tensors, key=lambda tensor: (-ITEM_BYTES[tensor.dtype], tensor.name))
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for tensor in ordered:
        offsets = [end, end + tensor.bytes]
        entries[tensor.name] = {
            "dtype": tensor.dtype,
            "shape": tensor.shape,
            "data_offsets": offsets,
        }
        end += tensor.bytes
    header = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    header += b" " * (-len(header) % ALIGN)
    digest, done = hashlib.sha256(), 0
    parts: Iterable[Any] = [len(header).to_bytes(8, "little"), header]
    for part in (*parts, *(tensor.blocks for tensor in ordered)):
        for block in part() if callable(part) else (part,):
            digest.update(block)
            output.write(block)
            done += len(block)
            progress(done, 8 + len(header) + end)
    output.flush()
    os.fsync(output.fileno())
    return digest.hexdigest()
