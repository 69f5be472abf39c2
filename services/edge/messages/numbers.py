"""Numbers of the mesh's answers as dialects write them: float32 with the shortest digits, base64 of
little-endian bytes. Pure.

orjson writes a row of 1,024 float32 in 15 µs and holds the interpreter's lock meanwhile, so that a
thread would not help; a large answer is therefore made in pieces of at most PIECE_NUMBERS numbers,
between which the event loop serves others.
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

from services.edge.messages.base import HttpError, json_of

A = TypeVar("A")
T = TypeVar("T")
Rows = npt.NDArray[Any]
PIECE_NUMBERS: Final = 1 << 16
"""Numbers that are written in one go: about 1 ms as JSON."""


def decoded(decode: Callable[[A], T], message: A) -> T:
    """What a decoder of the client's codec makes of a message. Raises HttpError for one that cannot
    be read.
    """
    try:
        return decode(message)
    except InternalError as error:
        raise HttpError("INTERNAL", error.message) from None


def dense_rows(tensor: tensor_pb2.Tensor) -> Rows:
    """The stored numbers, [items, dimensions] (BINARY: whole bytes as uint8), float16 as float32.
    Raises HttpError.
    """
    rows: Rows = decoded(codec.vectors, tensor).array
    if rows.dtype == np.float16:
        return rows.astype(np.float32)
    return rows


def signed(rows: Rows) -> Rows:
    """`binary` of `ubinary`: the same bits as signed bytes, which are smaller by 128."""
    return (rows.astype(np.int16) - 128).astype(np.int8)


def quantised(rows: Rows, kind: str) -> Rows:
    """float32 [rows, dimensions] as `float`, `base64`, `int8`, `ubinary` or `binary`: what the mesh
    answers if asked for them. For answers that have several kinds, and for multi-vectors."""
    if kind == "int8":
        scale = np.abs(rows).max(axis=-1, keepdims=True) / np.float32(127)
        return np.rint(rows / np.where(scale > 0, scale, 1)).clip(-127, 127).astype(np.int8)
    if kind in ("binary", "ubinary"):
        bits: Rows = np.packbits(rows > 0, axis=-1)
        return signed(bits) if kind == "binary" else bits
    return rows


def base64_of(row: Rows) -> str:
    """Standard alphabet with padding, no line breaks."""
    return binascii.b2a_base64(row.data, newline=False).decode("ascii")


def per_piece(width: int) -> int:
    """Rows of so many numbers that make one piece."""
    return max(1, PIECE_NUMBERS // max(1, width))


def joined(
    rows: int, each: int, head: bytes, piece: Callable[[int, int], bytes], tail: bytes
) -> bytes | Iterator[bytes]:
    """`head`, the rows with commas between them, `tail`. `piece(first, last)`: the elements of rows
    first … last - 1, as JSON with commas and without brackets. As one piece if there are at most
    `each` rows."""
    if rows <= each:
        return head + piece(0, rows) + tail

    def pieces() -> Iterator[bytes]:
        yield head
        for first in range(0, rows, each):
            yield (b"," if first else b"") + piece(first, min(rows, first + each))
        yield tail

    return pieces()


def listed(rows: Rows, *, is_base64: bool = False) -> Iterator[bytes]:
    """A list of rows as JSON, each a list of numbers or their bytes in base64, in pieces."""

    def piece(first: int, last: int) -> bytes:
        some = rows[first:last]
        return json_of([base64_of(row) for row in some] if is_base64 else some)[1:-1]

    written = joined(len(rows), per_piece(rows.shape[1]), b"[", piece, b"]")
    return iter((written,)) if isinstance(written, bytes) else written


def token_vectors(message: tensor_pb2.Ragged) -> list[Rows]:
    """Multi-vectors, float32 [tokens, dimensions] an item. Raises HttpError."""
    ragged = decoded(codec.ragged, message)
    return [np.ascontiguousarray(ragged[index], np.float32) for index in range(len(ragged))]
