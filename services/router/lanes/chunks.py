"""Split the answers to jobs into messages of EncodeStream. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt
from shoal.v1 import inference_pb2 as pb
from shoal.v1 import tensor_pb2

from libs.embedding_id import check_expected, merge_ids
from libs.errors import InternalError
from services.router.lanes import codec

CHUNK_BYTES: Final = 1 << 20
"""Size of a message: a quarter of gRPC's default limit for clients, and sent without blocking the
event loop for long.
"""

_SCALE_BYTES: Final = 4
_INDEX_BYTES: Final = 4
_CHUNK_ROW_BYTES: Final = 15
"""Size of a chunk's position, token count and page."""

Offsets: TypeAlias = npt.NDArray[np.int64]
Shapes: TypeAlias = tuple[object, object, int]


def split(
    answer: pb.EncodeResponse,
    totals: pb.EncodeResponse | None = None,
    most_bytes: int = CHUNK_BYTES,
    *,
    first: int = 0,
) -> Iterator[pb.EncodeResponse]:
    """Split an answer into messages of its items or chunks in order, each with one of them or as
    many as fit into `most_bytes`.

    Each has the answer's revision and embedding id; the last has the usage and timings of `totals`,
    if given. Raises InternalError if the answer is empty, or if its forms have different numbers of
    items.

    Args:
        first: The item or chunk of the answer with which the messages begin.
    """
    rows = _Rows(answer)
    ends = np.cumsum(rows.sizes)
    while first < len(ends):
        before = int(ends[first - 1]) if first else 0
        end = max(first + 1, int(np.searchsorted(ends, before + most_bytes, side="right")))
        chunk = rows.slice_all(first, end)
        if totals is not None and end == len(ends):
            chunk.MergeFrom(totals)
        yield chunk
        first = end


def rows_from(answer: pb.EncodeResponse, first: int) -> pb.EncodeResponse:
    """Return the chunks of a part of an answer from `first` on. Raises InternalError as `split`."""
    if not first:
        return answer
    rows = _Rows(answer)
    return rows.slice_all(first, len(rows.sizes))


class ChunkMessages:
    """The messages of one call. Its jobs are answered in order."""

    def __init__(self, expected_id: str = "") -> None:
        """Create the messages. `expected_id`: the embedding id that the client requires."""
        self._expected_id = expected_id
        # The state: usage and timings so far, the forms and shapes of the first answer, and the
        # embedding ids of all answers: merged in pairs, an empty one would hide the earlier ones.
        # And the places of the chunks of the next answer that were sent before it.
        self._embedding_ids: set[str] = set()
        self._totals = pb.EncodeResponse()
        self._shape_of: Shapes | None = None
        self._sent: list[tuple[int, int]] = []

    def early(self, chunks: pb.EncodeResponse) -> pb.EncodeResponse:
        """Return the message of chunks of the next answer that arrived before it, which `messages`
        leaves out. Raises as `messages`.
        """
        self._check(chunks)
        self._sent += zip(chunks.chunks.starts, chunks.chunks.ends, strict=True)
        return chunks

    def messages(
        self, answer: pb.EncodeResponse, *, total_seconds: float | None = None
    ) -> Iterator[pb.EncodeResponse]:
        """Return the messages of the next answer.

        Raises InternalError if its forms or shapes differ from those of the first answer,
        EmbeddingIdMismatch if its vectors cannot be compared with the earlier ones or are not the
        required ones, and as `split` does.

        Args:
            total_seconds: Duration of the whole call; given with its last answer.
        """
        self._check(answer)
        sent, self._sent = self._sent, []
        places = zip(answer.chunks.starts, answer.chunks.ends, strict=False)
        if sent and (
            len(sent) >= len(answer.chunks.starts) or sent != [*islice(places, len(sent))]
        ):
            raise InternalError(
                "another worker divided the texts into other chunks than those that were sent: "
                "repeat the call"
            )
        self._totals = codec.add_totals(self._totals, answer)
        if total_seconds is None:
            return split(answer, first=len(sent))
        self._totals.timings.total_seconds = total_seconds
        return split(answer, self._totals, first=len(sent))

    def _check(self, answer: pb.EncodeResponse) -> None:
        check_expected(self._expected_id, answer.embedding_id)
        self._embedding_ids.add(answer.embedding_id)
        merge_ids(sorted(self._embedding_ids))
        self._shape_of = self._shape_of or _answer_shapes(answer)
        if _answer_shapes(answer) != self._shape_of:
            raise InternalError("the jobs of a request were answered in different forms or shapes")


def _answer_shapes(answer: pb.EncodeResponse) -> Shapes:
    tensors = (answer.dense, answer.sparse.values, answer.multi_vector.values)
    forms = tuple((name, answer.HasField(name)) for name in ("dense", "sparse", "multi_vector"))
    return (
        (*forms, answer.HasField("chunks")),
        tuple((one.data_type, tuple(one.shape[1:])) for one in tensors),
        answer.sparse.columns,
    )


class _Rows:
    """The rows of an answer. Each bytes field is read only once, because every access copies it."""

    def __init__(self, answer: pb.EncodeResponse) -> None:
        self._revision, self._embedding_id = answer.model_revision, answer.embedding_id
        parts: list[_Dense | _Sparse | _Ragged] = []
        if answer.HasField("dense"):
            parts.append(_Dense(answer.dense))
        if answer.HasField("sparse"):
            parts.append(_Sparse(answer.sparse))
        if answer.HasField("multi_vector"):
            parts.append(_Ragged(answer.multi_vector))
        sizes = [part.sizes for part in parts]
        if not sizes or not len(sizes[0]) or len({len(of_part) for of_part in sizes}) != 1:
            raise InternalError(
                "a worker's answer has no rows, or its forms have different numbers of rows"
            )
        self._parts = parts
        self._chunks = answer.chunks if answer.HasField("chunks") else None
        self._bounds: Offsets | None = None
        self.sizes: Offsets = np.sum(sizes, axis=0)
        if self._chunks is not None:
            self._bounds = np.array(self._chunks.offsets, np.int64)
            texts = [len(text.encode()) for text in self._chunks.texts]
            self.sizes = self.sizes + _CHUNK_ROW_BYTES + np.array(texts or [0], np.int64)

    def slice_all(self, first: int, end: int) -> pb.EncodeResponse:
        """Return some rows, with their chunks if they have any."""
        message = self.slice_rows(first, end)
        if self._chunks is None or self._bounds is None:
            return message
        low = int(np.searchsorted(self._bounds, first, side="right")) - 1
        high = int(np.searchsorted(self._bounds, end, side="left"))
        bounds = np.clip(self._bounds[low : high + 1], first, end) - first
        message.chunks.offsets.extend(bounds.tolist())
        message.chunks.continues = (
            self._chunks.continues if first == 0 else first > int(self._bounds[low])
        )
        for name in ("starts", "ends", "tokens", "pages", "texts"):
            getattr(message.chunks, name).extend(getattr(self._chunks, name)[first:end])
        return message

    def slice_rows(self, first: int, end: int) -> pb.EncodeResponse:
        chunk = pb.EncodeResponse(model_revision=self._revision, embedding_id=self._embedding_id)
        for part in self._parts:
            part.put(chunk, first, end)
        return chunk


class _Tensor:
    """A tensor that can be sliced by rows. BINARY pads each row to whole bytes."""

    def __init__(self, tensor: tensor_pb2.Tensor) -> None:
        self._data_type = tensor.data_type
        self._shape = list(tensor.shape)
        self._data, self._scale, self._offset = (
            memoryview(part) for part in (tensor.data, tensor.scale, tensor.offset)
        )
        self.rows = self._shape[0]
        self._width = len(self._data) // self.rows if self.rows else 0
        self.row_bytes = self._width + _SCALE_BYTES * (bool(self._scale) + bool(self._offset))

    def slice_rows(self, first: int, end: int) -> tensor_pb2.Tensor:
        scales = slice(_SCALE_BYTES * first, _SCALE_BYTES * end)
        return tensor_pb2.Tensor(
            data_type=self._data_type,
            shape=[end - first, *self._shape[1:]],
            data=bytes(self._data[self._width * first : self._width * end]),
            scale=bytes(self._scale[scales]),
            offset=bytes(self._offset[scales]),
        )


class _Dense:
    def __init__(self, dense: tensor_pb2.Tensor) -> None:
        self._tensor = _Tensor(dense)
        self.sizes: Offsets = np.full(self._tensor.rows, self._tensor.row_bytes, np.int64)

    def put(self, chunk: pb.EncodeResponse, first: int, end: int) -> None:
        chunk.dense.CopyFrom(self._tensor.slice_rows(first, end))


class _Ragged:
    def __init__(self, ragged: tensor_pb2.Ragged) -> None:
        self._values = _Tensor(ragged.values)
        self._offsets: Offsets = np.array(ragged.offsets, np.int64)
        self.sizes: Offsets = np.diff(self._offsets) * self._values.row_bytes

    def put(self, chunk: pb.EncodeResponse, first: int, end: int) -> None:
        offsets = self._offsets[first : end + 1]
        chunk.multi_vector.values.CopyFrom(
            self._values.slice_rows(int(offsets[0]), int(offsets[-1]))
        )
        chunk.multi_vector.offsets.extend((offsets - offsets[0]).tolist())


class _Sparse:
    def __init__(self, sparse: tensor_pb2.SparseMatrix) -> None:
        self._columns, self._truncated = sparse.columns, sparse.truncated
        self._values = _Tensor(sparse.values)
        self._indices = memoryview(sparse.indices)
        self._offsets: Offsets = np.array(sparse.offsets, np.int64)
        self.sizes: Offsets = np.diff(self._offsets) * (self._values.row_bytes + _INDEX_BYTES)

    def put(self, chunk: pb.EncodeResponse, first: int, end: int) -> None:
        offsets = self._offsets[first : end + 1]
        begin, stop = int(offsets[0]), int(offsets[-1])
        chunk.sparse.columns, chunk.sparse.truncated = self._columns, self._truncated
        chunk.sparse.offsets.extend((offsets - begin).tolist())
        chunk.sparse.indices = bytes(self._indices[_INDEX_BYTES * begin : _INDEX_BYTES * stop])
        chunk.sparse.values.CopyFrom(self._values.slice_rows(begin, stop))
