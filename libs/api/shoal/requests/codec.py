"""Conversion of reply messages to numpy and dataclasses. Pure; the only module of the client that
reads replies.

A protobuf `bytes` field is one Python object, of which numpy makes a view: a received matrix is not
copied, except for bfloat16, which numpy does not have and which becomes float32. An inconsistent
reply raises InternalError: whatever a server sends, callers get no exception but ShoalError.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from functools import wraps
from typing import Any, ParamSpec, Protocol, TypeVar

import numpy as np
import numpy.typing as npt
from google.protobuf import json_format

from shoal.errors import InternalError
from shoal.extractions import (
    Classification,
    Entity,
    Extraction,
    LabelScore,
    PageText,
    Region,
    Relation,
    Structure,
    TokenLogprob,
    ToolCall,
    Value,
)
from shoal.requests import words
from shoal.requests.words import inverse
from shoal.results import (
    Chunks,
    DataType,
    EncodeResult,
    ExtractResult,
    Floats,
    Integers,
    Numbers,
    Ragged,
    ResolvedAlias,
    ScoreResult,
    Sparse,
    Timings,
    Usage,
    Vectors,
)
from shoal.status import (
    Alias,
    LaneStatus,
    Mesh,
    Model,
    ModelCard,
    ModelPlace,
    Placement,
    PlacementReason,
    PoolStatus,
    ProcessStatus,
    Scheduler,
    WorkerStatus,
)
from shoal.tokens import DetokenizeResult, TokenizeResult, Tokens
from shoal.v1 import aliases_pb2, inference_pb2, mesh_pb2, models_pb2, tensor_pb2

T = TypeVar("T")
P = ParamSpec("P")

_FINISH_REASONS = inverse(words.FINISH_REASONS)
_DATA_TYPES = inverse(words.DATA_TYPES)
_STORED: dict[DataType, str] = {
    "float32": "<f4",
    "float16": "<f2",
    "bfloat16": "<u2",
    "int8": "i1",
    "uint8": "u1",
    "binary": "u1",
}


def _decoder(decode: Callable[P, T]) -> Callable[P, T]:
    """Make a decoder raise InternalError for an inconsistent reply."""

    @wraps(decode)
    def decoded(*arguments: P.args, **named: P.kwargs) -> T:
        try:
            return decode(*arguments, **named)
        except (ArithmeticError, LookupError, TypeError, ValueError) as error:
            raise InternalError(f"the mesh's answer cannot be read: {error}") from error

    return decoded


class _Enum(Protocol):
    """The methods of a generated enum that are used here."""

    def values(self) -> Any: ...
    def Name(self, number: Any) -> str: ...


def _name(kind: _Enum, number: int, prefix: str) -> str:
    """Return the name of an enum value in lower case, without `prefix`; `unknown_<number>` for a
    value that only a newer mesh has.
    """
    return (
        kind.Name(number).removeprefix(prefix).lower()
        if number in kind.values()
        else f"unknown_{number}"
    )


def _widened(upper: npt.NDArray[np.uint16]) -> Floats:
    """Return float32 from bfloat16, which is the upper half of a float32."""
    floats = (upper.astype(np.uint32) << 16).view(np.float32)
    floats.flags.writeable = False
    return floats


def _array(tensor: tensor_pb2.Tensor) -> tuple[Numbers, DataType]:
    """Return the stored numbers in their shape; for BINARY the last axis is whole bytes."""
    data_type = _DATA_TYPES.get(tensor.data_type)
    if data_type is None:
        raise ValueError(
            f"this client does not know data type {tensor.data_type}; use a newer version of shoal"
        )
    shape = list(tensor.shape)
    if data_type == "binary" and shape:
        shape[-1] = (shape[-1] + 7) // 8
    if not shape or min(shape) < 0:
        raise ValueError(f"a tensor has the invalid shape {shape}")
    array = np.frombuffer(tensor.data, dtype=_STORED[data_type]).reshape(shape)
    return (_widened(array) if data_type == "bfloat16" else array), data_type


def _per_row(data: bytes, rows: int) -> Floats | None:
    if not data:
        return None
    values: Floats = np.frombuffer(data, dtype="<f4")
    if len(values) != rows:
        raise ValueError(f"the vectors have {len(values)} scales for {rows} rows")
    return values


@_decoder
def vectors(tensor: tensor_pb2.Tensor) -> Vectors:
    array, data_type = _array(tensor)
    if array.ndim != 2:
        raise ValueError(f"vectors have the shape {array.shape}, which must have two dimensions")
    rows = len(array)
    return Vectors(
        array,
        data_type,
        tensor.shape[-1],
        _per_row(tensor.scale, rows),
        _per_row(tensor.offset, rows),
    )


@_decoder
def ragged(message: tensor_pb2.Ragged) -> Ragged:
    """Decode a ragged array; int8 rows are scaled back to float32."""
    values = _array(message.values)[0]
    scale = _per_row(message.values.scale, len(values))
    if scale is not None:
        with np.errstate(
            over="ignore", invalid="ignore"
        ):  # The scales are the mesh's, whatever they are.
            values = values.astype(np.float32) * scale[:, None]
    return Ragged(values, _bounds(message.offsets, len(values)))


@_decoder
def sparse(message: tensor_pb2.SparseMatrix) -> Sparse:
    values = _array(message.values)[0]
    offsets = _bounds(message.offsets, len(values))
    indices: npt.NDArray[np.int32] = np.frombuffer(
        message.indices, dtype="<i4"
    )  # uint32 below 2**31: columns of a vocabulary.
    if indices.shape != values.shape or (
        len(indices) and not 0 <= indices.min() <= indices.max() < message.columns
    ):
        raise ValueError(
            f"the indices do not fit {len(values)} values in {message.columns} columns"
        )
    return Sparse(values, indices, offsets, (len(offsets) - 1, message.columns), message.truncated)


def _bounds(numbers: Any, rows: int) -> Integers:
    """Return the row offsets of a ragged array, with their number checked against `rows`."""
    offsets = _integers(numbers)
    if not len(offsets) or offsets[0] != 0 or offsets[-1] != rows or (np.diff(offsets) < 0).any():
        raise ValueError(f"the offsets do not divide {rows} rows")
    return offsets


def _integers(numbers: Any) -> Integers:
    offsets = np.array(numbers, dtype=np.int64)
    offsets.flags.writeable = False
    return offsets


@_decoder
def encode_result(response: inference_pb2.EncodeResponse) -> EncodeResult:
    return EncodeResult(
        vectors(response.dense) if response.HasField("dense") else None,
        sparse(response.sparse) if response.HasField("sparse") else None,
        ragged(response.multi_vector) if response.HasField("multi_vector") else None,
        *_totals(response),
        embedding_id=response.embedding_id,
        _chunks=_chunks(response) if response.HasField("chunks") else None,
        alias=_resolved(response),
    )


def _totals(response: Any) -> tuple[Usage, Timings, str]:
    """Return the part that the responses of all verbs have."""
    return (
        _flat(Usage, response.usage),
        _flat(Timings, response.timings),
        response.model_revision,
    )


def _resolved(
    response: inference_pb2.EncodeResponse
    | inference_pb2.ScoreResponse
    | inference_pb2.ExtractResponse,
) -> ResolvedAlias | None:
    return _flat(ResolvedAlias, response.alias) if response.HasField("alias") else None


def _chunks(response: inference_pb2.EncodeResponse) -> Chunks:
    message = response.chunks
    starts, ends, tokens = (
        _integers(message.starts),
        _integers(message.ends),
        _integers(message.tokens),
    )
    offsets = _bounds(message.offsets, len(starts))
    if len(ends) != len(starts) or len(tokens) != len(starts) or (ends < starts).any():
        raise ValueError(
            f"{len(starts)} chunks have {len(ends)} ends and {len(tokens)} numbers of tokens, or "
            "end before they begin"
        )
    pages, texts = _integers(message.pages), list(message.texts)
    if len(pages) not in (0, len(starts)) or len(texts) not in (0, len(starts)):
        raise ValueError(f"{len(starts)} chunks have {len(pages)} pages and {len(texts)} texts")
    return Chunks(
        offsets,
        starts,
        ends,
        tokens,
        pages=pages if len(pages) else None,
        chunk_texts=texts,
        continues=message.continues,
    )


@_decoder
def score_result(response: inference_pb2.ScoreResponse) -> ScoreResult:
    scores = np.frombuffer(response.scores.data, dtype="<f4")
    ranking = _integers(response.ranking)
    if len(ranking) > len(scores) or (len(ranking) and ranking.max() >= len(scores)):
        raise ValueError(f"the ranking does not fit {len(scores)} scores")
    return ScoreResult(scores, ranking, *_totals(response), alias=_resolved(response))


@_decoder
def extract_result(response: inference_pb2.ExtractResponse) -> ExtractResult:
    results = tuple(_extraction(result) for result in response.results)
    return ExtractResult(results, *_totals(response), alias=_resolved(response))


@_decoder
def tokenize_result(response: inference_pb2.TokenizeResponse) -> TokenizeResult:
    texts = tuple(map(_tokens, response.results))
    return TokenizeResult(texts, response.max_tokens, *_totals(response))


def _tokens(message: inference_pb2.Tokenization) -> Tokens:
    if not len(message.ids) == len(message.starts) == len(message.ends):
        raise ValueError("a text's tokens lack ids or places")
    return Tokens(
        count=message.count,
        kept_tokens=message.kept_tokens,
        ids=_uint32(message.ids),
        starts=_uint32(message.starts),
        ends=_uint32(message.ends),
        names=tuple(message.tokens),
        special_before=message.special_before,
        special_after=message.special_after,
        kept_start=message.kept_start,
        kept_end=message.kept_end,
    )


def _uint32(numbers: Any) -> npt.NDArray[np.uint32]:
    found = np.array(numbers, np.uint32)
    found.flags.writeable = False
    return found


@_decoder
def detokenize_result(response: inference_pb2.DetokenizeResponse) -> DetokenizeResult:
    return DetokenizeResult(tuple(response.texts), *_totals(response))


def _extraction(message: inference_pb2.Extraction) -> Extraction:
    return Extraction(
        tuple(_flat(Entity, entity) for entity in message.entities),
        tuple(_flat(LabelScore, label) for label in message.labels),
        tuple(
            Relation(
                _flat(Entity, relation.head),
                _flat(Entity, relation.tail),
                relation.label,
                relation.score,
            )
            for relation in message.relations
        ),
        tuple(_flat(Region, region) for region in message.regions),
        message.text,
        tuple(_flat(PageText, page) for page in message.pages),
        message.document_pages,
        tuple(
            Classification(one.name, tuple(_flat(LabelScore, label) for label in one.labels))
            for one in message.classifications
        ),
        tuple(
            Structure(one.name, {field.name: _values(field) for field in one.fields})
            for one in message.structures
        ),
        _FINISH_REASONS.get(message.finish_reason, ""),
        json_format.MessageToDict(message.json) if message.HasField("json") else None,
        message.truncated,
        tuple(_flat(ToolCall, call) for call in message.tool_calls),
        tuple(_token(token) for token in message.tokens),
    )


def _token(message: inference_pb2.TokenLogprob) -> TokenLogprob:
    return TokenLogprob(
        message.text,
        message.logprob,
        tuple(TokenLogprob(one.text, one.logprob) for one in message.top),
    )


def _values(field: inference_pb2.StructureField) -> tuple[Value, ...] | Value | None:
    found = tuple(
        Value(
            one.text,
            one.score,
            one.start if one.HasField("start") else None,
            one.end if one.HasField("end") else None,
        )
        for one in field.values
    )
    if field.list:
        return found
    return found[0] if found else None


@_decoder
def model(message: models_pb2.Model) -> Model:
    return Model(
        message.model,
        _name(models_pb2.ModelState, message.state, "MODEL_STATE_"),
        _card(message.card) if message.HasField("card") else None,
        tuple(_place(place) for place in message.places),
        message.queued_tokens,
        message.last_error,
    )


def _card(message: models_pb2.ModelCard) -> ModelCard:
    tasks = tuple(_name(models_pb2.Task, task, "TASK_") for task in message.tasks)
    representations = tuple(
        _name(inference_pb2.Representation, form, "REPRESENTATION_")
        for form in message.representations
    )
    return _flat(ModelCard, message, tasks=tasks, representations=representations)


def _place(message: models_pb2.ModelPlace) -> ModelPlace:
    return _flat(
        ModelPlace, message, state=_name(models_pb2.ModelState, message.state, "MODEL_STATE_")
    )


@_decoder
def alias(message: aliases_pb2.Alias) -> Alias:
    return _flat(Alias, message)


@_decoder
def mesh(message: mesh_pb2.Mesh) -> Mesh:
    return Mesh(
        tuple(_worker(worker) for worker in message.workers),
        tuple(model(entry) for entry in message.models),
        tuple(_flat(LaneStatus, lane) for lane in message.lanes),
        message.router_id,
        _flat(Scheduler, message.scheduler),
        tuple(_flat(PoolStatus, pool) for pool in message.pools),
        tuple(_flat(ProcessStatus, process) for process in message.processes),
    )


def _worker(message: mesh_pb2.WorkerStatus) -> WorkerStatus:
    noticed = message.HasField("preempted_in_seconds")
    return _flat(
        WorkerStatus,
        message,
        preempted_in_seconds=message.preempted_in_seconds if noticed else None,
    )


@_decoder
def placement(model: str, message: mesh_pb2.ExplainPlacementResponse) -> Placement:
    reasons = tuple(_flat(PlacementReason, worker) for worker in message.workers)
    return Placement(
        model, message.summary, reasons, _flat(Scheduler, message.scheduler), message.plan
    )


def _flat(kind: type[T], message: Any, **given: object) -> T:
    """Return a dataclass from the message's fields of the same names, except for `given` ones;
    repeated fields become tuples.
    """
    values = dict(given)
    for field in fields(kind):  # type: ignore[arg-type]
        if field.name not in values:
            value = getattr(message, field.name)
            values[field.name] = value if isinstance(value, (str, int, float)) else tuple(value)
    return kind(**values)
