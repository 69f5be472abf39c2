"""Ollama's HTTP API, as far as Shoal's models can serve it: embeddings and the list of models.
Generation is in `generation`. Pure.

A suffix `:latest` of names is ignored. Ollama's API has no field for query or document: the name
(`org/model:query`) or an alias determines it. `options` and `keep_alive` concern Ollama's runner
and are ignored.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated, Any, Final

import msgspec
from shoal.transport.methods import ENCODE, GET_MODEL, LIST_MODELS
from shoal.v1 import inference_pb2 as pb
from shoal.v1 import models_pb2

from services.edge.dialects import rerank
from services.edge.dialects.models import can_answer
from services.edge.dialects.rerank import RerankAnswer, RerankRequest
from services.edge.messages.base import (
    Answer,
    Dialect,
    HttpError,
    MeshCall,
    Received,
    Route,
    encode_json,
    item_fields,
    retry_headers,
    single_field,
)
from services.edge.messages.limits import ITEMS
from services.edge.messages.names import AliasTarget
from services.edge.messages.numbers import dense_rows, join_rows, rows_per_piece
from services.edge.messages.reading import (
    read,
    read_count,
    read_role,
    read_truncation,
    target,
    text_item,
)

VERSION: Final = "0.12.0"
"""The version of Ollama that has this API."""
NDJSON: Final = b"application/x-ndjson"
_LATEST: Final = ":latest"
LONG_AGO: Final = "1970-01-01T00:00:00Z"
"""A placeholder for unknown times where clients require one."""
_MAX_UNIX_SECONDS: Final = 253_402_300_799
"""The last second of the year 9999, the maximum of `datetime`."""
_NEVER: Final = "2318-01-01T00:00:00Z"
_RESIDENT: Final = models_pb2.MODEL_STATE_RESIDENT


def error(problem: HttpError) -> Answer:
    """Return `{"error": text}`."""
    return Answer(
        encode_json({"error": error_text(problem)}), problem.status, headers=retry_headers(problem)
    )


def error_text(problem: HttpError) -> str:
    """Return the message, preceded by the field of an invalid request, since the body has no other
    place for it.
    """
    has_whole_message = (
        problem.status != 400 or not problem.field or problem.field in problem.message
    )
    return problem.message if has_whole_message else f"{problem.field}: {problem.message}"


OLLAMA: Final = Dialect("ollama", error)


class OllamaEmbedRequest(msgspec.Struct, kw_only=True):
    """`POST /api/embed`. If `input` is empty nothing is encoded, and the answer reports whether the
    model is known.
    """

    model: str
    input: str | Annotated[list[str], ITEMS] = ""
    truncate: bool | None = None
    dimensions: int | None = None


class OllamaEmbedAnswer(msgspec.Struct, kw_only=True):
    """Normalised vectors. Durations are in nanoseconds; `load_duration` is the time in the queue,
    including loading.
    """

    model: str
    embeddings: list[list[float]]
    total_duration: int
    load_duration: int
    prompt_eval_count: int


class OllamaEmbeddingsRequest(msgspec.Struct, kw_only=True):
    """The older form of embed: one text."""

    model: str
    prompt: str = ""


class OllamaEmbeddingsAnswer(msgspec.Struct, kw_only=True):
    """The vector, normalised only if the model's configuration says so."""

    embedding: list[float]


class OllamaShowRequest(msgspec.Struct, kw_only=True):
    """`name` is the older name of `model`."""

    model: str | None = None
    name: str | None = None


class OllamaPullRequest(msgspec.Struct, kw_only=True):
    """`name` is the older name of `model`. If `stream` is false the answer is one object instead of
    a line.
    """

    model: str | None = None
    name: str | None = None
    stream: bool | None = None


class OllamaPulled(msgspec.Struct, kw_only=True):
    """`status` is success."""

    status: str


class OllamaDetails(msgspec.Struct, kw_only=True):
    """`quantization_level` is the number format of the forward pass; empty before the model's first
    load.
    """

    parent_model: str
    format: str
    family: str
    families: list[str]
    parameter_size: str
    quantization_level: str


class OllamaModel(msgspec.Struct, kw_only=True):
    """`size` is the bytes of weights; 0 before the model's first load. Only `/api/ps` has
    `expires_at` and `size_vram`.
    """

    name: str
    model: str
    modified_at: str
    size: int
    digest: str
    details: OllamaDetails
    expires_at: str | msgspec.UnsetType = msgspec.UNSET
    size_vram: int | msgspec.UnsetType = msgspec.UNSET
    context_length: int | msgspec.UnsetType = msgspec.UNSET


class OllamaModels(msgspec.Struct, kw_only=True):
    """The models sorted by name."""

    models: list[OllamaModel]


class OllamaShown(msgspec.Struct, kw_only=True):
    """`capabilities` has embedding for models with dense vectors and completion for generative
    models. `model_info` has keys such as `bert.embedding_length`.
    """

    modelfile: str
    parameters: str
    template: str
    modified_at: str
    details: OllamaDetails
    model_info: dict[str, str | int]
    capabilities: list[str]


class OllamaVersion(msgspec.Struct, kw_only=True):
    """The version of Ollama's API."""

    version: str


def embed(received: Received) -> MeshCall:
    """`POST /api/embed`. Raises HttpError."""
    request = read(OllamaEmbedRequest, received)
    named = model_named(received, request.model)
    if not request.input:
        nothing = {
            "model": request.model,
            "embeddings": [],
            "total_duration": 0,
            "load_duration": 0,
            "prompt_eval_count": 0,
        }
        return answer_if_known(named, nothing)
    is_one = isinstance(request.input, str)
    texts = [request.input] if isinstance(request.input, str) else request.input
    message = pb.EncodeRequest(
        model=named.model,
        items=[
            text_item(text, "input" if is_one else f"input[{index}]")
            for index, text in enumerate(texts)
        ],
        representations=[pb.REPRESENTATION_DENSE],
        role=read_role(named),
        dimensions=read_count(request.dimensions, "dimensions") or named.dimensions,
        truncation=read_truncation(request.truncate, "truncate"),
        normalize=True,
        adapter=named.adapter,
    )

    def convert(reply: pb.EncodeResponse) -> Answer:
        rows = dense_rows(reply.dense)
        timings = reply.timings
        rest = {
            "total_duration": round(timings.total_seconds * 1e9),
            "load_duration": round(timings.queue_seconds * 1e9),
            "prompt_eval_count": reply.usage.input_tokens,
        }
        head = b'{"model":' + encode_json(request.model) + b',"embeddings":['
        tail = b"]," + encode_json(rest)[1:]
        return Answer(
            join_rows(
                len(rows),
                rows_per_piece(rows.shape[1]),
                head,
                lambda first, last: encode_json(rows[first:last])[1:-1],
                tail,
            )
        )

    fields = single_field("items", "input") if is_one else item_fields("items", "input")
    return MeshCall(ENCODE, message, convert, fields=fields)


def embeddings(received: Received) -> MeshCall:
    """`POST /api/embeddings`. Raises HttpError."""
    request = read(OllamaEmbeddingsRequest, received)
    named = model_named(received, request.model)
    if not request.prompt:
        return answer_if_known(named, {"embedding": []})
    message = pb.EncodeRequest(
        model=named.model,
        items=[text_item(request.prompt, "prompt")],
        representations=[pb.REPRESENTATION_DENSE],
        role=read_role(named),
        dimensions=named.dimensions,
        truncation=pb.TRUNCATION_END,
        adapter=named.adapter,
    )

    def convert(reply: pb.EncodeResponse) -> Answer:
        return Answer(encode_json({"embedding": dense_rows(reply.dense)[0]}))

    return MeshCall(ENCODE, message, convert, fields=single_field("items", "prompt"))


def tags(received: Received) -> MeshCall:
    """`GET /api/tags`: models that can be served, and aliases, as in `GET /v1/models`."""

    def convert(reply: models_pb2.ListModelsResponse) -> Answer:
        known = {model.model: model for model in reply.models}
        found = known | {
            name: known.get(alias.model, models_pb2.Model(model=alias.model))
            for name, alias in received.names.aliases.items()
        }
        return Answer(
            encode_json(
                {
                    "models": [
                        _entry(name, model)
                        for name, model in sorted(found.items())
                        if can_answer(model)
                    ]
                }
            )
        )

    return MeshCall(LIST_MODELS, models_pb2.ListModelsRequest(), convert)


def resident(received: Received) -> MeshCall:
    """`GET /api/ps`: models that are loaded on a device."""

    def convert(reply: models_pb2.ListModelsResponse) -> Answer:
        entries = [
            _entry(model.model, model)
            | {
                "expires_at": _NEVER,
                "size_vram": model.card.bytes,
                "context_length": model.card.max_tokens,
            }
            for model in reply.models
            if model.state == _RESIDENT
        ]
        return Answer(encode_json({"models": entries}))

    return MeshCall(LIST_MODELS, models_pb2.ListModelsRequest(), convert)


def show(received: Received) -> MeshCall:
    """`POST /api/show`. Raises HttpError."""
    request = read(OllamaShowRequest, received)
    named = model_named(received, request.model or request.name or "")

    def convert(reply: models_pb2.GetModelResponse) -> Answer:
        card = reply.model.card
        family = card.family or "unknown"
        info: dict[str, str | int] = {
            "general.architecture": family,
            f"{family}.context_length": card.max_tokens,
        }
        if card.dimensions:
            info[f"{family}.embedding_length"] = named.dimensions or card.dimensions
        content = {
            "modelfile": f"FROM {named.model}",
            "parameters": "",
            "template": "",
            "modified_at": _modified_at(card),
            "details": _details(card),
            "model_info": info,
            "capabilities": _capabilities(card),
        }
        return Answer(encode_json(content))

    return MeshCall(GET_MODEL, models_pb2.GetModelRequest(model=named.model), convert)


def rerank_documents(received: Received) -> MeshCall:
    """`POST /api/rerank` as clients of Ollama send it, with Cohere's fields. Raises HttpError."""
    request = read(RerankRequest, received)
    if request.model and request.model not in received.names.aliases:
        request.model = request.model.removesuffix(_LATEST)
    return rerank.make_call(request, received)


def pull(received: Received) -> MeshCall:
    """`POST /api/pull`: report at once that a model exists. An unknown model is loaded by its first
    request.

    Raises HttpError for an invalid name.
    """
    request = read(OllamaPullRequest, received)
    named = model_named(received, request.model or request.name or "")
    is_streamed = request.stream is not False

    def convert(reply: models_pb2.GetModelResponse) -> Answer:
        if not can_answer(reply.model):
            raise HttpError(
                "MODEL_NOT_FOUND",
                reply.model.last_error or f"no worker can load {named.model}",
                field="model",
            )
        done = encode_json({"status": "success"})
        return Answer(done + b"\n", media_type=NDJSON) if is_streamed else Answer(done)

    return MeshCall(GET_MODEL, models_pb2.GetModelRequest(model=named.model), convert)


def version(received: Received) -> Answer:
    """`GET /api/version`."""
    return Answer(encode_json({"version": VERSION}))


def running(received: Received) -> Answer:
    """`GET /`, which clients use to detect a server."""
    return Answer(b"Ollama is running", media_type=b"text/plain; charset=utf-8")


def model_named(received: Received, name: str) -> AliasTarget:
    """Return the model of that name. Raises HttpError."""
    return target(
        received, name if name in received.names.aliases else name.removesuffix(_LATEST) or name
    )


def answer_if_known(named: AliasTarget, content: dict[str, Any]) -> MeshCall:
    """Answer with `content` if the model is known."""
    return MeshCall(
        GET_MODEL,
        models_pb2.GetModelRequest(model=named.model),
        lambda reply: Answer(encode_json(content)),
    )


def _capabilities(card: models_pb2.ModelCard) -> list[str]:
    writes = ["completion"] if models_pb2.TASK_TEXT in card.tasks else []
    return writes + (["embedding"] if card.dimensions else [])


def _modified_at(card: models_pb2.ModelCard) -> str:
    """Return when the model's files were written; `LONG_AGO` if no worker has read them."""
    seconds = min(card.created_unix_seconds, _MAX_UNIX_SECONDS)
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _entry(name: str, model: models_pb2.Model) -> dict[str, Any]:
    card = model.card
    return {
        "name": name,
        "model": name,
        "modified_at": _modified_at(card),
        "size": card.bytes,
        "digest": card.revision,
        "details": _details(card),
    }


def _details(card: models_pb2.ModelCard) -> dict[str, Any]:
    return {
        "parent_model": "",
        "format": "safetensors",
        "family": card.family,
        "families": [card.family] if card.family else [],
        "parameter_size": "",
        "quantization_level": card.data_type,
    }


ROUTES: Final = (
    Route(
        "POST",
        "/api/embed",
        OLLAMA,
        embed,
        "Turns texts into vectors",
        OllamaEmbedRequest,
        OllamaEmbedAnswer,
    ),
    Route(
        "POST",
        "/api/embeddings",
        OLLAMA,
        embeddings,
        "Encodes one text",
        OllamaEmbeddingsRequest,
        OllamaEmbeddingsAnswer,
    ),
    Route(
        "POST",
        "/api/rerank",
        OLLAMA,
        rerank_documents,
        "Ranks documents by relevance to a query",
        RerankRequest,
        RerankAnswer,
    ),
    Route(
        "POST",
        "/api/pull",
        OLLAMA,
        pull,
        "Reports whether a model exists",
        OllamaPullRequest,
        OllamaPulled,
        stream_media_type=NDJSON,
    ),
    Route("GET", "/api/tags", OLLAMA, tags, "Lists models and aliases", answer=OllamaModels),
    Route("GET", "/api/ps", OLLAMA, resident, "Lists models that are loaded", answer=OllamaModels),
    Route("POST", "/api/show", OLLAMA, show, "Describes one model", OllamaShowRequest, OllamaShown),
    Route(
        "GET",
        "/api/version",
        OLLAMA,
        version,
        "Returns the version of Ollama's API",
        answer=OllamaVersion,
    ),
    Route("GET", "/", OLLAMA, running, "Reports that this process is alive", answer=str),
)
