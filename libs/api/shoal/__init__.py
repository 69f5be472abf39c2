"""Shoal's client: sends texts to the mesh, returns vectors, scores and labels.

    import shoal

    with shoal.Client("127.0.0.1:50051") as client:
        vectors = client.encode("sentence-transformers/all-MiniLM-L6-v2", ["first text", "second
        text"]).dense

The modules in this folder are public: clients, handles on models, errors, results, tasks, options
of calls and the status of the mesh. `verbs` -> `calls` -> `requests` -> `transport` is the path of
a call and not public, `cli` is the command line, `v1` the generated stubs. Importing the package
loads nothing else: grpc and numpy are imported when a name is first used, so that `shoal.v1` and
the command line start fast.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from shoal.version import VERSION

__version__ = VERSION

if TYPE_CHECKING:
    from shoal import errors
    from shoal.calls.retry import RetryPolicy
    from shoal.client import AsyncClient, Client
    from shoal.errors import ShoalError
    from shoal.extractions import Delta, Entity, Extraction, LabelScore, ToolCall
    from shoal.handle import ModelHandle
    from shoal.results import (
        Chunk,
        Chunks,
        EncodeResult,
        ExtractResult,
        Ragged,
        ScoreResult,
        Sparse,
    )
    from shoal.schema import Schema
    from shoal.status import Alias, Mesh, Model, Placement
    from shoal.tasks import (
        Chunking,
        Classify,
        Document,
        Entities,
        Parts,
        ReadText,
        Regions,
        Relations,
        Span,
    )
    from shoal.tokens import DetokenizeResult, TokenizeResult, Tokens
    from shoal.transport.trust import Tls, TokenFile

_MODULES = {
    "Alias": "status",
    "AsyncClient": "client",
    "Chunk": "results",
    "Chunking": "tasks",
    "Chunks": "results",
    "Classify": "tasks",
    "Client": "client",
    "Delta": "extractions",
    "DetokenizeResult": "tokens",
    "Document": "tasks",
    "EncodeResult": "results",
    "Entities": "tasks",
    "Entity": "extractions",
    "ExtractResult": "results",
    "Extraction": "extractions",
    "LabelScore": "extractions",
    "Mesh": "status",
    "Model": "status",
    "ModelHandle": "handle",
    "Parts": "tasks",
    "Placement": "status",
    "Ragged": "results",
    "ReadText": "tasks",
    "Regions": "tasks",
    "Relations": "tasks",
    "RetryPolicy": "calls.retry",
    "Schema": "schema",
    "ScoreResult": "results",
    "ShoalError": "errors",
    "Span": "tasks",
    "Sparse": "results",
    "Tls": "transport.trust",
    "TokenFile": "transport.trust",
    "TokenizeResult": "tokens",
    "Tokens": "tokens",
    "ToolCall": "extractions",
}

__all__ = [
    "Alias",
    "AsyncClient",
    "Chunk",
    "Chunking",
    "Chunks",
    "Classify",
    "Client",
    "Delta",
    "DetokenizeResult",
    "Document",
    "EncodeResult",
    "Entities",
    "Entity",
    "ExtractResult",
    "Extraction",
    "LabelScore",
    "Mesh",
    "Model",
    "ModelHandle",
    "Parts",
    "Placement",
    "Ragged",
    "ReadText",
    "Regions",
    "Relations",
    "RetryPolicy",
    "Schema",
    "ScoreResult",
    "ShoalError",
    "Span",
    "Sparse",
    "Tls",
    "TokenFile",
    "TokenizeResult",
    "Tokens",
    "ToolCall",
    "__version__",
    "errors",
]


def __getattr__(name: str) -> object:
    if name == "errors":
        return import_module("shoal.errors")
    if name not in _MODULES:
        raise AttributeError(f"module 'shoal' has no attribute {name!r}")
    value: object = getattr(import_module(f"shoal.{_MODULES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
