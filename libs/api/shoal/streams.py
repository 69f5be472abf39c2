"""Large answers: when they are asked for in parts, and how the rows of all parts of a call come into one array. Pure but for that.

Rows are copied where they belong as they arrive, and what they arrived in is dropped: nobody holds them twice.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from shoal import codec, parts
from shoal.errors import InternalError
from shoal.results import DataType, EncodeResult, Form, Numbers
from shoal.v1 import inference_pb2

STREAMED_BYTES = 4 << 20
"""An answer of which more is expected is asked for in parts: proxies on the way may limit messages to so much, gRPC's default, and
the router gives back what it has sent. Below it one message is the shorter way."""
ASSUMED_DIMENSIONS = 1_024
"""Of dense vectors, where the call does not say: as many as large encoders have. Small ones have 384."""
ASSUMED_TOKEN_DIMENSIONS = 128
"""Of a token's vector: late-interaction models have 96 or 128."""
ASSUMED_ENTRIES = 256
"""Of a sparse row, of 8 bytes each: SPLADE models give 100 to 300."""
CHARACTERS_A_TOKEN = 4

_BITS: dict[DataType, int] = {"float32": 32, "float16": 16, "bfloat16": 16, "int8": 8, "uint8": 8, "binary": 1}


def is_large(lengths: Sequence[int], forms: Sequence[Form], data_type: DataType, dimensions: int) -> bool:
    """Whether more than STREAMED_BYTES is expected for items of so many characters. `dimensions` 0: the model's own."""
    bits = _BITS[data_type]
    expected = 0
    if "dense" in forms or not forms:
        expected += len(lengths) * (dimensions or ASSUMED_DIMENSIONS) * bits // 8
    if "sparse" in forms:
        expected += len(lengths) * ASSUMED_ENTRIES * 8
    if "multi_vector" in forms:
        tokens = sum(lengths) // CHARACTERS_A_TOKEN + 2 * len(lengths)
        expected += tokens * (dimensions or ASSUMED_TOKEN_DIMENSIONS) * bits // 8
    return expected > STREAMED_BYTES


class Rows:
    """The dense vectors of `items` items, made when the first of them say how wide they are. Threads may share one."""

    def __init__(self, items: int) -> None:
        self._items = items
        self._lock = threading.Lock()
        # The state: [items, dimensions], the rows that have come.
        self._array: Numbers | None = None

    def put(self, first: int, rows: Numbers) -> Numbers:
        """A view of these rows at their place. All rows at once stay where they are. Raises InternalError if they do not fit."""
        if len(rows) == self._items:
            return rows
        with self._lock:
            if self._array is None:
                self._array = self._made(rows)
        whole = self._array
        if whole.dtype != rows.dtype or whole.shape[1:] != rows.shape[1:] or first + len(rows) > len(whole):
            raise InternalError("the mesh answered the parts of this call in different shapes, or with more rows than items")
        view = whole[first : first + len(rows)]
        view[:] = rows
        view.flags.writeable = False
        return view

    def _made(self, rows: Numbers) -> Numbers:
        try:
            return np.empty((self._items, *rows.shape[1:]), rows.dtype)
        except (MemoryError, ValueError) as error:
            raise InternalError(f"the mesh answered with rows that do not fit into memory: {error}") from None


class EncodeSink:
    """Takes the messages with the answer to `items` items, of which the first has row `first` of `rows`."""

    def __init__(self, rows: Rows, first: int, items: int) -> None:
        self._rows, self._first, self._items = rows, first, items
        # The state: what has come, and how many rows that is.
        self._parts: list[EncodeResult] = []
        self._count = 0

    def take(self, reply: inference_pb2.EncodeResponse) -> None:
        """Raises InternalError."""
        result = codec.encode_result(reply)
        count = _rows_of(result)
        if "dense" in result.representations:
            array = self._rows.put(self._first + self._count, result.vectors.array)
            result = replace(result, _vectors=replace(result.vectors, array=array))
        self._parts.append(result)
        self._count += count

    def finish(self) -> EncodeResult:
        """Raises InternalError if rows are missing, ModelChanged if they come from two revisions."""
        if self._count != self._items:
            raise InternalError(f"the mesh answered {self._count} rows for {self._items} items")
        return parts.merge_encode(self._parts)


def _rows_of(result: EncodeResult) -> int:
    forms = result.representations
    counts = {
        *([len(result.dense)] if "dense" in forms else []),
        *([len(result.sparse)] if "sparse" in forms else []),
        *([len(result.multi_vector)] if "multi_vector" in forms else []),
    }
    if len(counts) != 1:
        raise InternalError("the mesh's answer has no rows, or not as many in each of its forms")
    return counts.pop()
