"""Components for tables: a reranker of results and an extractor of columns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import pyarrow as pa
from lancedb.rerankers.base import Reranker
from shoal import ModelHandle
from shoal.handle import Findings

_ENTITY: Final = pa.struct(
    [
        ("start", pa.int32()),
        ("end", pa.int32()),
        ("label", pa.string()),
        ("score", pa.float32()),
        ("text", pa.string()),
    ]
)
_FOUND: Final[dict[Findings, pa.DataType]] = {
    "entities": _ENTITY,
    "labels": pa.struct([("label", pa.string()), ("score", pa.float32())]),
    "relations": pa.struct(
        [("head", _ENTITY), ("tail", _ENTITY), ("label", pa.string()), ("score", pa.float32())]
    ),
}


class ShoalReranker(Reranker):
    """Ranks results of vector, full-text and hybrid searches, best first, with `_relevance_score`.

    Any model that scores may serve: a cross-encoder, a language model, late interaction (MaxSim) or
    an embedder (cosine). Other arguments are those of `shoal.ModelHandle`.

    Args:
        column: The column with the text.
        top_n: Number of results (0: all).
        return_score: "all" keeps the scores of the searches.
    """

    def __init__(
        self,
        model: str,
        *,
        column: str = "text",
        top_n: int = 0,
        return_score: str = "relevance",
        **settings: Any,
    ) -> None:
        super().__init__(return_score)
        self.column = column
        self.top_n = top_n
        self._handle = ModelHandle(model, **settings)

    def __str__(self) -> str:
        return f"ShoalReranker({self._handle.model!r})"

    def rerank_hybrid(
        self, query: str, vector_results: pa.Table, fts_results: pa.Table
    ) -> pa.Table:
        merge = self._merge_and_keep_scores if self.score == "all" else self.merge_results
        return self._keep_relevance_score(self._ranked(query, merge(vector_results, fts_results)))

    def rerank_vector(self, query: str, vector_results: pa.Table) -> pa.Table:
        return self._keep_relevance_score(self._ranked(query, vector_results))

    def rerank_fts(self, query: str, fts_results: pa.Table) -> pa.Table:
        return self._keep_relevance_score(self._ranked(query, fts_results))

    def _ranked(self, query: str, found: pa.Table) -> pa.Table:
        ranking = (
            self._handle.rank(query, found[self.column].to_pylist(), self.top_n)
            if len(found)
            else []
        )
        best = found.take(pa.array([index for index, _ in ranking], pa.int64()))
        return best.append_column(
            "_relevance_score", pa.array([score for _, score in ranking], pa.float32())
        )


class ShoalExtractor:
    """Tables with one more column: `entities`, `labels` or `relations` of a text, lists of structs
    with the fields of shoal's `Entity`, `LabelScore` or `Relation`.

    `labels`: labels for zero-shot models; default: the model's labels. Other arguments as for
    `shoal.ModelHandle`.
    """

    def __init__(
        self,
        model: str,
        *,
        find: Findings = "entities",
        labels: Sequence[str] = (),
        column: str = "text",
        **settings: Any,
    ) -> None:
        self.find: Findings = find
        self.labels = list(labels)
        self.column = column
        self._handle = ModelHandle(model, **settings)

    def enrich(self, rows: pa.Table) -> pa.Table:
        """Return the rows with the column, for adding to a table."""
        return self._enriched(
            rows, self._handle.extract(rows[self.column].to_pylist(), self.find, self.labels)
        )

    async def aenrich(self, rows: pa.Table) -> pa.Table:
        return self._enriched(
            rows, await self._handle.aextract(rows[self.column].to_pylist(), self.find, self.labels)
        )

    def _enriched(self, rows: pa.Table, found: list[list[dict[str, Any]]]) -> pa.Table:
        return rows.append_column(self.find, pa.array(found, pa.list_(_FOUND[self.find])))
