"""Embedders of queries and documents, in their roles. Documents are returned as new objects."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from haystack import Document, component
from haystack.dataclasses import SparseEmbedding
from haystack.utils import Secret

from .model_base import TOKEN, ModelBase, checked, checked_text, texts


class _OfDocuments(ModelBase):
    """`meta_fields_to_embed`: the fields of a document's meta that the model reads, before its
    content, joined by `embedding_separator`. Other arguments as for `ModelBase`."""

    def __init__(
        self,
        model: str,
        *,
        meta_fields_to_embed: list[str] | None = None,
        embedding_separator: str = "\n",
        address: str | None = None,
        tenant: str = "",
        token: Secret | None = TOKEN,
        timeout: float = 60.0,
        query_instruction: str = "",
        options: dict[str, Any] | None = None,
    ) -> None:
        super().__init__(
            model,
            address=address,
            tenant=tenant,
            token=token,
            timeout=timeout,
            query_instruction=query_instruction,
            options=options,
        )
        self._written |= {
            "meta_fields_to_embed": meta_fields_to_embed,
            "embedding_separator": embedding_separator,
        }

    def _texts(self, documents: list[Document]) -> list[str]:
        return texts(
            checked(documents),
            self._written["meta_fields_to_embed"] or [],
            self._written["embedding_separator"],
        )


@component
class ShoalTextEmbedder(ModelBase):
    """The dense vector of a query's text."""

    @component.output_types(embedding=list[float], meta=dict[str, Any])
    def run(self, text: str) -> dict[str, Any]:
        return self._output(self._handle.dense([checked_text(text)], "query"))

    @component.output_types(embedding=list[float], meta=dict[str, Any])
    async def run_async(self, text: str) -> dict[str, Any]:
        return self._output(await self._handle.adense([checked_text(text)], "query"))

    def _output(self, rows: list[Any]) -> dict[str, Any]:
        return {"embedding": rows[0], "meta": self._meta}


@component
class ShoalDocumentEmbedder(_OfDocuments):
    """Documents with dense vectors, as `embedding`."""

    @component.output_types(documents=list[Document], meta=dict[str, Any])
    def run(self, documents: list[Document]) -> dict[str, Any]:
        return self._output(documents, self._handle.dense(self._texts(documents), "document"))

    @component.output_types(documents=list[Document], meta=dict[str, Any])
    async def run_async(self, documents: list[Document]) -> dict[str, Any]:
        return self._output(
            documents, await self._handle.adense(self._texts(documents), "document")
        )

    def _output(self, documents: list[Document], rows: list[Any]) -> dict[str, Any]:
        made = [
            replace(document, embedding=row) for document, row in zip(documents, rows, strict=True)
        ]
        return {"documents": made, "meta": self._meta}


@component
class ShoalSparseTextEmbedder(ModelBase):
    """The sparse vector of a query's text."""

    @component.output_types(sparse_embedding=SparseEmbedding, meta=dict[str, Any])
    def run(self, text: str) -> dict[str, Any]:
        return self._output(self._handle.sparse([checked_text(text)], "query"))

    @component.output_types(sparse_embedding=SparseEmbedding, meta=dict[str, Any])
    async def run_async(self, text: str) -> dict[str, Any]:
        return self._output(await self._handle.asparse([checked_text(text)], "query"))

    def _output(self, rows: list[Any]) -> dict[str, Any]:
        return {"sparse_embedding": SparseEmbedding(*rows[0]), "meta": self._meta}


@component
class ShoalSparseDocumentEmbedder(_OfDocuments):
    """Documents with sparse vectors, as `sparse_embedding`."""

    @component.output_types(documents=list[Document], meta=dict[str, Any])
    def run(self, documents: list[Document]) -> dict[str, Any]:
        return self._output(documents, self._handle.sparse(self._texts(documents), "document"))

    @component.output_types(documents=list[Document], meta=dict[str, Any])
    async def run_async(self, documents: list[Document]) -> dict[str, Any]:
        return self._output(
            documents, await self._handle.asparse(self._texts(documents), "document")
        )

    def _output(self, documents: list[Document], rows: list[Any]) -> dict[str, Any]:
        made = [
            replace(document, sparse_embedding=SparseEmbedding(*row))
            for document, row in zip(documents, rows, strict=True)
        ]
        return {"documents": made, "meta": self._meta}


@component
class ShoalMultiVectorTextEmbedder(ModelBase):
    """The vectors of the tokens of a query's text."""

    @component.output_types(multi_vector=list[list[float]], meta=dict[str, Any])
    def run(self, text: str) -> dict[str, Any]:
        return self._output(self._handle.multi_vector([checked_text(text)], "query"))

    @component.output_types(multi_vector=list[list[float]], meta=dict[str, Any])
    async def run_async(self, text: str) -> dict[str, Any]:
        return self._output(await self._handle.amulti_vector([checked_text(text)], "query"))

    def _output(self, rows: list[Any]) -> dict[str, Any]:
        return {"multi_vector": rows[0], "meta": self._meta}


@component
class ShoalMultiVectorDocumentEmbedder(_OfDocuments):
    """Documents with the vectors of their tokens, as `meta["multi_vector"]`: Haystack's documents
    have no field for them.
    """

    @component.output_types(documents=list[Document], meta=dict[str, Any])
    def run(self, documents: list[Document]) -> dict[str, Any]:
        return self._output(
            documents, self._handle.multi_vector(self._texts(documents), "document")
        )

    @component.output_types(documents=list[Document], meta=dict[str, Any])
    async def run_async(self, documents: list[Document]) -> dict[str, Any]:
        return self._output(
            documents, await self._handle.amulti_vector(self._texts(documents), "document")
        )

    def _output(self, documents: list[Document], rows: list[Any]) -> dict[str, Any]:
        made = [
            replace(document, meta=document.meta | {"multi_vector": row})
            for document, row in zip(documents, rows, strict=True)
        ]
        return {"documents": made, "meta": self._meta}
