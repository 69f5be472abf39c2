"""Rerank search results by a text property, and extract more properties from it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from shoal import ModelHandle
from shoal.handle import Findings

Found = TypeVar("Found")


class ShoalReranker:
    """The best of the objects that a query has found, best first, as copies with
    `metadata.rerank_score`.

    `text_key`: the property with the text. Other arguments as for `shoal.ModelHandle`. Any model
    that scores may serve: a cross-encoder, a language model, late interaction (MaxSim) or an
    embedder (cosine).
    """

    def __init__(self, model: str, *, text_key: str = "text", **settings: Any) -> None:
        self.text_key = text_key
        self.handle = ModelHandle(model, **settings)

    def rerank(self, query: str, objects: Sequence[Found], top_n: int = 0) -> list[Found]:
        """Return the `top_n` best objects (0: all)."""
        return _ranked(objects, self.handle.rank(query, self._texts(objects), top_n))

    async def arerank(self, query: str, objects: Sequence[Found], top_n: int = 0) -> list[Found]:
        return _ranked(objects, await self.handle.arank(query, self._texts(objects), top_n))

    def _texts(self, objects: Sequence[Any]) -> list[str]:
        return [one.properties[self.text_key] for one in objects]


class ShoalExtractor:
    """Extract `entities`, `labels` or `relations` from the texts of rows into one more property.

    They are maps with the fields of shoal's `Entity`, `LabelScore` or `Relation`, which Weaviate
    stores as object[].

    `labels`: labels for zero-shot models; default: the model's labels. Other arguments as for
    `shoal.ModelHandle`.
    """

    def __init__(
        self,
        model: str,
        *,
        find: Findings = "entities",
        labels: Sequence[str] = (),
        text_key: str = "text",
        **settings: Any,
    ) -> None:
        self.find: Findings = find
        self.labels = list(labels)
        self.text_key = text_key
        self.handle = ModelHandle(model, **settings)

    def properties(self, rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Return copies of rows with the extracted property."""
        return self._filled(
            rows, self.handle.extract([row[self.text_key] for row in rows], self.find, self.labels)
        )

    async def aproperties(self, rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        return self._filled(
            rows,
            await self.handle.aextract(
                [row[self.text_key] for row in rows], self.find, self.labels
            ),
        )

    def _filled(
        self, rows: Sequence[Mapping[str, Any]], found: list[list[dict[str, Any]]]
    ) -> list[dict[str, Any]]:
        return [{**row, self.find: one} for row, one in zip(rows, found, strict=True)]


def _ranked(objects: Sequence[Any], ranking: list[tuple[int, float]]) -> list[Any]:
    return [
        replace(objects[index], metadata=replace(objects[index].metadata, rerank_score=score))
        for index, score in ranking
    ]
