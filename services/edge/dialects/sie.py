"""Shoal's verbs in JSON and msgpack, in the form of SIE's server 0.10: `POST
/v1/encode|score|extract/{model}`. Pure.

sie-sdk and packages based on it use msgpack with numpy arrays, other clients JSON with lists.
Errors are JSON for both. SIE's requests do not name a task of Extract, so the model's card
determines it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Annotated, Any, Final, Literal

import msgspec
import numpy as np
from shoal.errors import InvalidInput
from shoal.requests import codec, words
from shoal.requests.extract import schema_message
from shoal.schema import Schema
from shoal.transport.methods import ENCODE, EXTRACT, GET_MODEL, SCORE
from shoal.v1 import inference_pb2 as pb
from shoal.v1 import models_pb2, tensor_pb2

from libs.documents.conversion import sniffing
from services.edge.messages.base import (
    MSGPACK,
    Answer,
    Dialect,
    Headers,
    HttpError,
    MeshCall,
    Received,
    Route,
    encode_json,
    invalid,
    retry_headers,
)
from services.edge.messages.limits import ITEMS, LABELS, PARTS, SPANS
from services.edge.messages.names import AliasTarget
from services.edge.messages.numbers import PIECE_NUMBERS, Rows, decoded, dense_rows
from services.edge.messages.reading import (
    plain_text_item,
    read,
    read_count,
    read_priority,
    target,
    text_item,
)

VERSION: Final = b"0.10.1"
"""The server version that sie-sdk expects; it warns about others."""
_CODES: Final = {
    "INPUT_TOO_LONG": (400, "INPUT_TOO_LONG"),
    "OUT_OF_MEMORY": (400, "INPUT_TOO_LONG"),
    "UNAUTHENTICATED": (401, "UNAUTHENTICATED"),
    "PERMISSION_DENIED": (403, "PERMISSION_DENIED"),
    "MODEL_NOT_FOUND": (404, "MODEL_NOT_FOUND"),
    "MODEL_UNREACHABLE": (424, "MODEL_NOT_FOUND"),
    "QUEUE_FULL": (503, "QUEUE_FULL"),
    "RATE_LIMITED": (429, "RATE_LIMITED"),
    "EMBEDDING_ID_MISMATCH": (412, "EMBEDDING_ID_MISMATCH"),
    "MODEL_LOAD_FAILED": (502, "MODEL_LOAD_FAILED"),
    "NO_CAPACITY": (503, "PROVISIONING"),
    "DRAINING": (503, "PROVISIONING"),
    "NOT_READY": (503, "PROVISIONING"),
    "CANNOT_CONNECT": (503, "PROVISIONING"),
    "DEADLINE_PASSED": (504, "TIMEOUT"),
}


def error(problem: HttpError) -> Answer:
    """Return `{"detail": {code, message}}`, from which sie-sdk decides whether to retry."""
    status, code = _CODES.get(
        problem.reason,
        (problem.status, "INFERENCE_ERROR" if problem.status >= 500 else "INVALID_INPUT"),
    )
    message = problem.message
    if problem.field and problem.field not in message:
        message = f"{problem.field}: {message}"
    headers = (
        *retry_headers(problem),
        (b"x-sie-error-code", code.encode()),
        (b"x-sie-server-version", VERSION),
    )
    return Answer(
        encode_json({"detail": {"code": code, "message": message}}), status, headers=headers
    )


SIE: Final = Dialect("sie", error)


PageNumber = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]


class ImageIn(msgspec.Struct, kw_only=True):
    """The bytes of an image file; base64 in JSON."""

    data: bytes
    format: str | None = None


Id = str | Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]
"""An id. Its numbers are limited to those that JSON and MessagePack encoders support."""


class DocumentIn(msgspec.Struct, kw_only=True):
    """Pages of a PDF file, or the text of a document of another format. Encode with `chunking`
    reads the text of all formats.

    Attributes:
        data: The file's bytes; base64 in JSON.
        format: `pdf`, `docx`, `xlsx`, `pptx`, `epub`, `html`, `eml`, `txt`, or its media
            type. It is compared with the data; omitted, it is recognized.
        first_page: From 1; 0 is the first page.
        last_page: 0 is the last page, for at most 16 pages, or 1,024 with `chunking`.
        dots_per_inch: The resolution of pages that a model reads; 0 is 144.
    """

    data: bytes
    format: str | None = None
    # Shoal's.
    first_page: PageNumber = 0
    last_page: PageNumber = 0
    dots_per_inch: PageNumber = 0


Position = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]


class SpanIn(msgspec.Struct, kw_only=True):
    """A chunk of a text: `start` and `end` (exclusive) in Unicode code points. The model reads
    `context` before the chunk.
    """

    start: Position
    end: Position
    context: str = ""


class ItemIn(msgspec.Struct, kw_only=True):
    """A text, an image, or a document (the bytes of a file, or an object). `id` is repeated in the
    answer.
    """

    text: str | None = None
    id: Id | None = None
    images: Annotated[list[ImageIn], PARTS] | None = None
    audio: Any = None
    video: Any = None
    document: DocumentIn | bytes | None = None
    # Shoal's, for encode with `chunking`.
    spans: Annotated[list[SpanIn], SPANS] | None = None
    """The chunks of the text for the method `spans`."""
    context: str | None = None
    """A text to read before each chunk, such as a title."""


class ChunkingIn(msgspec.Struct, kw_only=True):
    """The division of each text, or the text of each document, into chunks with their own vectors.

    Attributes:
        method: Where chunks end: at sentences, after a number of tokens, at Markdown's headings and
            blocks, or at the items' `spans`.
        max_tokens: The maximum length by the model's tokenizer; 0 is 512, or the model's limit if
            that is lower.
        overlap: Tokens that a chunk repeats of the previous one, at most half of `max_tokens`.
        late: Encode each text as a whole and pool the states of a chunk's tokens (late chunking).
        return_text: Return the chunks' texts.
    """

    method: Literal["sentences", "tokens", "markdown", "spans"] = "sentences"
    max_tokens: Position = 0
    overlap: Position = 0
    late: bool = False
    return_text: bool = False


class SieOptions(msgspec.Struct, kw_only=True):
    """Options of a request. An unsupported option that would change numbers is refused; other
    options are ignored.
    """

    is_query: bool | None = None
    normalize: bool | None = None
    lora_id: str | None = None
    threshold: float | None = None
    relation_labels: Annotated[list[str], LABELS] | None = None
    classification_type: str | None = None
    task: Literal["entities", "classify", "relations", "regions", "structure", "text"] | None = None
    """Shoal's: the task of a model with several."""
    profile: str | None = None
    overflow_policy: str | None = None
    window_overlap: Position | None = None
    """Shoal's: tokens that a window repeats of the one before, with `overflow_policy` windows."""
    dimensions: int | None = None
    pooling_factor: int | None = None
    """Shoal's: the factor by which a multi-vector's length is reduced by pooling."""
    pooling: Any = None
    query_template: Any = None
    doc_template: Any = None
    max_seq_length: Any = None
    muvera: Any = None
    smve: Any = None


class Params(msgspec.Struct, kw_only=True):
    """Parameters of encode and extract."""

    output_types: list[str] | None = None
    output_dtype: str | None = None
    instruction: str | None = None
    labels: Annotated[list[str], LABELS] | None = None
    output_schema: dict[str, Any] | None = None
    """The structures to find, in the gliner2 package's form; SIE does not define the form."""
    options: SieOptions | None = None
    chunking: ChunkingIn | None = None
    """Shoal's, only for encode."""


class EncodeIn(msgspec.Struct, kw_only=True):
    """`POST /v1/encode/{model}`."""

    items: Annotated[list[ItemIn], ITEMS]
    params: Params | None = None
    # Shoal's.
    pool: str | None = None
    priority: str | int | None = None


class ScoreIn(msgspec.Struct, kw_only=True):
    """`POST /v1/score/{model}`."""

    query: ItemIn
    items: Annotated[list[ItemIn], ITEMS]
    instruction: str | None = None
    options: SieOptions | None = None
    # Shoal's.
    pool: str | None = None
    priority: str | int | None = None


class ExtractIn(msgspec.Struct, kw_only=True):
    """`POST /v1/extract/{model}`."""

    items: Annotated[list[ItemIn], ITEMS]
    params: Params | None = None
    # Shoal's.
    pool: str | None = None
    priority: str | int | None = None


class ScoreOut(msgspec.Struct, kw_only=True):
    """The scores, best first; `rank` starts at 0."""

    model: str
    scores: list[dict[str, Any]]
    timing: dict[str, float]
    usage: dict[str, int]


class ItemsOut(msgspec.Struct, kw_only=True):
    """One entry per item in order. With `chunking` each has `chunks` with `start`, `end`, `tokens`
    and vectors; those of documents also `page`.
    """

    model: str
    items: list[dict[str, Any]]
    timing: dict[str, float]
    usage: dict[str, int]
    embedding_id: str = ""
    """Shoal's, only for encode: identifies the model and options that decide the vectors."""


_FORMS: Final = {
    "dense": pb.REPRESENTATION_DENSE,
    "sparse": pb.REPRESENTATION_SPARSE,
    "multivector": pb.REPRESENTATION_MULTI_VECTOR,
}
_STORED: Final = {
    "float32": tensor_pb2.DATA_TYPE_UNSPECIFIED,
    "float16": tensor_pb2.DATA_TYPE_FLOAT16,
    "int8": tensor_pb2.DATA_TYPE_INT8,
    "binary": tensor_pb2.DATA_TYPE_BINARY,
}
_TASKS: Final = {
    "entities": models_pb2.TASK_ENTITIES,
    "classify": models_pb2.TASK_CLASSIFY,
    "relations": models_pb2.TASK_RELATIONS,
    "regions": models_pb2.TASK_REGIONS,
    "structure": models_pb2.TASK_STRUCTURE,
    "text": models_pb2.TASK_TEXT,
}
_FINDS: Final = frozenset(_TASKS.values()) - {models_pb2.TASK_TEXT}
"""Tasks of Extract that find something. They take precedence over generating text if a model has
both.
"""
_DOCUMENTS: Final = {"items[].parts[].document": "items[].document"}
"""The caller's name of an item's document."""
_CHUNKED: Final = {"chunking": "params.chunking"}
_OVERFLOW: Final = {
    "truncate": pb.TRUNCATION_END,
    "error": pb.TRUNCATION_NONE,
    "windows": pb.TRUNCATION_WINDOWS,
}
"""`windows` is Shoal's, for scores and extractions."""
_WRONG_OPTIONS: Final = (
    "pooling",
    "query_template",
    "doc_template",
    "max_seq_length",
    "muvera",
    "smve",
)


def encode(received: Received) -> MeshCall:
    """`POST /v1/encode/{model}`. Raises HttpError."""
    request = read(EncodeIn, received)
    named = _named(received)
    params = request.params or Params()
    options = _options(params.options, "params.options")
    dtype = params.output_dtype or "float32"
    message = pb.EncodeRequest(
        model=named.model,
        items=_items(request.items),
        role=pb.ROLE_QUERY if options.is_query else pb.ROLE_DOCUMENT,
        representations=[
            _choice(_FORMS, form, f"params.output_types[{index}]")
            for index, form in enumerate(params.output_types or ())
        ],
        data_type=_choice(_STORED, dtype, "params.output_dtype"),
        dimensions=options.dimensions
        if options.dimensions and options.dimensions > 0
        else named.dimensions,
        instruction=params.instruction or "",
        pooling_factor=read_count(options.pooling_factor, "params.options.pooling_factor"),
        truncation=_overflow(options),
        adapter=options.lora_id or named.adapter,
        pool=request.pool or "",
        priority=read_priority(request.priority),
    )
    if options.is_query is None and named.role == "query":
        message.role = pb.ROLE_QUERY
    if options.normalize is not None:
        message.normalize = options.normalize
    chunking = params.chunking
    if chunking is not None:
        message.chunking.CopyFrom(_chunking(chunking))
        message.chunking.return_text = chunking.return_text and any(
            item.document is not None for item in request.items
        )

    def convert(reply: pb.EncodeResponse) -> Answer:
        if chunking is None:
            rows = _encoded(reply, len(request.items), dtype)
        else:
            rows = _chunk_entries(
                reply,
                [item.text or "" for item in message.items] if chunking.return_text else [],
                dtype,
            )
        items = (_with_id(one, row) for one, row in zip(request.items, rows, strict=True))
        head = {"model": received.model}
        if reply.embedding_id:
            head["embedding_id"] = reply.embedding_id
        return _stream_items(received, head, items, reply, _numbers(reply))

    return MeshCall(ENCODE, message, convert, fields=_DOCUMENTS | _CHUNKED)


def _chunking(given: ChunkingIn) -> pb.Chunking:
    method = words.CHUNK_METHODS[given.method]
    return pb.Chunking(
        method=method, max_tokens=given.max_tokens, overlap=given.overlap, late=given.late
    )


def score(received: Received) -> MeshCall:
    """`POST /v1/score/{model}`. Raises HttpError."""
    request = read(ScoreIn, received)
    named = _named(received)
    options = _options(request.options, "options")
    message = pb.ScoreRequest(
        model=named.model,
        query=_item(request.query, "query"),
        documents=_items(request.items),
        instruction=request.instruction or "",
        truncation=_overflow(options),
        window_overlap=options.window_overlap,
        adapter=options.lora_id or named.adapter,
        pool=request.pool or "",
        priority=read_priority(request.priority),
    )

    def convert(reply: pb.ScoreResponse) -> Answer:
        found = decoded(codec.score_result, reply)
        scores = [
            {
                "item_id": _item_id(request.items, int(index)),
                "score": float(found.scores[index]),
                "rank": rank,
            }
            for rank, index in enumerate(found.ranking)
        ]
        return _whole(received, {"model": received.model, "scores": scores}, reply)

    return MeshCall(
        SCORE,
        message,
        convert,
        fields={"documents": "items", "documents[].parts[].document": "items[].document"},
    )


def extract(received: Received) -> MeshCall:
    """`POST /v1/extract/{model}`. It requests the model's card first, which determines the task.
    Raises HttpError.
    """
    request = read(ExtractIn, received)
    named = _named(received)
    params = request.params or Params()
    _options(params.options, "params.options")
    _schema(params)
    _items(request.items)

    def convert(reply: models_pb2.GetModelResponse) -> MeshCall:
        return _extract(received, request, named, list(reply.model.card.tasks))

    def fallback(problem: HttpError) -> MeshCall | None:
        """Call a model that no worker knows yet, which makes a worker load it."""
        return (
            _extract(received, request, named, []) if problem.reason == "MODEL_NOT_FOUND" else None
        )

    return MeshCall(
        GET_MODEL, models_pb2.GetModelRequest(model=named.model), convert, fallback=fallback
    )


def _extract(
    received: Received, request: ExtractIn, named: AliasTarget, tasks: list[models_pb2.Task]
) -> MeshCall:
    params = request.params or Params()
    options = params.options or SieOptions()
    message = pb.ExtractRequest(
        model=named.model,
        items=_items(request.items),
        truncation=_overflow(options),
        window_overlap=options.window_overlap,
        adapter=options.lora_id or named.adapter,
        pool=request.pool or "",
        priority=read_priority(request.priority),
    )
    _set_task(message, params, options, tasks)

    def convert(reply: pb.ExtractResponse) -> Answer:
        items = [
            _with_id(one, _extraction(result))
            for one, result in zip(request.items, reply.results, strict=True)
        ]
        return _whole(received, {"model": received.model, "items": items}, reply)

    labels = (
        "entities.labels",
        "classify.labels",
        "relations.labels",
        "relations.entity_labels",
        "regions.labels",
    )
    fields = {
        **dict.fromkeys(labels, "params.labels"),
        "structure": "params.output_schema",
        **_DOCUMENTS,
    }
    return MeshCall(EXTRACT, message, convert, fields=fields)


def _set_task(
    message: pb.ExtractRequest, params: Params, options: SieOptions, tasks: list[models_pb2.Task]
) -> None:
    labels = params.labels or []
    schema = _schema(params)
    if schema is not None:
        message.structure.CopyFrom(schema)
        if options.threshold is not None:
            message.structure.threshold = options.threshold
        return
    if options.task is not None:
        tasks = [_TASKS[options.task]]
    if models_pb2.TASK_TEXT in tasks and _FINDS.isdisjoint(tasks):
        message.text.CopyFrom(
            pb.TextTask(kind=pb.TextTask.KIND_OCR, instruction=params.instruction or "")
        )
    elif options.relation_labels or models_pb2.TASK_RELATIONS in tasks:
        wanted, kinds = (
            (options.relation_labels, labels) if options.relation_labels else (labels, [])
        )
        message.relations.CopyFrom(
            pb.RelationsTask(labels=wanted, entity_labels=kinds, threshold=options.threshold)
        )
    elif models_pb2.TASK_REGIONS in tasks or (
        not tasks and any(item.HasField("image") for item in message.items)
    ):
        message.regions.CopyFrom(pb.RegionsTask(labels=labels, threshold=options.threshold))
    elif options.classification_type is not None or (
        models_pb2.TASK_CLASSIFY in tasks and models_pb2.TASK_ENTITIES not in tasks
    ):
        message.classify.CopyFrom(pb.ClassifyTask(labels=labels, threshold=options.threshold))
        if options.classification_type is not None:
            message.classify.multi_label = (
                options.classification_type.replace("_", "-") == "multi-label"
            )
    else:
        message.entities.CopyFrom(pb.EntitiesTask(labels=labels, threshold=options.threshold))


def _schema(params: Params) -> pb.StructureTask | None:
    """Return the parsed schema. Raises HttpError for an invalid one."""
    asked = params.output_schema
    if asked is not None and not asked:
        raise invalid("params.output_schema is empty", "params.output_schema")
    if asked is None:
        if params.options is not None and params.options.task == "structure":
            raise invalid(
                "params.output_schema is required for the task structure", "params.output_schema"
            )
        return None
    try:
        return schema_message(Schema.from_dict(asked))
    except InvalidInput as error:
        raise invalid(f"params.output_schema is invalid: {error}", "params.output_schema") from None


def _extraction(result: pb.Extraction) -> dict[str, Any]:
    entities = [
        {
            "text": one.text,
            "label": one.label,
            "score": one.score,
            "start": one.start,
            "end": one.end,
        }
        for one in result.entities
    ]
    relations = [
        {"head": one.head.text, "tail": one.tail.text, "relation": one.label, "score": one.score}
        for one in result.relations
    ]
    classifications = [{"label": one.label, "score": one.score} for one in result.labels]
    classifications += [
        {"task": one.name, "label": label.label, "score": label.score}
        for one in result.classifications
        for label in one.labels
    ]
    objects = [
        {"label": one.label, "score": one.score, "bbox": [one.left, one.top, one.right, one.bottom]}
        for one in result.regions
    ]
    found = {
        "entities": entities,
        "relations": relations,
        "classifications": classifications,
        "objects": objects,
    }
    pages = [
        {"page": one.page, "text": one.text, "is_text_layer": one.is_text_layer}
        for one in result.pages
    ]
    read = {
        name: value
        for name, value in (
            ("text", result.text),
            ("pages", pages),
            ("truncated", result.truncated),
        )
        if value
    }
    return found | ({"data": _data(result)} if result.structures else {}) | read


def _data(result: pb.Extraction) -> dict[str, Any]:
    """Return the structures of a schema: a list of instances by name."""
    data: dict[str, Any] = {}
    for one in result.structures:
        fields = {field.name: [_value(value) for value in field.values] for field in one.fields}
        single = {field.name for field in one.fields if not field.list}
        instance = {
            name: (values[0] if values else None) if name in single else values
            for name, values in fields.items()
        }
        data.setdefault(one.name, []).append(instance)
    return data


def _value(value: pb.StructureValue) -> dict[str, Any]:
    place = {"start": value.start, "end": value.end} if value.HasField("start") else {}
    return {"text": value.text, "score": value.score, **place}


def _named(received: Received) -> AliasTarget:
    """Return the model's target. `:default` is SIE's name of the profile that every model has."""
    return target(received, received.model.removesuffix(":default"))


def _options(options: SieOptions | None, path: str) -> SieOptions:
    options = options or SieOptions()
    for name in _WRONG_OPTIONS:
        if getattr(options, name) not in (None, False):
            raise invalid(
                f"{path}.{name} is not supported: the model's files determine it",
                f"{path}.{name}",
            )
    if options.profile not in (None, "default"):
        raise invalid(f"{path}.profile must be default, or be omitted", f"{path}.profile")
    if options.dimensions is not None and options.dimensions < 1:
        raise invalid(f"{path}.dimensions must be at least 1", f"{path}.dimensions")
    return options


def _overflow(options: SieOptions) -> pb.Truncation:
    found: pb.Truncation = _choice(
        _OVERFLOW, options.overflow_policy or "truncate", "params.options.overflow_policy"
    )
    return found


def _choice(known: dict[str, Any], word: str, field: str) -> Any:
    if word not in known:
        raise invalid(f"{field} is {word!r}; it must be one of {', '.join(known)}", field)
    return known[word]


def _items(items: list[ItemIn]) -> list[pb.Item]:
    return [_item(item, f"items[{index}]") for index, item in enumerate(items)]


def _item(item: ItemIn, field: str) -> pb.Item:
    for name in ("audio", "video"):
        if getattr(item, name) is not None:
            raise invalid(f"{field}.{name} is not supported by any model here", f"{field}.{name}")
    images = item.images or []
    given = (item.text is not None) + bool(images) + (item.document is not None)
    if given != 1 or len(images) > 1:
        raise invalid(f"{field} must have one of text, one entry of images, and document", field)
    if images:
        return pb.Item(image=pb.Image(data=images[0].data))
    if item.document is not None:
        document = _document(item.document, f"{field}.document")
        found = pb.Item(parts=[pb.Part(document=document)])
    else:
        found = text_item(item.text or "", f"{field}.text")
    if item.context:
        found.context = plain_text_item(item.context, f"{field}.context").text
    for index, span in enumerate(item.spans or ()):
        context = plain_text_item(span.context, f"{field}.spans[{index}].context").text
        found.spans.append(pb.Span(start=span.start, end=span.end, context=context))
    return found


def _document(document: DocumentIn | bytes, field: str) -> pb.Document:
    if isinstance(document, bytes):
        return pb.Document(data=document)
    if document.format:
        _check_format(document.data, document.format, f"{field}.format")
    return pb.Document(
        data=document.data,
        first_page=document.first_page,
        last_page=document.last_page,
        dots_per_inch=document.dots_per_inch,
    )


def _check_format(data: bytes, name: str, field: str) -> None:
    if name.lower() not in sniffing.FORMATS:
        known = ", ".join(name for name in sniffing.FORMATS if "/" not in name)
        raise invalid(f"{field} is {name!r}; it must be one of {known}, or a media type", field)
    if not sniffing.has_format(data, name):
        raise invalid(f"{field} is {name!r}, but data has another format", field)


def _item_id(items: list[ItemIn], index: int) -> str:
    given = items[index].id
    return f"item-{index}" if given is None else str(given)


def _with_id(item: ItemIn, fields: dict[str, Any]) -> dict[str, Any]:
    return fields if item.id is None else {"id": item.id, **fields}


def _encoded(reply: pb.EncodeResponse, items: int, dtype: str) -> Iterator[dict[str, Any]]:
    """Yield the representations of each item."""
    makers: list[Callable[[int], dict[str, Any]]] = []
    if reply.HasField("dense"):
        rows = (
            decoded(codec.vectors, reply.dense).array
            if dtype == "float16"
            else dense_rows(reply.dense)
        )
        dims = int(reply.dense.shape[-1])
        makers.append(
            lambda index: {"dense": {"dims": dims, "dtype": dtype, "values": rows[index]}}
        )
    if reply.HasField("sparse"):
        matrix = decoded(codec.sparse, reply.sparse)
        makers.append(lambda index: {"sparse": _weights(*matrix[index], matrix.shape[1])})
    if reply.HasField("multi_vector"):
        ragged = decoded(codec.ragged, reply.multi_vector)
        makers.append(lambda index: {"multivector": _token_vectors(ragged[index])})
    for index in range(items):
        yield {name: form for maker in makers for name, form in maker(index).items()}


def _chunk_entries(
    reply: pb.EncodeResponse, texts: list[str], dtype: str
) -> Iterator[dict[str, Any]]:
    """Yield each item's chunks with their representations.

    Args:
        texts: The items' texts; empty if chunks are returned without text. The answer has the
            texts of chunks if an item is a document.
    """
    chunks = reply.chunks
    forms = _encoded(reply, len(chunks.starts), dtype)
    for item, (first, end) in enumerate(zip(chunks.offsets, chunks.offsets[1:], strict=False)):
        found = []
        for row in range(first, end):
            start, stop = chunks.starts[row], chunks.ends[row]
            place: dict[str, Any] = {"start": start, "end": stop, "tokens": chunks.tokens[row]}
            if chunks.pages and chunks.pages[row]:
                place["page"] = chunks.pages[row]
            if texts:
                own = chunks.texts[row] if chunks.texts else texts[item][start:stop]
                place["text"] = own
            found.append(place | next(forms))
        yield {"chunks": found}


def _weights(columns: Rows, weights: Rows, dims: int) -> dict[str, Any]:
    return {
        "dims": dims,
        "dtype": "float32",
        "indices": columns,
        "values": np.asarray(weights, np.float32),
    }


def _token_vectors(values: Rows) -> dict[str, Any]:
    return {
        "token_dims": values.shape[1],
        "num_tokens": values.shape[0],
        "dtype": str(values.dtype),
        "values": values,
    }


def _numbers(reply: pb.EncodeResponse) -> int:
    """Return the approximate number of numbers in the reply."""
    return (
        sum(
            len(tensor.data)
            for tensor in (reply.dense, reply.sparse.values, reply.multi_vector.values)
        )
        // 4
    )


def _stream_items(
    received: Received,
    head: dict[str, Any],
    items: Iterator[dict[str, Any]],
    reply: pb.EncodeResponse,
    numbers: int,
) -> Answer:
    """Return an answer of `head`, the items and the tail. A large JSON answer is made in pieces;
    msgpack only copies buffers.
    """
    if received.wants_msgpack or numbers <= PIECE_NUMBERS:
        return _whole(received, {**head, "items": list(items)}, reply)

    def pieces() -> Iterator[bytes]:
        yield encode_json(head)[:-1] + b',"items":['
        for index, item in enumerate(items):
            yield (b"," if index else b"") + encode_json(_to_json_types(item))
        yield b"]," + encode_json(_tail(reply))[1:]

    return Answer(pieces(), headers=_headers(received, reply))


def _whole(received: Received, content: dict[str, Any], reply: Any) -> Answer:
    content |= _tail(reply)
    headers = _headers(received, reply)
    if received.wants_msgpack:
        return Answer(
            msgspec.msgpack.encode(_pack_arrays(content)), media_type=MSGPACK, headers=headers
        )
    return Answer(encode_json(_to_json_types(content)), headers=headers)


def _tail(reply: Any) -> dict[str, Any]:
    timings: pb.Timings = reply.timings
    timing = {
        "total_ms": timings.total_seconds * 1000,
        "queue_ms": (timings.queue_seconds + timings.wait_seconds) * 1000,
        "tokenization_ms": timings.prepare_seconds * 1000,
        "inference_ms": timings.forward_seconds * 1000,
        "postprocessing_ms": timings.finish_seconds * 1000,
    }
    usage = {"input_tokens": reply.usage.input_tokens}
    if cut := reply.usage.truncated_items:
        usage["truncated_items"] = cut
    return {"timing": timing, "usage": usage}


def _headers(received: Received, reply: Any) -> Headers:
    timing = _tail(reply)["timing"]
    named = (
        ("total", "total_ms"),
        ("queue", "queue_ms"),
        ("tokenization", "tokenization_ms"),
        ("inference", "inference_ms"),
    )
    times = tuple((f"x-{name}-time".encode(), f"{timing[key]:.3f}".encode()) for name, key in named)
    revision = reply.model_revision.encode("ascii", "replace")
    return (
        (b"x-sie-server-version", VERSION),
        (b"x-sie-request-id", received.request_id.encode()),
        *(((b"x-sie-model-revision", revision),) if revision else ()),
        (b"server-timing", _server_timing(reply.timings)),
        *times,
    )


def _server_timing(timings: pb.Timings) -> bytes:
    """Return all stages in milliseconds as the header Server-Timing (W3C), which browsers support.
    The fields of the answer combine two of them.
    """
    stages = ("queue", "prepare", "wait", "forward", "finish", "total")
    return ", ".join(
        f"{stage};dur={getattr(timings, f'{stage}_seconds') * 1000:.3f}" for stage in stages
    ).encode()


def _pack_arrays(content: Any) -> Any:
    """Return msgpack-numpy's form of arrays: a map with keys that are bytes."""
    if isinstance(content, np.ndarray):
        array = np.ascontiguousarray(content)
        return {
            b"nd": True,
            b"type": array.dtype.str,
            b"kind": b"",
            b"shape": list(array.shape),
            b"data": array.tobytes(),
        }
    if isinstance(content, dict):
        return {key: _pack_arrays(value) for key, value in content.items()}
    if isinstance(content, list):
        return [_pack_arrays(value) for value in content]
    return content


def _to_json_types(content: Any) -> Any:
    """Convert arrays for orjson, which needs contiguous rows and writes float32 with the shortest
    digits.
    """
    if isinstance(content, np.ndarray):
        return np.ascontiguousarray(content, np.float32 if content.dtype == np.float16 else None)
    if isinstance(content, dict):
        return {key: _to_json_types(value) for key, value in content.items()}
    if isinstance(content, list):
        return [_to_json_types(value) for value in content]
    return content


ROUTES: Final = (
    Route(
        "POST", "/v1/encode/{model}", SIE, encode, "Encodes items in any forms", EncodeIn, ItemsOut
    ),
    Route(
        "POST", "/v1/score/{model}", SIE, score, "Scores items against a query", ScoreIn, ScoreOut
    ),
    Route(
        "POST",
        "/v1/extract/{model}",
        SIE,
        extract,
        "Finds entities, labels or relations in items",
        ExtractIn,
        ItemsOut,
    ),
)
