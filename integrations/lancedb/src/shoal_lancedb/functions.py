"""The embedding functions. Their fields are stored in a table's metadata; a token only as the name
of a variable (`$var:name`).
"""

from __future__ import annotations

from typing import Any

import numpy as np
from lancedb.embeddings.base import EmbeddingFunction
from lancedb.embeddings.registry import register
from lancedb.embeddings.utils import TEXT
from pydantic import Field, PrivateAttr
from shoal import ModelHandle

_PROBE = "a text of which the vectors are measured"


class _ModelBase(EmbeddingFunction):
    """The fields of all functions here: those of `shoal.ModelHandle`."""

    model: str
    """The model's id, `org/name`."""
    address: str | None = None
    """`host:port` of routers, several separated by commas. Default: SHOAL_ADDRESS, else
    127.0.0.1:50051.
    """
    tenant: str = ""
    token: str | None = Field(default=None, repr=False)
    """`$var:name` of LanceDB's registry. Default: SHOAL_TOKEN."""
    timeout: float = 60.0
    query_instruction: str = ""
    """Replaces the model's prompt of queries."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Further arguments of `shoal.Client.encode`, such as {"dimensions": 256}."""
    max_retries: int = 0
    """LanceDB's own repetitions: none, because the client repeats what may be repeated."""
    _handle: ModelHandle = PrivateAttr()

    def model_post_init(self, context: Any, /) -> None:
        super().model_post_init(context)
        self._ndims = 0
        self._handle = ModelHandle(
            self.model,
            address=self.address,
            tenant=self.tenant,
            token=self.token,
            timeout=self.timeout,
            query_instruction=self.query_instruction,
            options=self.options,
        )

    def __hash__(self) -> int:
        return hash((type(self), self.model, self.address))

    @staticmethod
    def sensitive_keys() -> list[str]:
        return ["token"]

    def _sources(self, texts: TEXT) -> tuple[list[str | None], list[str]]:
        """Return all texts, and those to encode: a row without text gets no vector."""
        rows: list[str | None] = list(self.sanitize_input(texts))
        return rows, [text for text in rows if text]


@register("shoal")
class ShoalEmbeddings(_ModelBase):
    """Dense vectors; columns are encoded as documents, a query as a query."""

    def ndims(self) -> int:
        """Return the length of a vector, found by encoding a text."""
        if not self._ndims:
            self._ndims = len(self._handle.dense([_PROBE])[0])
        return self._ndims

    def compute_query_embeddings(self, query: str, *_: Any, **__: Any) -> list[Any]:
        return [np.array(row, np.float32) for row in self._handle.dense([query], "query")]

    def compute_source_embeddings(self, texts: TEXT, *_: Any, **__: Any) -> list[Any]:
        rows, given = self._sources(texts)
        made = iter(self._handle.dense(given, "document"))
        return [np.array(next(made), np.float32) if text else None for text in rows]


@register("shoal-multivector")
class ShoalMultiVectorEmbeddings(_ModelBase):
    """A vector for each token, for a column `MultiVector(function.ndims())` and metric "cosine".

    LanceDB encodes queries, but not rows: LanceDB (0.40) drops multi-vectors with a number of
    vectors other than their length. So add rows with `compute_source_embeddings(texts)` in the
    vector column.
    """

    def ndims(self) -> int:
        """Return the length of a token's vector, found by encoding a text."""
        if not self._ndims:
            self._ndims = len(self._handle.multi_vector([_PROBE])[0][0])
        return self._ndims

    def compute_query_embeddings(self, query: str, *_: Any, **__: Any) -> list[Any]:
        return self._handle.multi_vector([query], "query")

    def compute_source_embeddings(self, texts: TEXT, *_: Any, **__: Any) -> list[Any]:
        rows, given = self._sources(texts)
        made = iter(self._handle.multi_vector(given, "document"))
        return [next(made) if text else None for text in rows]
