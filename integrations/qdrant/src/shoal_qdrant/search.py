"""Rerank search results by the texts in their payloads, and extract payload fields from them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from qdrant_client import models
from shoal import ModelHandle
from shoal.handle import Findings


class ShoalReranker:
    """The best of the points that a search has found, best first, as copies with their new scores.

    `text_key`: where a payload has its text. Other arguments as for `shoal.ModelHandle`. Any model
    that scores may serve: a cross-encoder, a language model, late interaction (MaxSim) or an
    embedder (cosine).
    """

    def __init__(self, model: str, *, text_key: str = "text", **settings: Any) -> None:
        self.text_key = text_key
        self.handle = ModelHandle(model, **settings)

    def rerank(
        self, query: str, points: Sequence[models.ScoredPoint], top_n: int = 0
    ) -> list[models.ScoredPoint]:
        """Return the `top_n` best points (0: all)."""
        return _ranked(points, self.handle.rank(query, _texts(points, self.text_key), top_n))

    async def arerank(
        self, query: str, points: Sequence[models.ScoredPoint], top_n: int = 0
    ) -> list[models.ScoredPoint]:
        return _ranked(points, await self.handle.arank(query, _texts(points, self.text_key), top_n))


class ShoalExtractor:
    """Extract `entities`, `labels` or `relations` from the texts of payloads.

    They are maps with the fields of shoal's `Entity`, `LabelScore` or `Relation`, by which Qdrant
    can filter (`entities[].label`).

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

    def payloads(self, payloads: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Return copies of payloads with the extracted field."""
        return self._filled(
            payloads,
            self.handle.extract([one[self.text_key] for one in payloads], self.find, self.labels),
        )

    async def apayloads(self, payloads: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        found = await self.handle.aextract(
            [one[self.text_key] for one in payloads], self.find, self.labels
        )
        return self._filled(payloads, found)

    def _filled(
        self, payloads: Sequence[Mapping[str, Any]], found: list[list[dict[str, Any]]]
    ) -> list[dict[str, Any]]:
        return [{**payload, self.find: one} for payload, one in zip(payloads, found, strict=True)]


def _texts(points: Sequence[models.ScoredPoint], key: str) -> list[str]:
    """Return the points' texts. Raises ValueError for a point without its text in the payload."""
    for point in points:
        if not isinstance((point.payload or {}).get(key), str):
            raise ValueError(
                f"the payload of point {point.id} has no text {key!r}; search with_payload=True"
            )
    return [(point.payload or {})[key] for point in points]


def _ranked(
    points: Sequence[models.ScoredPoint], ranking: list[tuple[int, float]]
) -> list[models.ScoredPoint]:
    return [points[index].model_copy(update={"score": score}) for index, score in ranking]
