"""Split requests into jobs and merge their answers. Pure.

Called twice on the request path: after `splitting.py`, and when `dispatch.py` has all results.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias, TypeVar

import numpy as np
from google.protobuf.message import DecodeError
from shoal.v1 import inference_pb2 as pb
from shoal.v1 import tensor_pb2, worker_pb2

from libs.documents.text_size import NO_TEXT, TextBudget
from libs.embedding_id import merge_ids
from libs.errors import InternalError, ShoalError, from_reason
from libs.queue import LaneKey
from libs.versions import WIRE_VERSION
from services.router.admission.splitting import RequestPart
from services.router.admission.validation.reports import shorten
from services.router.admission.validation.requests import text_alone

ItemRequest: TypeAlias = pb.EncodeRequest | pb.ScoreRequest | pb.ExtractRequest
"""A request with a list of items."""
Request: TypeAlias = ItemRequest | pb.TokenizeRequest | pb.DetokenizeRequest
Response: TypeAlias = (
    pb.EncodeResponse
    | pb.ScoreResponse
    | pb.ExtractResponse
    | pb.TokenizeResponse
    | pb.DetokenizeResponse
)
_Request = TypeVar(
    "_Request",
    pb.EncodeRequest,
    pb.ScoreRequest,
    pb.ExtractRequest,
    pb.TokenizeRequest,
    pb.DetokenizeRequest,
)
_Lists = TypeVar("_Lists", pb.ExtractResponse, pb.TokenizeResponse, pb.DetokenizeResponse)
_Message = TypeVar("_Message", tensor_pb2.Tensor, tensor_pb2.Ragged, tensor_pb2.SparseMatrix)

_ITEM_BYTES: Final[Mapping[int, int]] = {
    tensor_pb2.DATA_TYPE_FLOAT32: 4,
    tensor_pb2.DATA_TYPE_FLOAT16: 2,
    tensor_pb2.DATA_TYPE_BFLOAT16: 2,
    tensor_pb2.DATA_TYPE_INT8: 1,
    tensor_pb2.DATA_TYPE_UINT8: 1,
    tensor_pb2.DATA_TYPE_BINARY: 1,
}
_MAX_AXIS: Final = 1 << 31
_MAX_COUNT: Final = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class JobHeader:
    """Fields that all jobs of a request share. Times are Unix ms by Redis' clock."""

    request_id: str
    deadline_ms: int
    queued_ms: int
    tenant: str = ""
    weight: float = 1.0
    """The tenant's fair-queueing weight."""
    traceparent: str = ""
    """Trace context of the span that sends the jobs; empty without one."""
    stream_to: str = ""
    """The router that streams generated text; empty: none."""
    item_answer_bytes: int = 0
    """Maximum bytes that the results of one item may take; 0: no limit."""
    budgets: Sequence[TextBudget] = ()
    """Pages and text that the document of each of the request's items may have."""
    max_chunks: int = 0
    """Maximum chunks of a job; 0: the worker's own."""


_LISTS: Final[Mapping[type[Request], str]] = {
    pb.EncodeRequest: "items",
    pb.ScoreRequest: "documents",
    pb.ExtractRequest: "items",
    pb.TokenizeRequest: "texts",
    pb.DetokenizeRequest: "sequences",
}
"""The field with the entries that are divided among the jobs of a request."""


def count_parts(request: Request) -> int:
    """Count the request's items, their parts and spans, and the entities given with them for the
    task relations.
    """
    if isinstance(request, pb.TokenizeRequest | pb.DetokenizeRequest):
        return len(getattr(request, _LISTS[type(request)]))
    items = request.documents if isinstance(request, pb.ScoreRequest) else request.items
    has_entities = isinstance(request, pb.ExtractRequest) and request.HasField("relations")
    pieces = sum(len(item.parts) + len(item.spans) for item in items if text_alone(item) is None)
    return len(items) + pieces + (sum(len(item.entities) for item in items) if has_entities else 0)


def job_payloads(
    request: _Request,
    parts: Sequence[RequestPart],
    ids: Sequence[str],
    stamp: JobHeader,
    shared: _Request | None = None,
) -> list[bytes]:
    """Return one serialised `Job` for each part, in order.

    Args:
        shared: The request without its items, if that exists already.
    """
    if len(parts) == 1:
        return [_job(request, ids[0], parts[0], stamp)]
    items = getattr(request, _LISTS[type(request)])
    template = without_items(request) if shared is None else shared
    payloads = []
    for part, name in zip(parts, ids, strict=True):
        own = items[part.first : part.first + part.count]
        payloads.append(_job(_with_items(template, own), name, part, stamp))
    return payloads


def _job(request: Request, job_id: str, part: RequestPart, stamp: JobHeader) -> bytes:
    budget = sum(stamp.budgets[part.first : part.first + part.count], NO_TEXT)
    job = worker_pb2.Job(
        job_id=job_id,
        request_id=stamp.request_id,
        first_item=part.first,
        deadline_unix_ms=stamp.deadline_ms,
        queued_unix_ms=stamp.queued_ms,
        tenant=stamp.tenant,
        weight=stamp.weight,
        traceparent=stamp.traceparent,
        stream_to=stamp.stream_to,
        item_answer_bytes=stamp.item_answer_bytes,
        document_pages=budget.pages,
        document_bytes=budget.bytes,
        max_chunks=stamp.max_chunks,
    )
    if isinstance(request, pb.EncodeRequest):
        job.encode.CopyFrom(request)
    elif isinstance(request, pb.ScoreRequest):
        job.score.CopyFrom(request)
    elif isinstance(request, pb.ExtractRequest):
        job.extract.CopyFrom(request)
    elif isinstance(request, pb.TokenizeRequest):
        job.tokenize.CopyFrom(request)
    else:
        job.detokenize.CopyFrom(request)
    return job.SerializeToString()


def without_items(request: _Request) -> _Request:
    """Copy the request without its items: the fields that each of its jobs repeats."""
    template = type(request)()
    template.CopyFrom(request)
    template.ClearField(_LISTS[type(request)])
    return template


def _with_items(template: _Request, items: Sequence[object]) -> _Request:
    request = type(template)()
    request.CopyFrom(template)
    getattr(request, _LISTS[type(request)]).extend(items)
    return request


def job_result(data: bytes) -> Response:
    """Parse the answer in a serialised `JobResult`. Raises the error that its failure names,
    InternalError if it is malformed.
    """
    try:
        result = worker_pb2.JobResult.FromString(data)
    except DecodeError:
        raise InternalError("a worker's result is not a JobResult") from None
    outcome = result.WhichOneof("outcome")
    if outcome == "encode":
        return _whole_encode(result.encode)
    if outcome == "score":
        _check_tensor(result.score.scores, "scores", 1)
        return result.score
    if outcome == "extract":
        return result.extract
    if outcome == "tokenize":
        return _whole_tokenize(result.tokenize)
    if outcome == "detokenize":
        return result.detokenize
    if outcome == "failure":
        raise from_failure(result.failure)
    raise InternalError(
        f"a worker's answer has no outcome known to this router (wire version {WIRE_VERSION}):"
        " upgrade the router"
    )


def from_failure(failure: worker_pb2.Failure) -> ShoalError:
    """Return the error of a worker's failure, with its texts cut to fit into a gRPC status."""
    short = worker_pb2.Failure()
    short.CopyFrom(failure)
    shorten(short)
    return from_reason(
        short.reason, short.message, field=short.field, retry_after=short.retry_after_seconds
    )


def encode_part(data: bytes) -> pb.EncodeResponse:
    """Parse some chunks of a job's answer. Raises InternalError if they are malformed."""
    try:
        return _whole_encode(pb.EncodeResponse.FromString(data))
    except DecodeError:
        raise InternalError("a part of a worker's result is not an EncodeResponse") from None


def _whole_encode(answer: pb.EncodeResponse) -> pb.EncodeResponse:
    """Validate that shapes fit the bytes, and that offsets rise and end at the last value. Merging
    and clients rely on this.
    """
    if answer.HasField("dense"):
        _check_tensor(answer.dense, "dense", 2)
    if answer.HasField("multi_vector"):
        rows = _check_tensor(answer.multi_vector.values, "multi_vector", 2)
        _check_offsets(answer.multi_vector.offsets, rows, "multi_vector")
    if answer.HasField("sparse"):
        sparse = answer.sparse
        rows = _check_tensor(sparse.values, "sparse", 1)
        _check_offsets(sparse.offsets, rows, "sparse")
        indices = np.frombuffer(sparse.indices, "<u4") if len(sparse.indices) == 4 * rows else None
        if indices is None or (rows and int(indices.max()) >= sparse.columns):
            raise InternalError(
                "a worker's sparse answer has indices that do not match its values or its width"
            )
    if answer.HasField("chunks"):
        _check_chunks(answer)
    return answer


def _check_chunks(answer: pb.EncodeResponse) -> None:
    """Raise InternalError unless each chunk has a position, a token count, and a row of each
    form.
    """
    chunks = answer.chunks
    rows = len(chunks.starts)
    _check_offsets(chunks.offsets, rows, "chunks")
    counts = {len(chunks.ends), len(chunks.tokens)}
    counts |= {len(found) for found in (chunks.pages, chunks.texts) if found}
    if answer.HasField("dense"):
        counts.add(answer.dense.shape[0])
    if answer.HasField("multi_vector"):
        counts.add(len(answer.multi_vector.offsets) - 1)
    if answer.HasField("sparse"):
        counts.add(len(answer.sparse.offsets) - 1)
    if counts != {rows}:
        raise InternalError(
            f"a worker's answer has {rows} chunks, but other numbers of their ends, tokens, pages,"
            " texts or vectors"
        )


def _whole_tokenize(answer: pb.TokenizeResponse) -> pb.TokenizeResponse:
    """Validate what clients rely on: each token has an id, a start, an end and, if any has, a
    name; special tokens are among them.

    Takes the same time for each text: an answer may have a million tokens, and this is the router's
    event loop.
    """
    for text in answer.results:
        tokens = len(text.ids)
        if (
            len(text.starts) != tokens
            or len(text.ends) != tokens
            or len(text.tokens) not in (0, tokens)
        ):
            raise InternalError(
                "a worker's answer has a text with tokens without ids, positions or names"
            )
        if text.special_before + text.special_after > tokens or text.kept_start > text.kept_end:
            raise InternalError(
                "a worker's answer has a text with more special tokens than tokens, or a kept "
                "part that ends first"
            )
    return answer


def _check_tensor(tensor: tensor_pb2.Tensor, name: str, axes: int) -> int:
    """Return the tensor's number of rows. Raises InternalError if its bytes do not fit its shape
    and type.
    """
    shape = list(tensor.shape)
    width = _ITEM_BYTES.get(tensor.data_type)
    if len(shape) != axes or min(shape) < 0 or max(shape) > _MAX_AXIS or width is None:
        raise InternalError(
            f"invalid tensor {name!r} from worker: shape {shape}, data type {tensor.data_type}"
        )
    stored = (
        [*shape[:-1], (shape[-1] + 7) // 8]
        if tensor.data_type == tensor_pb2.DATA_TYPE_BINARY
        else shape
    )
    if math.prod(stored) * width != len(tensor.data):
        raise InternalError(
            f"invalid tensor {name!r} from worker: {len(tensor.data)} bytes do not fit its shape"
            f" {shape}"
        )
    rows = shape[0]
    for scales in (tensor.scale, tensor.offset):
        if scales and len(scales) != 4 * rows:
            raise InternalError(
                f"invalid tensor {name!r} from worker: scales do not match its {rows} rows"
            )
    return rows


def _check_offsets(offsets: Sequence[int], rows: int, name: str) -> None:
    bounds = np.array(offsets, np.int64)
    if not len(bounds) or bounds[0] != 0 or bounds[-1] != rows or (np.diff(bounds) < 0).any():
        raise InternalError(
            f"invalid offsets of {name!r} from worker: they do not cover its {rows} rows"
        )


def failed(error: ShoalError) -> bytes:
    """Return a serialised `JobResult` with `error`."""
    failure = worker_pb2.Failure(
        reason=error.reason,
        message=error.message,
        field=error.field,
        retry_after_seconds=error.retry_after,
    )
    return worker_pb2.JobResult(failure=failure).SerializeToString()


def merge_encode(parts: list[Response]) -> pb.EncodeResponse:
    """Merge the answers to a request's jobs, in order. Raises InternalError if they do not fit
    together, EmbeddingIdMismatch if their vectors cannot be compared.

    Empties `parts`, so that no answer stays in memory once it was merged.
    """
    answers = _require_type(pb.EncodeResponse, parts)
    parts.clear()
    if len(answers) == 1:
        return answers[0]
    merged = pb.EncodeResponse(
        model_revision=_revision(answers),
        embedding_id=merge_ids(answer.embedding_id for answer in answers),
        usage=_usage(answers),
        timings=_timings(answers),
    )
    dense = _present([answer.dense if answer.HasField("dense") else None for answer in answers])
    sparse = _present([answer.sparse if answer.HasField("sparse") else None for answer in answers])
    ragged = _present(
        [answer.multi_vector if answer.HasField("multi_vector") else None for answer in answers]
    )
    chunks = [answer.chunks for answer in answers if answer.HasField("chunks")]
    if chunks and len(chunks) != len(answers):
        raise InternalError("only some jobs of a request were answered with chunks")
    answers.clear()
    if chunks:
        merged.chunks.offsets.extend(_join_offsets([part.offsets for part in chunks]))
        has_pages = any(part.pages for part in chunks)
        for part in chunks:
            pages = part.pages or [0] * len(part.starts) if has_pages else ()
            merged.chunks.MergeFrom(
                pb.Chunks(
                    starts=part.starts,
                    ends=part.ends,
                    tokens=part.tokens,
                    pages=pages,
                    texts=part.texts,
                )
            )
    if dense:
        _join_tensors(dense, merged.dense)
    if sparse:
        _join_sparse(sparse, merged.sparse)
    if ragged:
        _join_ragged(ragged, merged.multi_vector)
    return merged


def encode_answer(part: Response) -> pb.EncodeResponse:
    """Return the answer to one job of an encode request. Raises InternalError for another kind of
    answer.
    """
    return _require_type(pb.EncodeResponse, [part])[0]


def add_totals(totals: pb.EncodeResponse, part: pb.EncodeResponse) -> pb.EncodeResponse:
    """Add the usage and timings of one more answer to `totals`."""
    return pb.EncodeResponse(usage=_usage([totals, part]), timings=_timings([totals, part]))


def merge_score(parts: Sequence[Response], top_n: int) -> pb.ScoreResponse:
    """Merge answers as merge_encode does; the ranking covers all documents."""
    answers = _require_type(pb.ScoreResponse, parts)
    merged = pb.ScoreResponse(
        model_revision=_revision(answers), usage=_usage(answers), timings=_timings(answers)
    )
    _join_tensors([answer.scores for answer in answers], merged.scores)
    if merged.scores.data_type != tensor_pb2.DATA_TYPE_FLOAT32 or len(merged.scores.shape) != 1:
        raise InternalError("a worker answered with scores that are not a list of float32")
    merged.ranking.extend(ranking(np.frombuffer(merged.scores.data, "<f4"), top_n))
    return merged


def merge_extract(parts: list[Response]) -> pb.ExtractResponse:
    """Merge answers as merge_encode does. Empties `parts`."""
    return _merge_lists(pb.ExtractResponse, parts, "results")


def merge_tokenize(parts: list[Response]) -> pb.TokenizeResponse:
    """Merge answers as merge_encode does. Empties `parts`."""
    max_tokens = min(answer.max_tokens for answer in _require_type(pb.TokenizeResponse, parts))
    merged = _merge_lists(pb.TokenizeResponse, parts, "results")
    merged.max_tokens = max_tokens
    return merged


def merge_detokenize(parts: list[Response]) -> pb.DetokenizeResponse:
    """Merge answers as merge_encode does. Empties `parts`."""
    return _merge_lists(pb.DetokenizeResponse, parts, "texts")


def _merge_lists(kind: type[_Lists], parts: list[Response], field: str) -> _Lists:
    """Merge answers by concatenating their lists in `field`. Empties `parts`, and drops each answer
    once it is copied.
    """
    answers = _require_type(kind, parts)
    parts.clear()
    if len(answers) == 1:
        return answers[0]
    merged = kind(
        model_revision=_revision(answers), usage=_usage(answers), timings=_timings(answers)
    )
    answers.reverse()
    while answers:
        getattr(merged, field).extend(getattr(answers.pop(), field))
    return merged


def ranking(scores: np.ndarray[tuple[int], np.dtype[np.float32]], top_n: int) -> list[int]:
    """Rank the `top_n` (0: all) highest scores, best first; ties keep their order, NaN is last."""
    order: list[int] = np.argsort(-scores, kind="stable").tolist()
    return order[:top_n] if top_n else order


_Answer = TypeVar(
    "_Answer",
    pb.EncodeResponse,
    pb.ScoreResponse,
    pb.ExtractResponse,
    pb.TokenizeResponse,
    pb.DetokenizeResponse,
)


def _require_type(kind: type[_Answer], parts: Sequence[Response]) -> list[_Answer]:
    answers = [part for part in parts if isinstance(part, kind)]
    if len(answers) != len(parts) or not answers:
        raise InternalError(f"a worker answered a job with another type than {kind.__name__}")
    return answers


def _present(values: Sequence[_Message | None]) -> list[_Message]:
    present = [value for value in values if value is not None]
    if present and len(present) != len(values):
        raise InternalError("the jobs of a request were answered in different forms")
    return present


def _revision(answers: Sequence[Response]) -> str:
    # More than one while workers hold different revisions of a model; the client sees all.
    return ",".join(dict.fromkeys(answer.model_revision for answer in answers))


def _usage(answers: Sequence[Response]) -> pb.Usage:
    names = ("input_tokens", "image_tokens", "output_tokens", "truncated_items")
    return pb.Usage(
        **{
            name: min(sum(getattr(answer.usage, name) for answer in answers), _MAX_COUNT)
            for name in names
        },
        truncated_query=any(answer.usage.truncated_query for answer in answers),
    )


def _timings(answers: Sequence[Response]) -> pb.Timings:
    names = [field.name for field in pb.Timings.DESCRIPTOR.fields]
    return pb.Timings(
        **{name: max(getattr(answer.timings, name) for answer in answers) for name in names}
    )


def _join_tensors(tensors: list[tensor_pb2.Tensor], joined: tensor_pb2.Tensor) -> None:
    """Concatenate along the first axis into `joined`. BINARY pads each row, so its bytes can be
    concatenated too.

    Empties `tensors`: their bytes are in memory at most twice.
    """
    first = tensors[0]
    data_type, inner = first.data_type, list(first.shape[1:])
    del first
    if any(
        not tensor.shape or tensor.data_type != data_type or list(tensor.shape[1:]) != inner
        for tensor in tensors
    ):
        raise InternalError("the jobs of a request were answered in different shapes")
    joined.data_type = data_type
    joined.shape.extend([sum(tensor.shape[0] for tensor in tensors), *inner])
    joined.scale = b"".join([tensor.scale for tensor in tensors])
    joined.offset = b"".join([tensor.offset for tensor in tensors])
    tensors.reverse()
    joined.data = b"".join([tensors.pop().data for _ in range(len(tensors))])


def _join_ragged(parts: list[tensor_pb2.Ragged], joined: tensor_pb2.Ragged) -> None:
    joined.offsets.extend(_join_offsets([part.offsets for part in parts]))
    values = [part.values for part in parts]
    parts.clear()
    _join_tensors(values, joined.values)


def _join_sparse(parts: list[tensor_pb2.SparseMatrix], joined: tensor_pb2.SparseMatrix) -> None:
    if len({part.columns for part in parts}) != 1:
        raise InternalError("the jobs of a request were answered in different widths")
    joined.columns, joined.truncated = parts[0].columns, any(part.truncated for part in parts)
    joined.offsets.extend(_join_offsets([part.offsets for part in parts]))
    joined.indices = b"".join([part.indices for part in parts])
    values = [part.values for part in parts]
    parts.clear()
    _join_tensors(values, joined.values)


def _join_offsets(parts: Sequence[Sequence[int]]) -> list[int]:
    """Concatenate offsets that each begin at 0: shift each part by the end of the last, and drop
    the repeated boundaries.
    """
    joined, end = [0], 0
    for part in parts:
        joined.extend(end + offset for offset in part[1:])
        end = joined[-1]
    return joined


def to_lane(lane: worker_pb2.Lane) -> LaneKey:
    return LaneKey(lane.pool, lane.model, lane.adapter)


def from_lane(lane: LaneKey) -> worker_pb2.Lane:
    return worker_pb2.Lane(pool=lane.pool, model=lane.model, adapter=lane.adapter)
