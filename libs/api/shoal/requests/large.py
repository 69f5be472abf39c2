"""Large answers: when they are requested as a stream, and how the rows of all messages of a call
get into one array.

Rows are copied to their place as they arrive and their messages are dropped, so that they are not
in memory twice.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from shoal.errors import InternalError
from shoal.requests import codec
from shoal.requests.merging import merge_encode
from shoal.results import DataType, EncodeResult, Form, Numbers
from shoal.v1 import inference_pb2

STREAMED_BYTES = 4 << 20
"""A larger expected answer is requested as a stream: proxies may limit messages to this size,
gRPC's default, and the router frees sent parts early. For smaller answers one message costs less.
"""
ASSUMED_DIMENSIONS = 1_024
"""Of dense vectors, if the call does not say: as many as large encoders have. Small ones have
384.
"""
ASSUMED_TOKEN_DIMENSIONS = 128
"""Of a token's vector: late-interaction models have 96 or 128."""
ASSUMED_ENTRIES = 256
"""Entries of a sparse row, 8 bytes each: SPLADE models return 100 to 300."""
CHARACTERS_PER_TOKEN = 4

_BITS: dict[DataType, int] = {
    "float32": 32,
    "float16": 16,
    "bfloat16": 16,
    "int8": 8,
    "uint8": 8,
    "binary": 1,
}


def is_large(
    lengths: Sequence[int], forms: Sequence[Form], data_type: DataType, dimensions: int
) -> bool:
    """Return True if the answer to items of these lengths is expected to exceed STREAMED_BYTES.

    Args:
        lengths: Characters of each item.
        dimensions: Dimensions of a vector; 0: the model's own.
    """
    bits = _BITS[data_type]
    expected = 0
    if "dense" in forms or not forms:
        expected += len(lengths) * (dimensions or ASSUMED_DIMENSIONS) * bits // 8
    if "sparse" in forms:
        expected += len(lengths) * ASSUMED_ENTRIES * 8
    if "multi_vector" in forms:
        tokens = sum(lengths) // CHARACTERS_PER_TOKEN + 2 * len(lengths)
        expected += tokens * (dimensions or ASSUMED_TOKEN_DIMENSIONS) * bits // 8
    return expected > STREAMED_BYTES


class Rows:
    """The dense vectors of `items` items, allocated when the first rows arrive with their
    dimensions. Threads may share an object."""

    def __init__(self, items: int) -> None:
        self._items = items
        self._lock = threading.Lock()
        # [items, dimensions]; None until the first rows arrive.
        self._array: Numbers | None = None

    def put(self, first: int, rows: Numbers) -> Numbers:
        """Copy rows to their place and return a view of them there; if they are all rows,
        return them uncopied. Raises InternalError if they do not fit."""
        if len(rows) == self._items:
            return rows
        with self._lock:
            if self._array is None:
                self._array = self._allocated(rows)
        whole = self._array
        if (
            whole.dtype != rows.dtype
            or whole.shape[1:] != rows.shape[1:]
            or first + len(rows) > len(whole)
        ):
            raise InternalError(
                "the mesh returned parts of this result in different shapes, or more rows than "
                "items"
            )
        view = whole[first : first + len(rows)]
        view[:] = rows
        view.flags.writeable = False
        return view

    def _allocated(self, rows: Numbers) -> Numbers:
        try:
            return np.empty((self._items, *rows.shape[1:]), rows.dtype)
        except (MemoryError, ValueError) as error:
            raise InternalError(
                f"the mesh returned rows that do not fit into memory: {error}"
            ) from None


class EncodeSink:
    """The Sink of a request for `items` items, of which the first has row `first` of `rows`."""

    def __init__(self, rows: Rows, first: int, items: int) -> None:
        self._rows, self._first, self._items = rows, first, items
        # The results so far, and the number of their rows.
        self._parts: list[EncodeResult] = []
        self._count = 0

    def take(self, reply: inference_pb2.EncodeResponse) -> None:
        """Raise InternalError if the message cannot be read or does not fit."""
        result = codec.encode_result(reply)
        count = rows_of(result)
        if result.is_divided:  # How many rows there will be is not known before the last message.
            if len(result.chunks.starts) != count:
                raise InternalError(
                    f"the mesh returned {count} rows for {len(result.chunks.starts)} chunks"
                )
            if result.chunks.continues and not self._parts:
                raise InternalError("the mesh's first chunks continue an item before them")
            count = len(result.chunks) - result.chunks.continues
        elif "dense" in result.representations:
            array = self._rows.put(self._first + self._count, result.vectors.array)
            result = replace(result, _vectors=replace(result.vectors, array=array))
        self._parts.append(result)
        self._count += count

    def finish(self) -> EncodeResult:
        """Return the assembled result. Raises InternalError if rows are missing, ModelChanged if
        they have two revisions.
        """
        if self._count != self._items:
            raise InternalError(f"the mesh returned {self._count} rows for {self._items} items")
        return merge_encode(self._parts)


def rows_of(result: EncodeResult) -> int:
    """Return the number of rows. Raises InternalError if the representations differ in it."""
    forms = result.representations
    counts = {
        *([len(result.dense)] if "dense" in forms else []),
        *([len(result.sparse)] if "sparse" in forms else []),
        *([len(result.multi_vector)] if "multi_vector" in forms else []),
    }
    if len(counts) != 1:
        raise InternalError(
            "the mesh's answer has no rows, or different numbers of rows in its representations"
        )
    return counts.pop()
