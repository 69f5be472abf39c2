"""`GET /v1/models` and `GET /v1/models/{id}` for all dialects: OpenAI's clients read `data`, those
of Cohere and SIE `models`.

Each client gets only the list that it reads, so that no model appears twice. Pure.
"""

from __future__ import annotations

from typing import Any, Final, Literal, cast

import msgspec
import orjson
from shoal.transport.methods import GET_MODEL, LIST_MODELS
from shoal.v1 import inference_pb2 as pb
from shoal.v1 import models_pb2

from services.edge.dialects import openai
from services.edge.messages.base import (
    Answer,
    Dialect,
    HttpError,
    MeshCall,
    Received,
    Route,
    encode_json,
    retry_headers,
)
from services.edge.messages.names import AliasNames, AliasTarget
from services.edge.messages.reading import target

_STATES: Final = {
    models_pb2.MODEL_STATE_LOADING: "loading",
    models_pb2.MODEL_STATE_DOWNLOADING: "loading",
    models_pb2.MODEL_STATE_RESIDENT: "loaded",
    models_pb2.MODEL_STATE_FAILED: "failed",
}
"""SIE's names; all other states are "available"."""
_READ: Final = (models_pb2.MODEL_STATE_RESIDENT, models_pb2.MODEL_STATE_WARM)
"""States of a model on a worker that prove that its files are readable."""
_FORMS: Final = {
    pb.REPRESENTATION_DENSE: "dense",
    pb.REPRESENTATION_SPARSE: "sparse",
    pb.REPRESENTATION_MULTI_VECTOR: "multivector",
}
_ENDPOINTS: Final = {
    models_pb2.TASK_ENCODE: "embed",
    models_pb2.TASK_SCORE: "rerank",
    models_pb2.TASK_CLASSIFY: "classify",
}


_READERS_OF_MODELS: Final = ("cohere", "sie-sdk")
"""Prefixes of `Received.client` for clients that read the list under `models`."""


class ModelEntry(msgspec.Struct, kw_only=True):
    """One model for all dialects: OpenAI's fields, Cohere's (`name`, `endpoints`, `context_length`)
    and SIE's.
    """

    id: str
    object: Literal["model"]
    created: int
    """Unix time of the newest of the model's files; 0 if no worker has read them."""
    owned_by: str
    root: str
    """The model of an alias; otherwise the id."""
    name: str
    endpoints: list[str]
    context_length: int
    inputs: list[str]
    outputs: list[str]
    dims: dict[str, int]
    tasks: list[str]
    loaded: bool
    state: Literal["available", "loading", "loaded", "failed"]
    last_error: str | None
    max_sequence_length: int | None
    profiles: dict[str, dict[str, bool]]


class ModelList(msgspec.Struct, kw_only=True):
    """The entries are under `models` for clients of Cohere and SIE, and under `data` for all
    others.
    """

    object: Literal["list"]
    data: list[ModelEntry] | msgspec.UnsetType = msgspec.UNSET
    models: list[ModelEntry] | msgspec.UnsetType = msgspec.UNSET


def error(problem: HttpError) -> Answer:
    """Return OpenAI's form with SIE's `detail`, since both list models here."""
    reported = orjson.loads(cast(bytes, openai.error(problem).body))
    code = problem.reason if problem.status < 500 else "INFERENCE_ERROR"
    return Answer(
        encode_json(reported | {"detail": {"code": code, "message": problem.message}}),
        problem.status,
        headers=retry_headers(problem),
    )


MODELS: Final = Dialect("models", error)


def can_answer(model: models_pb2.Model) -> bool:
    """Return whether a worker may be able to serve the model. The other models are mostly names
    that another caller misspelt, so lists for callers omit them; `shoal models` and the console
    show them with the error.
    """
    if model.state == models_pb2.MODEL_STATE_FAILED:
        return False
    places = [place for place in model.places if place.state != models_pb2.MODEL_STATE_FAILED]
    return not places or any(not place.last_error or place.state in _READ for place in places)


def list_models(received: Received) -> MeshCall:
    """`GET /v1/models`: models that can be served, and aliases of these and of models that no
    worker has tried to load.
    """

    def convert(reply: models_pb2.ListModelsResponse) -> Answer:
        entries = [_entry(model.model, model) for model in reply.models if can_answer(model)]
        entries += _aliased(received.names, {model.model: model for model in reply.models})
        key = "models" if received.client.startswith(_READERS_OF_MODELS) else "data"
        return Answer(encode_json({"object": "list", key: entries}))

    return MeshCall(LIST_MODELS, models_pb2.ListModelsRequest(), convert)


def get_model(received: Received) -> MeshCall:
    """`GET /v1/models/{model}`. Raises HttpError MODEL_NOT_FOUND for an invalid name."""
    named = target(received, received.model)

    def convert(reply: models_pb2.GetModelResponse) -> Answer:
        return Answer(encode_json(_entry(received.model, reply.model, named)))

    return MeshCall(GET_MODEL, models_pb2.GetModelRequest(model=named.model), convert)


def _aliased(names: AliasNames, known: dict[str, models_pb2.Model]) -> list[dict[str, Any]]:
    return [
        _entry(name, known.get(target.model, models_pb2.Model(model=target.model)), target)
        for name, target in sorted(names.aliases.items())
        if target.model not in known or can_answer(known[target.model])
    ]


def _entry(name: str, model: models_pb2.Model, target: AliasTarget | None = None) -> dict[str, Any]:
    card = model.card
    dims = {
        "dense": (target.dimensions if target else 0) or card.dimensions,
        "multivector": card.multi_vector_dimensions,
    }
    tasks = [models_pb2.Task.Name(task).removeprefix("TASK_").lower() for task in card.tasks]
    forms = [_FORMS[form] for form in card.representations if form in _FORMS]
    outputs = forms + [
        task for task in ("score", "entities", "classify", "relations") if task in tasks
    ]
    return {
        "id": name,
        "object": "model",
        "created": card.created_unix_seconds,
        "owned_by": "shoal",
        "root": model.model,
        "name": name,
        "endpoints": [_ENDPOINTS[task] for task in card.tasks if task in _ENDPOINTS],
        "context_length": card.max_tokens,
        "inputs": [
            models_pb2.InputKind.Name(kind).removeprefix("INPUT_KIND_").lower()
            for kind in card.inputs
        ]
        or ["text"],
        "outputs": outputs,
        "dims": {form: number for form, number in dims.items() if number and form in forms},
        "tasks": tasks,
        "loaded": model.state == models_pb2.MODEL_STATE_RESIDENT,
        "state": _STATES.get(model.state, "available"),
        "last_error": model.last_error or None,
        "max_sequence_length": card.max_tokens or None,
        "profiles": {"default": {"is_default": True}},
    }


ROUTES: Final = (
    *(
        Route("GET", path, MODELS, list_models, "Lists models and aliases", answer=ModelList)
        for path in ("/v1/models", "/models", "/openai/v1/models")
    ),
    *(
        Route("GET", path, MODELS, get_model, "Describes one model", answer=ModelEntry)
        for path in ("/v1/models/{model}", "/openai/v1/models/{model}")
    ),
)
