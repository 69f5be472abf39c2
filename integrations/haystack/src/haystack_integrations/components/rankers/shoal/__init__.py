"""A ranker of Haystack over a Shoal mesh."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from haystack import Document, component
from haystack.utils import Secret
from haystack_integrations.components.embedders.shoal.model_base import (
    TOKEN,
    ModelBase,
    checked,
    texts,
)

__all__ = ["ShoalRanker"]


@component
class ShoalRanker(ModelBase):
    """The `top_k` best documents (None: all), best first, as new objects with their `score`. Any
    model that scores may serve: a cross-encoder, a language model, late interaction (MaxSim) or an
    embedder (cosine). Other arguments as for `ModelBase`."""

    def __init__(
        self,
        model: str,
        *,
        top_k: int | None = None,
        address: str | None = None,
        tenant: str = "",
        token: Secret | None = TOKEN,
        timeout: float = 60.0,
        query_instruction: str = "",
        options: dict[str, Any] | None = None,
    ) -> None:
        ModelBase.__init__(  # `component` replaces the class, which breaks super()
            self,
            model,
            address=address,
            tenant=tenant,
            token=token,
            timeout=timeout,
            query_instruction=query_instruction,
            options=options,
        )
        self._written |= {"top_k": _positive(top_k)}

    @component.output_types(documents=list[Document])
    def run(
        self, query: str, documents: list[Document], top_k: int | None = None
    ) -> dict[str, Any]:
        return _output(
            documents, self._handle.rank(query, texts(checked(documents)), self._limit(top_k))
        )

    @component.output_types(documents=list[Document])
    async def run_async(
        self, query: str, documents: list[Document], top_k: int | None = None
    ) -> dict[str, Any]:
        return _output(
            documents,
            await self._handle.arank(query, texts(checked(documents)), self._limit(top_k)),
        )

    def _limit(self, top_k: int | None) -> int:
        return _positive(top_k) or self._written["top_k"] or 0


def _positive(top_k: int | None) -> int | None:
    if top_k is not None and top_k <= 0:
        raise ValueError(f"top_k must be greater than 0, not {top_k}")
    return top_k


def _output(documents: list[Document], ranking: list[tuple[int, float]]) -> dict[str, Any]:
    return {"documents": [replace(documents[index], score=score) for index, score in ranking]}
