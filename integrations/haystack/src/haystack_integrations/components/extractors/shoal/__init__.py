"""An extractor of Haystack over a Shoal mesh."""

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

from shoal.handle import Findings

__all__ = ["ShoalExtractor"]
_KEYS = {"entities": "named_entities", "labels": "labels", "relations": "relations"}


@component
class ShoalExtractor(ModelBase):
    """Extract entities, labels or relations into the meta of new documents.

    The meta field is `named_entities`, `labels` or `relations`: maps with the fields of shoal's
    `Entity`, `LabelScore` or `Relation`. Other arguments as for `ModelBase`.

    Args:
        labels: Labels for zero-shot models; default: the model's labels.
    """

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
        self._find = find
        self._labels = labels or []
        self._written |= {"find": find, "labels": labels}

    @component.output_types(documents=list[Document])
    def run(self, documents: list[Document]) -> dict[str, Any]:
        return self._output(
            documents, self._handle.extract(texts(checked(documents)), self._find, self._labels)
        )

    @component.output_types(documents=list[Document])
    async def run_async(self, documents: list[Document]) -> dict[str, Any]:
        return self._output(
            documents,
            await self._handle.aextract(texts(checked(documents)), self._find, self._labels),
        )

    def _output(
        self, documents: list[Document], found: list[list[dict[str, Any]]]
    ) -> dict[str, Any]:
        pairs = zip(documents, found, strict=True)
        return {
            "documents": [
                replace(document, meta=document.meta | {_KEYS[self._find]: one})
                for document, one in pairs
            ]
        }
