"""An extractor of Haystack over a Shoal mesh."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from haystack import Document, component
from haystack.utils import Secret
from haystack_integrations.components.embedders.shoal.of_model import TOKEN, OfModel, checked, texts

from shoal.handle import Findings

__all__ = ["ShoalExtractor"]
_KEYS = {"entities": "named_entities", "labels": "labels", "relations": "relations"}


@component
class ShoalExtractor(OfModel):
    """Documents as new objects with what is found in them in their meta: `named_entities`, `labels`
    or `relations`, maps with the fields of shoal's `Entity`, `LabelScore` or `Relation`. `labels`:
    what to look for, for zero-shot models; else the model's own. Other arguments as for
    `OfModel`."""

    def __init__(
        self,
        model: str,
        *,
        find: Findings = "entities",
        labels: list[str] | None = None,
        address: str | None = None,
        tenant: str = "",
        token: Secret | None = TOKEN,
        timeout: float = 60.0,
        query_instruction: str = "",
        options: dict[str, Any] | None = None,
    ) -> None:
        OfModel.__init__(  # `component` makes the class anew, which super() does not survive
            self,
            model,
            address=address,
            tenant=tenant,
            token=token,
            timeout=timeout,
            query_instruction=query_instruction,
            options=options,
        )
        self._find = find
        self._labels = labels or []
        self._written |= {"find": find, "labels": labels}

    @component.output_types(documents=list[Document])
    def run(self, documents: list[Document]) -> dict[str, Any]:
        return self._answer(
            documents, self._handle.extract(texts(checked(documents)), self._find, self._labels)
        )

    @component.output_types(documents=list[Document])
    async def run_async(self, documents: list[Document]) -> dict[str, Any]:
        return self._answer(
            documents,
            await self._handle.aextract(texts(checked(documents)), self._find, self._labels),
        )

    def _answer(
        self, documents: list[Document], found: list[list[dict[str, Any]]]
    ) -> dict[str, Any]:
        pairs = zip(documents, found, strict=True)
        return {
            "documents": [
                replace(document, meta=document.meta | {_KEYS[self._find]: one})
                for document, one in pairs
            ]
        }
