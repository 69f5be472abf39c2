"""The embedding functions. Chroma stores the result of `get_config` with a collection: the name of
the token's variable, never the token.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, Final

import numpy as np
from chromadb.api.types import (
    Documents,
    EmbeddingFunction,
    Embeddings,
    Space,
    SparseEmbeddingFunction,
    SparseVectors,
)
from chromadb.base_types import SparseVector
from chromadb.utils.embedding_functions import (
    register_embedding_function,
    register_sparse_embedding_function,
)
from shoal import ModelHandle

_FIXED: Final = ("model", "options", "query_instruction")
"""Settings that may not change once vectors are stored, because they change the vectors."""


class _ModelBase:
    """A function that calls one model.

    Args:
        model: The model's id, `org/name`.
        address: Routers, `host:port` separated by commas; default SHOAL_ADDRESS, otherwise
            127.0.0.1:50051.
        token_env_var: The variable that holds the token.
        timeout: Seconds for a request, retries included.
        query_instruction: A text that replaces the model's prompt of queries.
        options: Further arguments of `shoal.Client.encode`, such as {"dimensions": 256}.
    """

    def __init__(
        self,
        model: str,
        *,
        address: str | None = None,
        tenant: str = "",
        token_env_var: str = "SHOAL_TOKEN",
        timeout: float = 60.0,
        query_instruction: str = "",
        options: Mapping[str, Any] | None = None,
    ) -> None:
        self._config: dict[str, Any] = {
            "model": model,
            "address": address,
            "tenant": tenant,
            "token_env_var": token_env_var,
            "timeout": timeout,
            "query_instruction": query_instruction,
            "options": dict(options or {}),
        }
        self._handle = ModelHandle(
            model,
            address=address,
            tenant=tenant,
            token=_token(token_env_var),
            timeout=timeout,
            query_instruction=query_instruction,
            options=options,
        )

    def get_config(self) -> dict[str, Any]:
        return dict(self._config)

    def validate_config_update(
        self, old_config: dict[str, Any], new_config: dict[str, Any]
    ) -> None:
        """Raise ValueError for a change that would mix vectors of two models."""
        for name in _FIXED:
            if name in new_config and new_config[name] != old_config.get(name):
                raise ValueError(
                    f"{name} cannot change once vectors are stored: {old_config.get(name)!r}, "
                    f"not {new_config[name]!r}"
                )

    @staticmethod
    def validate_config(config: dict[str, Any]) -> None:
        """Raise ValueError for a configuration that `build_from_config` would refuse."""
        if not isinstance(config.get("model"), str) or not config["model"]:
            raise ValueError("the configuration names no model")
        if unknown := set(config) - {
            "model",
            "address",
            "tenant",
            "token_env_var",
            "timeout",
            "query_instruction",
            "options",
        }:
            raise ValueError(f"the configuration has unknown fields: {', '.join(sorted(unknown))}")


@register_embedding_function
class ShoalEmbeddingFunction(_ModelBase, EmbeddingFunction[Documents]):
    """Dense vectors; added texts are encoded as documents, `query_texts` as queries."""

    def __call__(self, input: Documents) -> Embeddings:
        return _rows(self._handle.dense(input, "document"))

    def embed_query(self, input: Documents) -> Embeddings:
        return _rows(self._handle.dense(input, "query"))

    @staticmethod
    def name() -> str:
        return "shoal"

    def default_space(self) -> Space:
        return "cosine"

    def supported_spaces(self) -> list[Space]:
        return ["cosine", "l2", "ip"]

    @staticmethod
    def build_from_config(config: dict[str, Any]) -> ShoalEmbeddingFunction:
        _ModelBase.validate_config(config)
        return ShoalEmbeddingFunction(**config)


@register_sparse_embedding_function
class ShoalSparseEmbeddingFunction(_ModelBase, SparseEmbeddingFunction[Documents]):
    """Rows of weights, for a `SparseVectorIndexConfig` of a schema."""

    def __call__(self, input: Documents) -> SparseVectors:
        return _sparse(self._handle.sparse(input, "document"))

    def embed_query(self, input: Documents) -> SparseVectors:
        return _sparse(self._handle.sparse(input, "query"))

    @staticmethod
    def name() -> str:
        return "shoal_sparse"

    @staticmethod
    def build_from_config(config: dict[str, Any]) -> ShoalSparseEmbeddingFunction:
        _ModelBase.validate_config(config)
        return ShoalSparseEmbeddingFunction(**config)


def _token(variable: str) -> str | None:
    """Return the token in an environment variable.

    Without SHOAL_TOKEN the client reads SHOAL_TOKEN_FILE; any other variable must be set, else
    this raises ValueError.
    """
    if variable != "SHOAL_TOKEN" and not os.environ.get(variable):
        raise ValueError(f"the token's variable {variable} is not set")
    return os.environ.get(variable) or None


def _rows(rows: list[list[float]]) -> Embeddings:
    return [np.array(row, np.float32) for row in rows]


def _sparse(rows: list[tuple[list[int], list[float]]]) -> SparseVectors:
    return [SparseVector(indices=columns, values=weights) for columns, weights in rows]
