"""Numbers of the mesh's answers as dialects write them: float32 with the shortest digits, base64 of little-endian bytes. Pure.

orjson writes a row of 1,024 float32 in 15 µs and holds the interpreter's lock meanwhile, so that a thread would not help; a large
answer is therefore made in pieces of at most PIECE_NUMBERS numbers, between which the event loop serves others.
"""

from __future__ import annotations

import binascii
from collections.abc import Callable, Iterator
from typing import Any, Final, TypeVar

import numpy as np
import numpy.typing as npt
from shoal.errors import InternalError
from shoal.requests import codec
from shoal.v1 import tensor_pb2

from services.edge.dialects.base import Problem

A = TypeVar("A")
T = TypeVar("T")
Rows = npt.NDArray[Any]
PIECE_NUMBERS: Final = 1 << 16
"""Numbers that are written in one go: about 1 ms as JSON."""


def decoded(decode: Callable[[A], T], message: A) -> T:
    """What a decoder of the client's codec makes of a message. Raises Problem for one that cannot be read."""
    try:
        return decode(message)
    except InternalError as error:
        raise Problem("INTERNAL", error.message) from None


def dense_rows(tensor: tensor_pb2.Tensor) -> Rows:
    """The stored numbers, [items, dimensions] (BINARY: whole bytes as uint8), float16 as float32. Raises Problem."""
    rows: Rows = decoded(codec.vectors, tensor).array
    if rows.dtype == np.float16:
        return rows.astype(np.float32)
    return rows


def base64_of(row: Rows) -> str:
    """Standard alphabet with padding, no line breaks."""
    return binascii.b2a_base64(row.data, newline=False).decode("ascii")


def per_piece(width: int) -> int:
    """Rows of so many numbers that make one piece."""
    return max(1, PIECE_NUMBERS // max(1, width))


def joined(rows: int, each: int, head: bytes, piece: Callable[[int, int], bytes], tail: bytes) -> bytes | Iterator[bytes]:
    """`head`, the rows with commas between them, `tail`. `piece(first, last)`: the elements of rows first … last - 1, as JSON with
    commas and without brackets. As one piece if there are at most `each` rows."""
    if rows <= each:
        return head + piece(0, rows) + tail

    def pieces() -> Iterator[bytes]:
        yield head
        for first in range(0, rows, each):
            yield (b"," if first else b"") + piece(first, min(rows, first + each))
        yield tail

    return pieces()
