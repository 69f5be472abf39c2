"""Shoal's client: texts in, vectors, scores and labels out.

    import shoal

    with shoal.Client("127.0.0.1:50051") as client:
        vectors = client.encode("sentence-transformers/all-MiniLM-L6-v2", ["first text", "second text"]).dense

This is where a request's way begins: client -> router -> lane -> worker -> and back. Importing the package
costs nothing but its names: grpc and numpy are loaded when a name is first used, so that `shoal.v1` (the generated stubs) and the
command line start fast.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from shoal.version import VERSION

__version__ = VERSION

if TYPE_CHECKING:
    from shoal import errors
    from shoal.client import AsyncClient, Client
    from shoal.errors import ShoalError
    from shoal.plans import Classify, Entities, ReadText, Regions, Relations
    from shoal.results import EncodeResult, Entity, Extraction, ExtractResult, LabelScore, Ragged, ScoreResult, Sparse
    from shoal.retry import RetryPolicy
    from shoal.status import Mesh, Model, Placement
    from shoal.trust import Tls, TokenFile

_HOME = {
    "AsyncClient": "client",
    "Classify": "plans",
    "Client": "client",
    "EncodeResult": "results",
    "Entities": "plans",
    "Entity": "results",
    "ExtractResult": "results",
    "Extraction": "results",
    "LabelScore": "results",
    "Mesh": "status",
    "Model": "status",
    "Placement": "status",
    "Ragged": "results",
    "ReadText": "plans",
    "Regions": "plans",
    "Relations": "plans",
    "RetryPolicy": "retry",
    "ScoreResult": "results",
    "ShoalError": "errors",
    "Sparse": "results",
    "Tls": "trust",
    "TokenFile": "trust",
}

__all__ = [
    "AsyncClient",
    "Classify",
    "Client",
    "EncodeResult",
    "Entities",
    "Entity",
    "ExtractResult",
    "Extraction",
    "LabelScore",
    "Mesh",
    "Model",
    "Placement",
    "Ragged",
    "ReadText",
    "Regions",
    "Relations",
    "RetryPolicy",
    "ScoreResult",
    "ShoalError",
    "Sparse",
    "Tls",
    "TokenFile",
    "__version__",
    "errors",
]


def __getattr__(name: str) -> object:
    if name == "errors":
        return import_module("shoal.errors")
    if name not in _HOME:
        raise AttributeError(f"module 'shoal' has no attribute {name!r}")
    value: object = getattr(import_module(f"shoal.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
