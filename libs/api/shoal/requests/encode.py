"""The plan of `encode`. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from shoal.errors import EmbeddingIdMismatch, InternalError
from shoal.requests import codec
from shoal.requests.arguments import (
    Options,
    SharedFiles,
    enum_value,
    item_lengths,
    item_list,
    item_messages,
    most_items,
)
from shoal.requests.chunks import ChunkPlan, with_texts
from shoal.requests.large import EncodeSink, Rows, is_large, rows_of
from shoal.requests.merging import merge_encode
from shoal.requests.plan import Plan
from shoal.requests.skipping import no_vectors, with_skipped_vectors
from shoal.results import DataType, EncodeResult, Form, Skipped
from shoal.tasks import Chunking, Items, Role
from shoal.transport.methods import ENCODE, ENCODE_STREAM
from shoal.v1 import inference_pb2 as pb
from shoal.v1 import tensor_pb2

_ROLES = {"query": pb.ROLE_QUERY, "document": pb.ROLE_DOCUMENT}
_FORMS = {
    "dense": pb.REPRESENTATION_DENSE,
    "sparse": pb.REPRESENTATION_SPARSE,
    "multi_vector": pb.REPRESENTATION_MULTI_VECTOR,
}
_DATA_TYPES = {
    "float32": tensor_pb2.DATA_TYPE_FLOAT32,
    "float16": tensor_pb2.DATA_TYPE_FLOAT16,
    "bfloat16": tensor_pb2.DATA_TYPE_BFLOAT16,
    "int8": tensor_pb2.DATA_TYPE_INT8,
    "uint8": tensor_pb2.DATA_TYPE_UINT8,
    "binary": tensor_pb2.DATA_TYPE_BINARY,
}


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


class EncodePlan(Plan[pb.EncodeRequest, pb.EncodeResponse, EncodeResult]):
    """Raises InvalidInput for arguments that no request can hold."""

    method, stream, name = ENCODE, ENCODE_STREAM, "items"

    def __init__(self, items: Items, encoding: Encoding, options: Options) -> None:
        self._forms, self._dimensions = encoding.forms, encoding.dimensions
        self._data_type: DataType = encoding.data_type or "float32"
        self._frame = options.message(
            pb.EncodeRequest,
            role=enum_value("role", encoding.role, _ROLES),
            representations=[enum_value("representations", form, _FORMS) for form in self._forms],
            data_type=enum_value("data_type", encoding.data_type, _DATA_TYPES),
            dimensions=encoding.dimensions,
            normalize=encoding.normalize,
            instruction=encoding.instruction,
            pooling_factor=encoding.pooling_factor,
            expect_embedding_id=encoding.expect_embedding_id,
        )
        self._expected_id = encoding.expect_embedding_id
        self._items = item_list(items)
        self._chunks = (
            None if encoding.chunking is None else ChunkPlan(encoding.chunking, self._items)
        )
        if self._chunks is not None:
            self._frame.chunking.CopyFrom(self._chunks.message)
        self.most_items = most_items(self._items)
        self._rows = Rows(len(self._items))
        invalid = options.invalid("items", self._items)
        answered_bytes = _SPARSE_BYTES if "sparse" in self._forms else 0
        super().__init__(
            item_lengths(self._items),
            invalid,
            repeated_bytes=self._frame.ByteSize(),
            answered_bytes=answered_bytes,
        )

    def is_large(self, lengths: Sequence[int]) -> bool:
        if self._chunks is not None and self._chunks.has_documents:
            return True  # The size of a document says little about its text.
        rows = lengths if self._chunks is None else self._chunks.lengths(lengths)
        return is_large(rows, self._forms, self._data_type, self._dimensions)

    def build(self, places: Sequence[int]) -> pb.EncodeRequest:
        request = pb.EncodeRequest()
        request.CopyFrom(self._frame)
        files = SharedFiles(self._items, places)
        request.items.extend(item_messages("items", self._items, places, files))
        request.files.extend(files.data())
        if self._chunks is not None:
            self._chunks.complete(request.items, places)
        return request

    def whole(self) -> pb.EncodeRequest:
        """Return all items in one request. Raises InvalidInput for an invalid one."""
        return self.build(range(len(self._items)))

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
        return EncodeSink(
            Rows(len(places)), 0, len(places)
        )  # Items are skipped: indices of rows are not those of items.

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
        self._items = 0

    def request(self) -> pb.EncodeRequest:
        """Return all items in one request. Raises InvalidInput for an invalid one."""
        return self._plan.whole()

    def take(self, reply: pb.EncodeResponse) -> EncodeResult:
        """Return the result of the next message. Raises InternalError if it cannot be read."""
        result = codec.encode_result(reply)
        count = len(result.chunks) if result.is_divided else rows_of(result)
        first = self._items - (result.is_divided and result.chunks.continues)
        self._items = first + count
        return self._plan.part(result, first)
