"""Converts protobuf messages to work, and results to protobuf messages. Pure.

On the request path: `read_job` and `to_work` right after a Pull, `encode_result` and
`encode_failure` right before a Complete.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Literal, TypeAlias, TypeVar

import numpy as np
from google.protobuf import json_format, struct_pb2
from shoal.v1 import inference_pb2, models_pb2, tensor_pb2, worker_pb2

from libs.catalog.card import Card, ImageSize
from libs.documents import CAN_READ
from libs.errors import InvalidInput, ShoalError, TaskNotSupported
from libs.models import (
    Aggregation,
    ClassifyWork,
    DataType,
    EncodeResult,
    EncodeWork,
    EntitiesWork,
    Entity,
    Extraction,
    ExtractResult,
    Given,
    Part,
    Parts,
    RegionsWork,
    RelationsWork,
    Representation,
    Result,
    Role,
    Scale,
    Schema,
    SchemaClassification,
    SchemaField,
    SchemaLabel,
    SchemaStructure,
    ScoreResult,
    ScoreWork,
    StoredArray,
    StructureWork,
    Truncation,
    Work,
)
from libs.models.interface.results import (
    Chunks,
    DetokenizeResult,
    Field,
    Tokenization,
    TokenizeResult,
    TokenLogprob,
)
from libs.models.interface.work import (
    CancelCheck,
    Chunking,
    ChunkMethod,
    DetokenizeWork,
    Sampling,
    Span,
    TextKind,
    TextLayer,
    TextWork,
    TokenizeWork,
    ToolCall,
    Turn,
    in_slices,
    never_cancelled,
)
from libs.models.runtime.documents import DocumentFile
from libs.serving.calls.status import MAX_FIELD, MAX_MESSAGE
from libs.versions import WIRE_VERSION

_Word = TypeVar("_Word")
_Response: TypeAlias = (
    inference_pb2.EncodeResponse
    | inference_pb2.ScoreResponse
    | inference_pb2.ExtractResponse
    | inference_pb2.TokenizeResponse
    | inference_pb2.DetokenizeResponse
)
_ITEM = re.compile(r"(items|documents|texts|sequences)\[(\d{1,9})\]")

_ROLES: dict[int, Role] = {
    inference_pb2.ROLE_UNSPECIFIED: "",
    inference_pb2.ROLE_QUERY: "query",
    inference_pb2.ROLE_DOCUMENT: "document",
}
_REPRESENTATIONS: dict[int, Representation] = {
    inference_pb2.REPRESENTATION_DENSE: "dense",
    inference_pb2.REPRESENTATION_SPARSE: "sparse",
    inference_pb2.REPRESENTATION_MULTI_VECTOR: "multi_vector",
}
_TRUNCATIONS: dict[int, Truncation] = {
    inference_pb2.TRUNCATION_UNSPECIFIED: "default",
    inference_pb2.TRUNCATION_NONE: "none",
    inference_pb2.TRUNCATION_END: "end",
    inference_pb2.TRUNCATION_START: "start",
    inference_pb2.TRUNCATION_WINDOWS: "windows",
}
_SCALES: dict[int, Scale] = {
    inference_pb2.SCORE_SCALE_UNSPECIFIED: "",
    inference_pb2.SCORE_SCALE_LOGIT: "logit",
    inference_pb2.SCORE_SCALE_PROBABILITY: "probability",
}
_AGGREGATIONS: dict[int, Aggregation] = {
    inference_pb2.AGGREGATION_UNSPECIFIED: "simple",
    inference_pb2.AGGREGATION_NONE: "none",
    inference_pb2.AGGREGATION_SIMPLE: "simple",
    inference_pb2.AGGREGATION_FIRST: "first",
    inference_pb2.AGGREGATION_AVERAGE: "average",
    inference_pb2.AGGREGATION_MAX: "max",
}
_DATA_TYPES: dict[int, DataType] = {
    tensor_pb2.DATA_TYPE_UNSPECIFIED: "float32",
    tensor_pb2.DATA_TYPE_FLOAT32: "float32",
    tensor_pb2.DATA_TYPE_FLOAT16: "float16",
    tensor_pb2.DATA_TYPE_BFLOAT16: "bfloat16",
    tensor_pb2.DATA_TYPE_INT8: "int8",
    tensor_pb2.DATA_TYPE_UINT8: "uint8",
    tensor_pb2.DATA_TYPE_BINARY: "binary",
}
_STORED_TYPES: dict[DataType, tensor_pb2.DataType] = {
    "float32": tensor_pb2.DATA_TYPE_FLOAT32,
    "float16": tensor_pb2.DATA_TYPE_FLOAT16,
    "bfloat16": tensor_pb2.DATA_TYPE_BFLOAT16,
    "int8": tensor_pb2.DATA_TYPE_INT8,
    "uint8": tensor_pb2.DATA_TYPE_UINT8,
    "binary": tensor_pb2.DATA_TYPE_BINARY,
}
_TASKS: dict[str, models_pb2.Task] = {
    "encode": models_pb2.TASK_ENCODE,
    "score": models_pb2.TASK_SCORE,
    "entities": models_pb2.TASK_ENTITIES,
    "classify": models_pb2.TASK_CLASSIFY,
    "relations": models_pb2.TASK_RELATIONS,
    "regions": models_pb2.TASK_REGIONS,
    "text": models_pb2.TASK_TEXT,
    "structure": models_pb2.TASK_STRUCTURE,
}
_INPUTS: dict[str, models_pb2.InputKind] = {
    "text": models_pb2.INPUT_KIND_TEXT,
    "image": models_pb2.INPUT_KIND_IMAGE,
}
_TEXT_AND_DOCUMENTS = (models_pb2.INPUT_KIND_TEXT, models_pb2.INPUT_KIND_DOCUMENT_TEXT)
_KINDS: dict[int, TextKind] = {
    inference_pb2.TextTask.KIND_UNSPECIFIED: "caption",
    inference_pb2.TextTask.KIND_CAPTION: "caption",
    inference_pb2.TextTask.KIND_DETAILED_CAPTION: "detailed_caption",
    inference_pb2.TextTask.KIND_OCR: "ocr",
    inference_pb2.TextTask.KIND_OCR_REGIONS: "ocr_regions",
}
_TEXT_LAYERS: dict[int, TextLayer] = {
    inference_pb2.TextTask.TEXT_LAYER_UNSPECIFIED: "prefer",
    inference_pb2.TextTask.TEXT_LAYER_PREFER: "prefer",
    inference_pb2.TextTask.TEXT_LAYER_ONLY: "only",
    inference_pb2.TextTask.TEXT_LAYER_NEVER: "never",
}
_METHODS: dict[int, ChunkMethod] = {
    inference_pb2.Chunking.METHOD_UNSPECIFIED: "sentences",
    inference_pb2.Chunking.METHOD_SENTENCES: "sentences",
    inference_pb2.Chunking.METHOD_TOKENS: "tokens",
    inference_pb2.Chunking.METHOD_MARKDOWN: "markdown",
    inference_pb2.Chunking.METHOD_SPANS: "spans",
}
_SPEAKERS: dict[int, Literal["user", "assistant", "system", "tool"]] = {
    inference_pb2.Turn.ROLE_TOOL: "tool",
    inference_pb2.Turn.ROLE_USER: "user",
    inference_pb2.Turn.ROLE_ASSISTANT: "assistant",
    inference_pb2.Turn.ROLE_SYSTEM: "system",
}
_FINISHES: dict[str, inference_pb2.FinishReason] = {
    "": inference_pb2.FINISH_REASON_UNSPECIFIED,
    "stop": inference_pb2.FINISH_REASON_STOP,
    "length": inference_pb2.FINISH_REASON_LENGTH,
}
_FORMS: dict[str, inference_pb2.Representation] = {
    "dense": inference_pb2.REPRESENTATION_DENSE,
    "sparse": inference_pb2.REPRESENTATION_SPARSE,
    "multi_vector": inference_pb2.REPRESENTATION_MULTI_VECTOR,
}


@dataclass(frozen=True, slots=True)
class Timings:
    """Seconds that a job spent in each phase of `shoal.v1.Timings`."""

    queue: float
    prepare: float
    wait: float
    forward: float
    finish: float


def read_job(payload: bytes) -> worker_pb2.Job:
    """Parse a Job. Raises google.protobuf.message.DecodeError."""
    return worker_pb2.Job.FromString(payload)


def to_work(job: worker_pb2.Job, *, scope: str | None = None) -> Work:
    """Convert the job's operation from protobuf. `scope` is the `Part.scope` of its images.

    Raises InvalidInput or TaskNotSupported with a path relative to the job's first item.
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
        tasks=[_TASKS[task] for task in card.tasks],
        representations=[_FORMS[form] for form in card.representations],
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


def document_files(job: worker_pb2.Job) -> Sequence[bytes]:
    """Return the files that documents of the job's items refer to."""
    match job.WhichOneof("operation"):
        case "encode" | "score" | "extract" as operation:
            return tuple(getattr(job, operation).files)
    return ()


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


def _encode_work(
    request: inference_pb2.EncodeRequest, scope: str | None, max_chunks: int
) -> EncodeWork:
    texts, parts = _contents(request.items, "items", scope)
    return EncodeWork(
        texts=texts,
        parts=parts,
        role=_word(_ROLES, request.role, "role"),
        representations=tuple(
            _word(_REPRESENTATIONS, form, "representations") for form in request.representations
        ),
        data_type=_word(_DATA_TYPES, request.data_type, "data_type"),
        dimensions=request.dimensions,
        normalize=request.normalize if request.HasField("normalize") else None,
        instruction=request.instruction,
        truncation=_word(_TRUNCATIONS, request.truncation, "truncation"),
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
    method = _word(_METHODS, chunking.method, "chunking.method")
    return Chunking(
        method,
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
        scale=_word(_SCALES, request.scale, "scale"),
        truncation=_word(_TRUNCATIONS, request.truncation, "truncation"),
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
    truncation = _word(_TRUNCATIONS, request.truncation, "truncation")
    overlap = _window_overlap(request)
    match request.WhichOneof("task"):
        case "entities":
            entities = request.entities
            return EntitiesWork(
                texts=_texts(request.items, "items"),
                labels=tuple(entities.labels),
                threshold=entities.threshold if entities.HasField("threshold") else None,
                flat=entities.flat if entities.HasField("flat") else True,
                aggregation=_word(_AGGREGATIONS, entities.aggregation, "entities.aggregation"),
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
                text_kind=_word(_KINDS, request.text.kind, "text.kind"),
                max_tokens=request.text.max_tokens,
                text_layer=_word(_TEXT_LAYERS, request.text.text_layer, "text.text_layer"),
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
        truncation=_word(_TRUNCATIONS, request.truncation, "truncation"),
        count_only=request.count_only,
        return_tokens=request.return_tokens,
    )


def _turn(turn: inference_pb2.Turn, field: str) -> Turn:
    calls = tuple(ToolCall(call.name, call.arguments) for call in turn.tool_calls)
    return Turn(_word(_SPEAKERS, turn.role, f"{field}.role"), turn.text, calls)


def _sampling(sampling: inference_pb2.Sampling) -> Sampling:
    return Sampling(**{field.name: value for field, value in sampling.ListFields()})


def _seed(item: inference_pb2.Item, job_id: str, index: int) -> bytes:
    """Return the item's seed, or one derived from the job, which is the same on any worker."""
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
    single = field.kind == inference_pb2.SchemaField.KIND_STRING
    return SchemaField(
        field.name, single, tuple(field.choices), field.description, _threshold(field)
    )


def _threshold(
    holder: inference_pb2.StructureTask
    | inference_pb2.SchemaClassification
    | inference_pb2.SchemaLabel
    | inference_pb2.SchemaField,
) -> float | None:
    return holder.threshold if holder.HasField("threshold") else None


def _texts(items: Iterable[inference_pb2.Item], field: str, *, given: bool = False) -> list[str]:
    """Return the texts of a task for texts. `given`: the task accepts entities."""
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
    """Return an item's text or parts. `given`: the task accepts entities."""
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


def _word(words: Mapping[int, _Word], value: int, field: str) -> _Word:
    word = words.get(value)
    if word is None:
        raise InvalidInput(f"{field} has no value {value}", field=field)
    return word


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
        data_type=_STORED_TYPES[stored.data_type],
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


def _tokenization(text: Tokenization) -> inference_pb2.Tokenization:
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
        finish_reason=_FINISHES[item.finish],
        json=None if item.json is None else _struct(item.json),
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
            inference_pb2.Structure(name=one.name, fields=[_field(each) for each in one.fields])
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


def _field(field: Field) -> inference_pb2.StructureField:
    values = [
        inference_pb2.StructureValue(text=one.text, score=one.score, start=one.start, end=one.end)
        for one in field.values
    ]
    return inference_pb2.StructureField(name=field.name, values=values, list=field.many)


def _entity(found: Entity) -> inference_pb2.Entity:
    return inference_pb2.Entity(
        start=found.start, end=found.end, label=found.label, score=found.score, text=found.text
    )
