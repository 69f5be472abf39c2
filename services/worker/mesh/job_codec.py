"""Converts the protobuf messages of jobs to the dataclasses of work
(libs/models/interface/work.py). Pure.

A worker calls `read_job` and `to_work` for each job that it pulls.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from hashlib import blake2b
from typing import TypeVar

import numpy as np
from shoal.extractions import ToolCall
from shoal.requests import words
from shoal.requests.words import inverse
from shoal.schema import Schema, SchemaClassification, SchemaField, SchemaLabel, SchemaStructure
from shoal.v1 import inference_pb2, worker_pb2

from libs.errors import InvalidInput, TaskNotSupported
from libs.models import (
    ClassifyWork,
    EncodeWork,
    EntitiesWork,
    Given,
    Part,
    Parts,
    RegionsWork,
    RelationsWork,
    ScoreWork,
    StructureWork,
    Truncation,
    Work,
)
from libs.models.interface.work import (
    Chunking,
    DetokenizeWork,
    Sampling,
    Span,
    TextWork,
    TokenizeWork,
    Turn,
)
from libs.models.runtime.documents import DocumentFile
from libs.versions import WIRE_VERSION

_Word = TypeVar("_Word")
_Unset = TypeVar("_Unset")
_Value = TypeVar("_Value", bound=int)
_ROLES = inverse(words.ROLES)
_REPRESENTATIONS = inverse(words.REPRESENTATIONS)
_TRUNCATIONS = inverse(words.TRUNCATIONS)
_SCALES = inverse(words.SCALES)
_AGGREGATIONS = inverse(words.AGGREGATIONS)
_DATA_TYPES = inverse(words.DATA_TYPES)
_TEXT_KINDS = inverse(words.TEXT_KINDS)
_TEXT_LAYERS = inverse(words.TEXT_LAYERS)
_CHUNK_METHODS = inverse(words.CHUNK_METHODS)
_SPEAKERS = inverse(words.SPEAKERS)
_FIELD_DTYPES = inverse(words.FIELD_DTYPES)


def read_job(payload: bytes) -> worker_pb2.Job:
    """Parse a Job. Raises google.protobuf.message.DecodeError."""
    return worker_pb2.Job.FromString(payload)


def to_work(job: worker_pb2.Job, *, scope: str | None = None) -> Work:
    """Convert the operation of a job. `scope` is the `Part.scope` of its images.

    Raises InvalidInput or TaskNotSupported. Paths of fields in errors count items from the first
    one of the job, which may be a part of a request.
    """
    match job.WhichOneof("operation"):
        case "encode":
            return _encode_work(job.encode, scope, job.max_chunks)
        case "score":
            return _score_work(job.score, scope)
        case "extract":
            return _extract_work(job.extract, scope, job.job_id)
        case "tokenize":
            return _tokenize_work(job.tokenize)
        case "detokenize":
            sequences = [np.array(one.ids, np.uint32) for one in job.detokenize.sequences]
            return DetokenizeWork(sequences, job.detokenize.skip_special_tokens)
    raise TaskNotSupported(
        f"this worker does not know the job's operation (wire version {WIRE_VERSION}): upgrade it"
    )


def document_files(job: worker_pb2.Job) -> Sequence[bytes]:
    """Return the files that documents of the job's items refer to."""
    match job.WhichOneof("operation"):
        case "encode" | "score" | "extract" as operation:
            return tuple(getattr(job, operation).files)
    return ()


def _encode_work(
    request: inference_pb2.EncodeRequest, scope: str | None, max_chunks: int
) -> EncodeWork:
    texts, parts = _contents(request.items, "items", scope)
    return EncodeWork(
        texts=texts,
        parts=parts,
        role=_word_or("", _ROLES, request.role, "role"),
        representations=tuple(
            _word(_REPRESENTATIONS, form, "representations") for form in request.representations
        ),
        data_type=_word_or("float32", _DATA_TYPES, request.data_type, "data_type"),
        dimensions=request.dimensions,
        normalize=request.normalize if request.HasField("normalize") else None,
        instruction=request.instruction,
        truncation=_word_or("default", _TRUNCATIONS, request.truncation, "truncation"),
        pooling_factor=request.pooling_factor,
        adapter=request.adapter,
        chunking=_chunking(request.chunking, max_chunks) if request.HasField("chunking") else None,
        spans=tuple(_spans(item) for item in request.items)
        if any(item.spans for item in request.items)
        else (),
        contexts=tuple(item.context for item in request.items)
        if any(item.context for item in request.items)
        else (),
    )


def _chunking(chunking: inference_pb2.Chunking, max_chunks: int) -> Chunking:
    return Chunking(
        _word_or("sentences", _CHUNK_METHODS, chunking.method, "chunking.method"),
        chunking.max_tokens,
        chunking.overlap,
        chunking.late,
        chunking.return_text,
        max_chunks,
    )


def _spans(item: inference_pb2.Item) -> tuple[Span, ...]:
    return tuple(Span(span.start, span.end, span.context) for span in item.spans)


def _score_work(request: inference_pb2.ScoreRequest, scope: str | None) -> ScoreWork:
    documents, parts = _contents(request.documents, "documents", scope)
    query = _content(request.query, "query", scope)
    return ScoreWork(
        query=query if isinstance(query, str) else "",
        query_parts=() if isinstance(query, str) else query,
        documents=documents,
        parts=parts,
        instruction=request.instruction,
        scale=_word_or("", _SCALES, request.scale, "scale"),
        truncation=_word_or("default", _TRUNCATIONS, request.truncation, "truncation"),
        adapter=request.adapter,
        window_overlap=_window_overlap(request),
    )


def _window_overlap(
    request: inference_pb2.ScoreRequest | inference_pb2.ExtractRequest,
) -> int | None:
    return request.window_overlap if request.HasField("window_overlap") else None


def _extract_work(
    request: inference_pb2.ExtractRequest, scope: str | None, job_id: str
) -> EntitiesWork | ClassifyWork | RelationsWork | RegionsWork | TextWork | StructureWork:
    truncation: Truncation = _word_or("default", _TRUNCATIONS, request.truncation, "truncation")
    overlap = _window_overlap(request)
    match request.WhichOneof("task"):
        case "entities":
            entities = request.entities
            return EntitiesWork(
                texts=_texts(request.items, "items"),
                labels=tuple(entities.labels),
                threshold=entities.threshold if entities.HasField("threshold") else None,
                flat=entities.flat if entities.HasField("flat") else True,
                aggregation=_word_or(
                    "simple", _AGGREGATIONS, entities.aggregation, "entities.aggregation"
                ),
                truncation=truncation,
                window_overlap=overlap,
            )
        case "classify":
            classify = request.classify
            texts, parts = _contents(request.items, "items", scope)
            return ClassifyWork(
                texts=texts,
                parts=parts,
                labels=tuple(classify.labels),
                multi_label=classify.multi_label if classify.HasField("multi_label") else None,
                threshold=classify.threshold if classify.HasField("threshold") else None,
                hypothesis=classify.hypothesis,
                truncation=truncation,
                window_overlap=overlap,
                among_labels=classify.among_labels,
                adapter=request.adapter,
            )
        case "relations":
            relations = request.relations
            return RelationsWork(
                texts=_texts(request.items, "items", given=True),
                labels=tuple(relations.labels),
                entity_labels=tuple(relations.entity_labels),
                threshold=relations.threshold if relations.HasField("threshold") else None,
                truncation=truncation,
                window_overlap=overlap,
                entities=_given(request.items),
            )
        case "regions":
            regions = request.regions
            texts, parts = _contents(request.items, "items", scope)
            return RegionsWork(
                texts=texts,
                labels=tuple(regions.labels),
                threshold=regions.threshold if regions.HasField("threshold") else None,
                parts=parts,
            )
        case "text":
            texts, parts = _contents(request.items, "items", scope)
            return TextWork(
                texts=texts,
                text_kind=_word_or("caption", _TEXT_KINDS, request.text.kind, "text.kind"),
                max_tokens=request.text.max_tokens,
                text_layer=_word_or(
                    "prefer", _TEXT_LAYERS, request.text.text_layer, "text.text_layer"
                ),
                instruction=request.text.instruction,
                region=_edges(request.text.region) if request.text.HasField("region") else None,
                parts=parts,
                json_schema=request.text.json_schema,
                turns=tuple(
                    _turn(turn, f"text.turns[{index}]")
                    for index, turn in enumerate(request.text.turns)
                ),
                template_values=request.text.template_values,
                sampling=_sampling(request.text.sampling),
                seeds=tuple(_seed(item, job_id, index) for index, item in enumerate(request.items)),
                stops=tuple(request.text.stop),
                top_logprobs=request.text.top_logprobs
                if request.text.HasField("top_logprobs")
                else None,
                raw_prompt=request.text.raw_prompt,
                tools=request.text.tools,
                calls_tool=request.text.tool_choice == inference_pb2.TextTask.TOOL_CHOICE_REQUIRED
                or bool(request.text.tool),
                tool=request.text.tool,
                single_tool_call=request.text.single_tool_call,
                item_role="tool"
                if request.text.item_role == inference_pb2.Turn.ROLE_TOOL
                else "user",
            )
        case "structure":
            return StructureWork(
                _texts(request.items, "items"), _schema(request.structure), truncation, overlap
            )
        case None:
            raise InvalidInput("no task is set", field="task")
        case task:
            raise TaskNotSupported(f"this worker has no models for the task {task}", field=task)


def _tokenize_work(request: inference_pb2.TokenizeRequest) -> TokenizeWork:
    return TokenizeWork(
        texts=list(request.texts),
        add_special_tokens=request.add_special_tokens
        if request.HasField("add_special_tokens")
        else True,
        truncation=_word_or("default", _TRUNCATIONS, request.truncation, "truncation"),
        count_only=request.count_only,
        return_tokens=request.return_tokens,
    )


def _turn(turn: inference_pb2.Turn, field: str) -> Turn:
    calls = tuple(ToolCall(call.name, call.arguments) for call in turn.tool_calls)
    return Turn(_word(_SPEAKERS, turn.role, f"{field}.role"), turn.text, calls)


def _sampling(sampling: inference_pb2.Sampling) -> Sampling:
    return Sampling(**{field.name: value for field, value in sampling.ListFields()})


def _seed(item: inference_pb2.Item, job_id: str, index: int) -> bytes:
    """Return the item's seed, or one derived from the job and the item's index, so that every
    worker generates the same text.
    """
    if item.HasField("seed"):
        return item.seed.to_bytes(8, "little")
    return blake2b(f"{index} {job_id}".encode(), digest_size=16).digest()


def _edges(region: inference_pb2.Box) -> tuple[float, float, float, float]:
    return region.left, region.top, region.right, region.bottom


def _schema(task: inference_pb2.StructureTask) -> Schema:
    return Schema(
        entities=tuple(map(_label, task.entities)),
        classifications=tuple(
            SchemaClassification(
                one.name,
                tuple(map(_label, one.labels)),
                one.multi_label,
                _threshold(one),
                one.description,
            )
            for one in task.classifications
        ),
        relations=tuple(map(_label, task.relations)),
        structures=tuple(
            SchemaStructure(one.name, tuple(_schema_field(each) for each in one.fields))
            for one in task.structures
        ),
        threshold=_threshold(task),
    )


def _label(label: inference_pb2.SchemaLabel) -> SchemaLabel:
    return SchemaLabel(label.label, label.description, _threshold(label))


def _schema_field(field: inference_pb2.SchemaField) -> SchemaField:
    dtype = _FIELD_DTYPES.get(field.kind, "list")
    return SchemaField(
        field.name, dtype, tuple(field.choices), field.description, _threshold(field)
    )


def _threshold(
    holder: inference_pb2.StructureTask
    | inference_pb2.SchemaClassification
    | inference_pb2.SchemaLabel
    | inference_pb2.SchemaField,
) -> float | None:
    return holder.threshold if holder.HasField("threshold") else None


def _texts(items: Iterable[inference_pb2.Item], field: str, *, given: bool = False) -> list[str]:
    """Return the texts of items for a task that reads only texts. With `given`, the task also
    accepts entities as input.
    """
    texts = []
    for index, item in enumerate(items):
        content = _content(item, f"{field}[{index}]", given=given)
        if not isinstance(content, str):
            raise TaskNotSupported(
                "the task accepts texts only, not images or several parts", field=content[0].field
            )
        texts.append(content)
    return texts


def _contents(
    items: Iterable[inference_pb2.Item], field: str, scope: str | None
) -> tuple[list[str], dict[int, Parts]]:
    """Return the texts of items ("" for those with parts), and the parts by index."""
    texts: list[str] = []
    parts: dict[int, Parts] = {}
    for index, item in enumerate(items):
        content = _content(item, f"{field}[{index}]", scope)
        if isinstance(content, str):
            texts.append(content)
        else:
            texts.append("")
            parts[index] = content
    return texts, parts


def _content(
    item: inference_pb2.Item, field: str, scope: str | None = None, *, given: bool = False
) -> str | Parts:
    """Return an item's text or parts. With `given`, the task also accepts entities as input."""
    if item.entities and not given:
        raise InvalidInput(
            f"{field}.entities may be given for the task relations only", field=f"{field}.entities"
        )
    if not item.parts:
        return item.text if item.WhichOneof("content") == "text" else (_piece(item, field, scope),)
    if item.WhichOneof("content") is not None:
        raise InvalidInput("both parts and their short form are set", field=field)
    parts = tuple(
        _piece(part, f"{field}.parts[{index}]", scope) for index, part in enumerate(item.parts)
    )
    alone = parts[0].content if len(parts) == 1 else b""
    return alone if isinstance(alone, str) else parts


def _piece(holder: inference_pb2.Item | inference_pb2.Part, field: str, scope: str | None) -> Part:
    match holder.WhichOneof("content"):
        case "text":
            return Part(holder.text, f"{field}.text")
        case "image":
            return Part(holder.image.data, f"{field}.image", scope)
        case "document" if isinstance(holder, inference_pb2.Part):
            asked = holder.document
            file = asked.file if asked.WhichOneof("source") == "file" else None
            pages = asked.first_page, asked.last_page, asked.dots_per_inch
            return Part(DocumentFile.create(asked.data, file, *pages), f"{field}.document", scope)
    raise InvalidInput("neither a text nor an image is set", field=field)


def _given(items: Sequence[inference_pb2.Item]) -> tuple[tuple[Given, ...], ...]:
    if not any(item.entities for item in items):
        return ()
    return tuple(
        tuple(Given(one.start, one.end, one.label) for one in item.entities) for item in items
    )


def _word_or(
    unset: _Unset, table: Mapping[_Value, _Word], value: _Value, field: str
) -> _Word | _Unset:
    """Return the word of an enum's value, or `unset` for the value 0 (unspecified)."""
    return _word(table, value, field) if value else unset


def _word(table: Mapping[_Value, _Word], value: _Value, field: str) -> _Word:
    word = table.get(value)
    if word is None:
        raise InvalidInput(f"{field} has no value {value}", field=field)
    return word
