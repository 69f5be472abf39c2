"""Converts results, failures and cards to messages. Pure.

`encode_result` and `encode_failure` run right before a Complete; `job_codec.py` reads jobs.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from google.protobuf import json_format, struct_pb2
from shoal.extractions import Entity, Extraction, TokenLogprob, Value, field_values
from shoal.requests import words
from shoal.tokens import Tokens
from shoal.v1 import inference_pb2, models_pb2, tensor_pb2, worker_pb2

from libs.catalog.card import Card, ImageSize
from libs.documents import CAN_READ
from libs.errors import ShoalError
from libs.models import (
    EncodeResult,
    ExtractResult,
    Result,
    ScoreResult,
    StoredArray,
)
from libs.models.interface.results import Chunks, DetokenizeResult, TokenizeResult
from libs.models.interface.work import (
    CancelCheck,
    in_slices,
    never_cancelled,
)
from libs.serving.calls.status import MAX_FIELD, MAX_MESSAGE

_Response: TypeAlias = (
    inference_pb2.EncodeResponse
    | inference_pb2.ScoreResponse
    | inference_pb2.ExtractResponse
    | inference_pb2.TokenizeResponse
    | inference_pb2.DetokenizeResponse
)
_ITEM = re.compile(r"(items|documents|texts|sequences)\[(\d{1,9})\]")
_INPUTS: dict[str, models_pb2.InputKind] = {
    "text": models_pb2.INPUT_KIND_TEXT,
    "image": models_pb2.INPUT_KIND_IMAGE,
}
_TEXT_AND_DOCUMENTS = (models_pb2.INPUT_KIND_TEXT, models_pb2.INPUT_KIND_DOCUMENT_TEXT)


@dataclass(frozen=True, slots=True)
class Timings:
    """Seconds that a job spent in each phase of `shoal.v1.Timings`."""

    queue: float
    prepare: float
    wait: float
    forward: float
    finish: float


def encode_result(
    result: Result,
    *,
    revision: str,
    tokens: int,
    timings: Timings,
    image_tokens: int = 0,
    embedding_id: str = "",
    cut: Collection[str] = (),
    check_cancelled: CancelCheck = never_cancelled,
) -> bytes:
    """Return a serialised JobResult. A job's ScoreResponse has no ranking: only the router sees all
    documents.

    Args:
        image_tokens: The part of `tokens` that is from images.
        embedding_id: The id of the vectors of an EncodeResult.
        cut: Paths in the job of texts of which tokens were cut.
        check_cancelled: Called before each item, and within large ones; its exception ends the
            work.
    """
    items = {found[0] for path in cut if (found := _ITEM.match(path))}
    usage = inference_pb2.Usage(
        input_tokens=tokens,
        image_tokens=image_tokens,
        truncated_items=len(items),
        truncated_query=any(_ITEM.match(path) is None for path in cut),
    )
    times = inference_pb2.Timings(
        queue_seconds=timings.queue,
        prepare_seconds=timings.prepare,
        wait_seconds=timings.wait,
        forward_seconds=timings.forward,
        finish_seconds=timings.finish,
    )
    message = worker_pb2.JobResult()
    match result:
        case EncodeResult():
            message.encode.CopyFrom(_encode_response(result))
            message.encode.embedding_id = embedding_id
            answer: _Response = message.encode
        case ScoreResult():
            message.score.CopyFrom(inference_pb2.ScoreResponse(scores=_scores(result)))
            answer = message.score
        case ExtractResult():
            for item in result.items:
                check_cancelled()
                message.extract.results.append(_extraction(item, check_cancelled))
            usage.output_tokens = result.output_tokens
            answer = message.extract
        case TokenizeResult():
            for text in result.items:
                check_cancelled()
                message.tokenize.results.append(_tokenization(text))
            message.tokenize.max_tokens = result.max_tokens
            answer = message.tokenize
        case DetokenizeResult():
            message.detokenize.texts.extend(result.texts)
            answer = message.detokenize
    answer.model_revision = revision
    answer.usage.CopyFrom(usage)
    answer.timings.CopyFrom(times)
    return message.SerializeToString()


def encode_part(result: EncodeResult, *, revision: str, embedding_id: str) -> bytes:
    """Return some chunks of a job's answer as a serialised EncodeResponse, without usage and
    timings.
    """
    response = _encode_response(result)
    response.model_revision, response.embedding_id = revision, embedding_id
    return response.SerializeToString()


def encode_failure(error: ShoalError, *, first_item: int = 0) -> worker_pb2.Failure:
    """Convert the error for the router. Item numbers in its path count from the request's first
    item.
    """
    return worker_pb2.Failure(
        reason=error.reason,
        message=_to_wire_text(error.message, MAX_MESSAGE),
        field=_to_wire_text(rebase(error.field, first_item), MAX_FIELD),
        retry_after_seconds=error.retry_after,
    )


def _to_wire_text(text: str, most: int) -> str:
    """Truncate and escape text for a protobuf string: file names may be invalid Unicode, and errors
    quote foreign text.
    """
    text = text if len(text) <= most else f"{text[: most - 1]}…"
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def failed(error: ShoalError, *, first_item: int = 0) -> bytes:
    """Return a serialised JobResult with a failure."""
    return worker_pb2.JobResult(
        failure=encode_failure(error, first_item=first_item)
    ).SerializeToString()


def rebase(field: str, first_item: int) -> str:
    """Shift the item number of a path: `items[2].text`, first item 10: `items[12].text`."""
    return _ITEM.sub(lambda match: f"{match[1]}[{int(match[2]) + first_item}]", field, count=1)


def to_card(
    card: Card, *, stored_bytes: int = 0, data_type: str = "", tokens_per_byte: float = 0.0
) -> models_pb2.ModelCard:
    """Convert a card for the registry of workers. Its bytes, data type and tokens per byte are only
    known after the model was loaded and used.
    """
    return models_pb2.ModelCard(
        model=card.model,
        revision=card.revision,
        family=card.family,
        tasks=[words.TASKS[task] for task in card.tasks],
        representations=[words.REPRESENTATIONS[form] for form in card.representations],
        dimensions=card.dimensions,
        multi_vector_dimensions=card.multi_vector_dimensions,
        max_tokens=card.max_tokens,
        bytes=stored_bytes,
        labels=card.labels,
        data_type=data_type,
        prompts=sorted(card.prompts),
        tokens_per_byte=tokens_per_byte,
        pools=card.pools,
        open_labels=card.contradiction is not None,
        given_entities=card.given_entities,
        inputs=_inputs(card),
        images=None if card.images is None else _image_input(card.images),
        created_unix_seconds=max(0, card.created_unix_seconds),
    )


def _inputs(card: Card) -> Sequence[models_pb2.InputKind]:
    """Return the input kinds, empty for a model that reads only text (compatibility).

    If the worker can read documents, models that read images get their pages as images, and text
    embedders get their text in chunks.
    """
    if card.inputs == ("text",):
        return _TEXT_AND_DOCUMENTS if CAN_READ and "encode" in card.tasks else ()
    documents = [models_pb2.INPUT_KIND_DOCUMENT] if "image" in card.inputs and CAN_READ else []
    return [*(_INPUTS[one] for one in card.inputs), *documents]


def _image_input(size: ImageSize) -> models_pb2.ImageInput:
    return models_pb2.ImageInput(
        height=size.height,
        width=size.width,
        short_side=size.short_side,
        patch=size.patch,
        extra_tokens=size.extra_tokens,
        max_tokens=size.max_tokens,
        long_side=size.long_side,
        maps=size.maps,
        text_tokens=size.text_tokens,
    )


def _encode_response(result: EncodeResult) -> inference_pb2.EncodeResponse:
    response = inference_pb2.EncodeResponse()
    if result.dense is not None:
        response.dense.CopyFrom(_tensor(result.dense))
    if result.sparse is not None:
        sparse = result.sparse
        rows = np.ascontiguousarray(sparse.indices, dtype="<u4").tobytes()
        response.sparse.CopyFrom(
            tensor_pb2.SparseMatrix(
                columns=sparse.columns,
                offsets=sparse.offsets,
                indices=rows,
                values=_tensor(sparse.values),
                truncated=sparse.truncated,
            )
        )
    if result.multi_vector is not None:
        ragged = tensor_pb2.Ragged(
            values=_tensor(result.multi_vector.values), offsets=result.multi_vector.offsets
        )
        response.multi_vector.CopyFrom(ragged)
    if result.chunks is not None:
        response.chunks.CopyFrom(_chunks(result.chunks))
    return response


def _chunks(chunks: Chunks) -> inference_pb2.Chunks:
    return inference_pb2.Chunks(
        offsets=chunks.offsets,
        starts=chunks.starts,
        ends=chunks.ends,
        tokens=chunks.tokens,
        pages=chunks.pages,
        texts=chunks.texts,
        continues=chunks.continues,
    )


def _tensor(stored: StoredArray) -> tensor_pb2.Tensor:
    return tensor_pb2.Tensor(
        data_type=words.DATA_TYPES[stored.data_type],
        shape=stored.shape,
        data=stored.values.tobytes(),
        scale=b"" if stored.scale is None else stored.scale.astype("<f4").tobytes(),
        offset=b"" if stored.offset is None else stored.offset.astype("<f4").tobytes(),
    )


def _scores(result: ScoreResult) -> tensor_pb2.Tensor:
    scores = np.ascontiguousarray(result.scores, dtype="<f4")
    return tensor_pb2.Tensor(
        data_type=tensor_pb2.DATA_TYPE_FLOAT32, shape=scores.shape, data=scores.tobytes()
    )


def _tokenization(text: Tokens) -> inference_pb2.Tokenization:
    return inference_pb2.Tokenization(
        count=text.count,
        ids=text.ids.tolist(),
        starts=text.starts.tolist(),
        ends=text.ends.tolist(),
        tokens=text.names,
        special_before=text.special_before,
        special_after=text.special_after,
        kept_tokens=text.kept_tokens,
        kept_start=text.kept_start,
        kept_end=text.kept_end,
    )


def _extraction(item: Extraction, check_cancelled: CancelCheck) -> inference_pb2.Extraction:
    return inference_pb2.Extraction(
        entities=[_entity(found) for found in in_slices(item.entities, check_cancelled)],
        labels=[inference_pb2.LabelScore(label=one.label, score=one.score) for one in item.labels],
        relations=[
            inference_pb2.Relation(
                head=_entity(one.head), tail=_entity(one.tail), label=one.label, score=one.score
            )
            for one in in_slices(item.relations, check_cancelled)
        ],
        regions=[
            inference_pb2.Region(
                left=one.left,
                top=one.top,
                right=one.right,
                bottom=one.bottom,
                label=one.label,
                score=one.score,
                polygon=one.polygon,
            )
            for one in in_slices(item.regions, check_cancelled)
        ],
        text=item.text,
        finish_reason=words.FINISH_REASONS[item.finish_reason] if item.finish_reason else None,
        json=None if item.form is None else _struct(item.form),
        pages=[
            inference_pb2.PageText(page=one.page, text=one.text, is_text_layer=one.is_text_layer)
            for one in item.pages
        ],
        document_pages=item.document_pages,
        classifications=[
            inference_pb2.Classification(
                name=one.name,
                labels=[
                    inference_pb2.LabelScore(label=each.label, score=each.score)
                    for each in one.labels
                ],
            )
            for one in item.classifications
        ],
        structures=[
            inference_pb2.Structure(
                name=one.name, fields=[_field(*each) for each in one.fields.items()]
            )
            for one in item.structures
        ],
        truncated=item.truncated,
        tool_calls=[
            inference_pb2.ToolCall(name=one.name, arguments=one.arguments)
            for one in item.tool_calls
        ],
        tokens=[_token(one) for one in item.tokens],
    )


def _token(token: TokenLogprob) -> inference_pb2.TokenLogprob:
    return inference_pb2.TokenLogprob(
        text=token.text, logprob=token.logprob, top=[_token(one) for one in token.top]
    )


def _struct(values: Mapping[str, object]) -> struct_pb2.Struct:
    made = struct_pb2.Struct()
    json_format.ParseDict(dict(values), made)
    return made


def _field(name: str, found: tuple[Value, ...] | Value | None) -> inference_pb2.StructureField:
    values = [
        inference_pb2.StructureValue(text=one.text, score=one.score, start=one.start, end=one.end)
        for one in field_values(found)
    ]
    return inference_pb2.StructureField(name=name, values=values, list=isinstance(found, tuple))


def _entity(found: Entity) -> inference_pb2.Entity:
    return inference_pb2.Entity(
        start=found.start, end=found.end, label=found.label, score=found.score, text=found.text
    )
