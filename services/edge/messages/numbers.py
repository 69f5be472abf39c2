"""Convert numbers of the mesh's replies to JSON, with the fewest digits that identify a float32, or
to base64 of little-endian bytes. Pure.

orjson writes a row of 1,024 float32 in 15 µs and holds the GIL, so a thread would not help. Large
answers are made in pieces of at most PIECE_NUMBERS numbers, and the event loop runs other tasks
between two pieces.
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

from services.edge.messages.base import HttpError, encode_json

A = TypeVar("A")
T = TypeVar("T")
Rows = npt.NDArray[Any]
PIECE_NUMBERS: Final = 1 << 16
"""Numbers written per step: about 1 ms as JSON."""


def decoded(decode: Callable[[A], T], message: A) -> T:
    """Apply a decoder of the client's codec. Raises HttpError for a message that cannot be
    decoded.
    """
    try:
        return decode(message)
    except InternalError as error:
        raise HttpError("INTERNAL", error.message) from None


def dense_rows(tensor: tensor_pb2.Tensor) -> Rows:
    """Return the numbers of a tensor, [items, dimensions]: float16 is converted to float32, and
    rows of BINARY are returned as uint8 with eight bits each. Raises HttpError.
    """
    rows: Rows = decoded(codec.vectors, tensor).array
    if rows.dtype == np.float16:
        return rows.astype(np.float32)
    return rows


def signed(rows: Rows) -> Rows:
    """Convert `ubinary` to `binary`: the same bits as signed bytes, with 128 subtracted."""
    return (rows.astype(np.int16) - 128).astype(np.int8)


def quantised(rows: Rows, kind: str) -> Rows:
    """Quantise float32 [rows, dimensions] to `float`, `base64`, `int8`, `ubinary` or `binary`
    exactly as the mesh does. This is for answers with several types and for multi-vectors.
    """
    if kind == "int8":
        scale = np.abs(rows).max(axis=-1, keepdims=True) / np.float32(127)
        return np.rint(rows / np.where(scale > 0, scale, 1)).clip(-127, 127).astype(np.int8)
    if kind in ("binary", "ubinary"):
        bits: Rows = np.packbits(rows > 0, axis=-1)
        return signed(bits) if kind == "binary" else bits
    return rows


def encode_base64(row: Rows) -> str:
    """Return base64 in the standard alphabet with padding and no line breaks."""
    return binascii.b2a_base64(row.data, newline=False).decode("ascii")


def rows_per_piece(width: int) -> int:
    """Return the number of rows of `width` numbers that make a piece of PIECE_NUMBERS, at least
    1.
    """
    return max(1, PIECE_NUMBERS // max(1, width))


def join_rows(
    rows: int, max_rows: int, head: bytes, piece: Callable[[int, int], bytes], tail: bytes
) -> bytes | Iterator[bytes]:
    """Return `head`, the rows separated by commas, and `tail`.

    Args:
        rows: The number of rows.
        max_rows: Up to this number of rows the result is one piece.
        head: The bytes before the rows.
        piece: `piece(first, last)` returns rows first … last - 1 as JSON with commas and without
            brackets.
        tail: The bytes after the rows.
    """
    if rows <= max_rows:
        return head + piece(0, rows) + tail

    def pieces() -> Iterator[bytes]:
        yield head
        for first in range(0, rows, max_rows):
            yield (b"," if first else b"") + piece(first, min(rows, first + max_rows))
        yield tail

    return pieces()


def listed(rows: Rows, *, is_base64: bool = False) -> Iterator[bytes]:
    """Yield a JSON list of rows in pieces: lists of numbers, or their bytes in base64."""

    def piece(first: int, last: int) -> bytes:
        some = rows[first:last]
        return encode_json([encode_base64(row) for row in some] if is_base64 else some)[1:-1]

    written = join_rows(len(rows), rows_per_piece(rows.shape[1]), b"[", piece, b"]")
    return iter((written,)) if isinstance(written, bytes) else written


def token_vectors(message: tensor_pb2.Ragged) -> list[Rows]:
    """Return multi-vectors, float32 [tokens, dimensions] per item. Raises HttpError."""
    ragged = decoded(codec.ragged, message)
    return [np.ascontiguousarray(ragged[index], np.float32) for index in range(len(ragged))]
