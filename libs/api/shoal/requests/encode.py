"""The plan of `encode`: chunks, and large answers.

Large answers are requested as a stream. Rows are copied to their place in one array as they arrive
and their messages are dropped, so that they are not in memory twice. Pure, except for that array.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from shoal.errors import EmbeddingIdMismatch, InternalError, InvalidInput, ModelChanged
from shoal.options import EncodeOptions, EncodeStreamOptions
from shoal.requests import codec, words
from shoal.requests.items import enum_value, has_document, item_list, message
from shoal.requests.merging import merge_encode, no_vectors, with_skipped_vectors
from shoal.requests.plan import ItemPlan, request_frame
from shoal.results import DataType, EncodeResult, Form, Numbers, Skipped
from shoal.tasks import Chunking, Item, Items, Parts, Role, Span
from shoal.transport.methods import ENCODE, ENCODE_STREAM
from shoal.v1 import inference_pb2 as pb


@dataclass(slots=True)
class Encoding:
    """The arguments that only `encode` has: how the model encodes texts, and in which forms vectors
    are returned.
    """

    role: Role | None
    representations: Form | Sequence[Form]
    data_type: DataType | None
    dimensions: int
    normalize: bool | None
    instruction: str
    pooling_factor: int = 0
    chunking: Chunking | None = None
    expect_embedding_id: str = ""

    @property
    def forms(self) -> Sequence[Form]:
        return (
            [self.representations]
            if isinstance(self.representations, str)
            else self.representations
        )


_SPARSE_BYTES = 1024
"""4,096 sparse vectors in a request at most: they share 32 MiB of its answer, and each has room for
1,024 weights.
"""


class EncodePlan(ItemPlan[pb.EncodeRequest, pb.EncodeResponse, EncodeResult]):
    """A call of `encode`. Raises InvalidInput for arguments that no request can hold."""

    method, stream, name = ENCODE, ENCODE_STREAM, "items"

    def __init__(
        self,
        items: Items,
        encoding: Encoding,
        model: str,
        options: EncodeOptions | EncodeStreamOptions,
    ) -> None:
        self._forms, self._dimensions = encoding.forms, encoding.dimensions
        self._data_type: DataType = encoding.data_type or "float32"
        frame = request_frame(
            pb.EncodeRequest,
            model,
            options,
            role=enum_value("role", encoding.role, words.ROLES),
            representations=[
                enum_value("representations", form, words.REPRESENTATIONS) for form in self._forms
            ],
            data_type=enum_value("data_type", encoding.data_type, words.DATA_TYPES),
            dimensions=encoding.dimensions,
            normalize=encoding.normalize,
            instruction=encoding.instruction,
            pooling_factor=encoding.pooling_factor,
            expect_embedding_id=encoding.expect_embedding_id,
        )
        self._expected_id = encoding.expect_embedding_id
        listed = item_list(items)
        self._chunks = None if encoding.chunking is None else ChunkPlan(encoding.chunking, listed)
        if self._chunks is not None:
            frame.chunking.CopyFrom(self._chunks.message)
        self._rows = DenseRows(len(listed))
        answered_bytes = _SPARSE_BYTES if "sparse" in self._forms else 0
        super().__init__(frame, listed, options, answered_bytes=answered_bytes)

    def is_large(self, lengths: Sequence[int]) -> bool:
        if self._chunks is not None and self._chunks.has_documents:
            return True  # The size of a document says little about its text.
        rows = lengths if self._chunks is None else self._chunks.lengths(lengths)
        return is_large(rows, self._forms, self._data_type, self._dimensions)

    def build(self, places: Sequence[int]) -> pb.EncodeRequest:
        request = super().build(places)
        if self._chunks is not None:
            self._chunks.complete(request.items, places)
        return request

    def part(self, result: EncodeResult, first: int) -> EncodeResult:
        """Return a part of a result with its place: it begins with item `first`, or continues it.
        Raises InternalError.
        """
        self._check_division(result)
        self._check_id(result.embedding_id)
        if result.is_divided:
            items = self._items[first : first + len(result.chunks)]
            result = with_texts(result, items)
        return replace(result, first_item=first)

    def sink(self, places: Sequence[int]) -> EncodeSink:
        if isinstance(places, range):
            return EncodeSink(self._rows, places[0], len(places))
        # Items are skipped: indices of rows are not those of items.
        return EncodeSink(DenseRows(len(places)), 0, len(places))

    def merge(self, results: Sequence[EncodeResult]) -> EncodeResult:
        if not results:
            return no_vectors(
                self._forms, self._data_type, self._dimensions, is_divided=self._chunks is not None
            )
        merged = merge_encode(results)
        self._check_id(merged.embedding_id)
        self._check_division(merged)
        return merged if self._chunks is None or self.invalid else with_texts(merged, self._items)

    def _check_division(self, found: EncodeResult) -> None:
        if (self._chunks is None) == found.is_divided:
            raise InternalError(
                "the mesh divided items that were to be whole, or did not divide others"
            )

    def _check_id(self, found: str) -> None:
        """Raise EmbeddingIdMismatch for other vectors, which a mesh that is too old returns."""
        expected = self._expected_id
        if not expected or (found and expected in (found, found.partition(".")[0])):
            return
        raise EmbeddingIdMismatch(
            f"expect_embedding_id is {expected}, and the mesh answered with vectors of "
            + (f"the id {found}" if found else "no id: it is too old to check them"),
            field="expect_embedding_id",
        )

    def insert_skipped(
        self, result: EncodeResult, kept: Sequence[int], skipped: Sequence[Skipped]
    ) -> EncodeResult:
        found = with_skipped_vectors(result, kept, skipped)
        return found if self._chunks is None else with_texts(found, self._items)


class EncodeParts:
    """The results of the messages of one stream, in order."""

    def __init__(self, plan: EncodePlan) -> None:
        self._plan = plan
        # The state: the items that have begun, and the revision and embedding id of the first part.
        self._items = 0
        self._first: tuple[str, str] | None = None

    def request(self) -> pb.EncodeRequest:
        """Return all items in one request. Raises InvalidInput for an invalid one."""
        return self._plan.whole()

    def take(self, reply: pb.EncodeResponse) -> EncodeResult:
        """Return the result of the next message. Raises InternalError if it cannot be read."""
        result = codec.encode_result(reply)
        count = len(result.chunks) if result.is_divided else _count_rows(result)
        first = self._items - (result.is_divided and result.chunks.continues)
        if first < 0:
            raise InternalError("the mesh's first chunks continue an item before them")
        self._items = first + count
        found = (result.revision, result.embedding_id)
        self._first = self._first or found
        if found != self._first:
            raise ModelChanged(
                f"the model changed from revision {self._first[0]} to {found[0]} during the call: "
                "repeat it"
            )
        return self._plan.part(result, first)


_DEFAULT_CHUNK_TOKENS: Final = 512


class ChunkPlan:
    """The division of a call's items into chunks. Raises InvalidInput for an item that no request
    can hold.
    """

    def __init__(self, chunking: Chunking, items: Sequence[Item]) -> None:
        self.has_documents = any(map(has_document, items))
        self.message: pb.Chunking = message(
            pb.Chunking,
            method=enum_value("chunking.method", chunking.method, words.CHUNK_METHODS),
            max_tokens=chunking.max_tokens,
            overlap=chunking.overlap,
            late=chunking.late,
            return_text=self.has_documents,
        )
        for name, given in (("contexts", chunking.contexts), ("spans", chunking.spans)):
            if given and (isinstance(given, str) or len(given) != len(items)):
                wrong = f"chunking.{name} has {len(given)} entries for {len(items)} items"
                raise InvalidInput(
                    f"{wrong}; it must be a list with one for each item", field=f"chunking.{name}"
                )
        self._contexts, self._spans = chunking.contexts, chunking.spans
        self._stride = (
            max(1, (chunking.max_tokens or _DEFAULT_CHUNK_TOKENS) - chunking.overlap)
            * CHARACTERS_PER_TOKEN
        )

    def lengths(self, lengths: Sequence[int]) -> list[int]:
        """Return the expected lengths of the chunks of items, in characters."""
        if self._spans:
            return [self._stride] * sum(map(len, self._spans))
        return [
            min(length, self._stride)
            for length in lengths
            for _ in range(length // self._stride + 1)
        ]

    def complete(self, items: Sequence[pb.Item], places: Sequence[int]) -> None:
        """Add contexts and spans to messages of the items at these indices."""
        for item, place in zip(items, places, strict=True):
            path = f"items[{place}]"
            if self._contexts:
                item.context = message(pb.Item, context=self._contexts[place]).context
            if self._spans:
                item.spans.extend(
                    [
                        _span(f"{path}.spans[{index}]", span)
                        for index, span in enumerate(self._spans[place])
                    ]
                )


def with_texts(result: EncodeResult, items: Sequence[Item]) -> EncodeResult:
    """Return the result with the texts of the items, of which chunks are parts. Those of documents
    are not known here.
    """
    return replace(result, _chunks=replace(result.chunks, texts=[_text(item) for item in items]))


def _span(path: str, span: Span | tuple[int, int]) -> pb.Span:
    try:
        start, end, context = (
            (span.start, span.end, span.context) if isinstance(span, Span) else (*span, "")
        )
        return pb.Span(start=start, end=end, context=context)
    except (TypeError, ValueError) as error:
        raise InvalidInput(f"{path} does not fit the request: {error}", field=path) from None


def _text(item: Item) -> str:
    if isinstance(item, Parts):
        return _text(item.pieces[0]) if len(item.pieces) == 1 else ""
    return item if isinstance(item, str) else ""


STREAMED_BYTES = 4 << 20
"""A larger expected answer is requested as a stream: proxies may limit messages to this size,
gRPC's default, and the router frees sent parts early. For smaller answers one message costs less.
"""
ASSUMED_DIMENSIONS = 1_024
"""Assumed length of dense vectors if the call does not set it: that of large encoders. Small ones
have 384.
"""
ASSUMED_TOKEN_DIMENSIONS = 128
"""Assumed length of a token's vector: late-interaction models have 96 or 128."""
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


class DenseRows:
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

    def __init__(self, rows: DenseRows, first: int, items: int) -> None:
        self._rows, self._first, self._items = rows, first, items
        # The results so far, and the number of their rows.
        self._parts: list[EncodeResult] = []
        self._count = 0

    def take(self, reply: pb.EncodeResponse) -> None:
        """Raise InternalError if the message cannot be read or does not fit."""
        result = codec.encode_result(reply)
        count = _count_rows(result)
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


def _count_rows(result: EncodeResult) -> int:
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
