"""The reranker and the extractor, as modules."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import dspy
from shoal import ModelHandle
from shoal.handle import Findings


class ShoalReranker(dspy.Module):
    """`reranker(query=…, passages=…)` gives a Prediction with the `k` best `passages`, best first
    (0: all), their `indices` and `scores`. Arguments as for `shoal.ModelHandle`. Any model that
    scores may serve: a cross-encoder, a language model, late interaction (MaxSim) or an embedder
    (cosine)."""

    def __init__(self, model: str, *, k: int = 0, **settings: Any) -> None:
        super().__init__()
        self.k = k
        self.handle = ModelHandle(model, **settings)

    def forward(self, query: str, passages: Sequence[str], k: int | None = None) -> dspy.Prediction:
        return _prediction(passages, self.handle.rank(query, passages, self.k if k is None else k))

    async def aforward(
        self, query: str, passages: Sequence[str], k: int | None = None
    ) -> dspy.Prediction:
        return _prediction(
            passages, await self.handle.arank(query, passages, self.k if k is None else k)
        )


class ShoalExtractor(dspy.Module):
    """Finds entities, labels or relations in a text.

    `extractor(text=…)` returns a Prediction with `found`: maps with the fields of shoal's `Entity`,
    `LabelScore` or `Relation`. As `dspy.Tool(extractor.tool)` it is a tool of an agent. Other
    arguments are those of `shoal.ModelHandle`.

    Args:
        labels: Labels to find, for zero-shot models; otherwise the model's own.
    """

    def __init__(
        self,
        model: str,
        *,
        find: Findings = "entities",
        labels: Sequence[str] = (),
        **settings: Any,
    ) -> None:
        super().__init__()
        self.find: Findings = find
        self.labels = list(labels)
        self.handle = ModelHandle(model, **settings)

    def forward(self, text: str) -> dspy.Prediction:
        return dspy.Prediction(found=self.tool(text))

    async def aforward(self, text: str) -> dspy.Prediction:
        (found,) = await self.handle.aextract([text], self.find, self.labels)
        return dspy.Prediction(found=found)

    def tool(self, text: str) -> list[dict[str, Any]]:
        """Find entities, labels or relations in a text."""
        return self.handle.extract([text], self.find, self.labels)[0]


def _prediction(passages: Sequence[str], ranking: list[tuple[int, float]]) -> dspy.Prediction:
    return dspy.Prediction(
        passages=[passages[index] for index, _ in ranking],
        indices=[index for index, _ in ranking],
        scores=[score for _, score in ranking],
    )
