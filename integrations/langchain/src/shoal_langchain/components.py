"""The classes over langchain-core. Their fields are their whole configuration: LangChain's `dumps`
writes it without the token.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from langchain_core.callbacks import Callbacks
from langchain_core.documents import BaseDocumentTransformer, Document
from langchain_core.documents.compressor import BaseDocumentCompressor
from langchain_core.embeddings import Embeddings
from langchain_core.load.serializable import Serializable
from langchain_core.tools import BaseTool
from langchain_core.utils import secret_from_env
from pydantic import Field, PrivateAttr, SecretStr
from shoal import ModelHandle
from shoal.handle import Findings


class ModelBase(Serializable):
    """The fields of all classes here: those of `shoal.ModelHandle`."""

    model: str
    """The model's id, `org/name`."""
    address: str | None = None
    """`host:port` of routers, several separated by commas. Default: SHOAL_ADDRESS, else
    127.0.0.1:50051.
    """
    tenant: str = ""
    token: SecretStr | None = Field(default_factory=secret_from_env("SHOAL_TOKEN", default=None))
    timeout: float = 60.0
    """Seconds for a request, retries included."""
    query_instruction: str = ""
    """Replaces the model's prompt of queries."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Further arguments of the calls of `shoal.Client`, such as {"dimensions": 256}."""
    _handle: ModelHandle = PrivateAttr()

    def model_post_init(self, context: Any, /) -> None:
        super().model_post_init(context)
        self._handle = ModelHandle(
            self.model,
            address=self.address,
            tenant=self.tenant,
            token=self.token.get_secret_value() if self.token else None,
            timeout=self.timeout,
            query_instruction=self.query_instruction,
            options=self.options,
        )

    @classmethod
    def is_lc_serializable(cls) -> bool:
        return True

    @classmethod
    def get_lc_namespace(cls) -> list[str]:
        return ["shoal_langchain"]

    @property
    def lc_secrets(self) -> dict[str, str]:
        return {"token": "SHOAL_TOKEN"}


class ShoalEmbeddings(ModelBase, Embeddings):
    """Dense vectors; texts are encoded as documents, a query as a query."""

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        return self._handle.dense(texts, "document")

    def embed_query(self, text: str) -> list[float]:
        return self._handle.dense([text], "query")[0]

    async def aembed_documents(self, texts: list[str]) -> list[list[float]]:
        return await self._handle.adense(texts, "document")

    async def aembed_query(self, text: str) -> list[float]:
        return (await self._handle.adense([text], "query"))[0]


class ShoalReranker(ModelBase, BaseDocumentCompressor):
    """The `top_n` best documents (0: all), best first, copied, with `metadata["relevance_score"]`.
    Any model that scores may serve: a cross-encoder, a language model, late interaction (MaxSim) or
    an embedder (cosine)."""

    top_n: int = 0

    def compress_documents(
        self, documents: Sequence[Document], query: str, callbacks: Callbacks | None = None
    ) -> Sequence[Document]:
        return _ranked(documents, self._handle.rank(query, _contents(documents), self.top_n))

    async def acompress_documents(
        self, documents: Sequence[Document], query: str, callbacks: Callbacks | None = None
    ) -> Sequence[Document]:
        return _ranked(documents, await self._handle.arank(query, _contents(documents), self.top_n))


class ShoalExtractor(ModelBase, BaseTool):
    """A tool that gives the entities, labels or relations of a text, as maps with the fields of
    shoal's `Entity`, `LabelScore` or `Relation`."""

    name: str = "extract"
    description: str = "Finds entities, labels or relations in a text."
    find: Findings = "entities"
    labels: list[str] = Field(default_factory=list)
    """Labels to find, for zero-shot models; otherwise the model's own."""

    def _run(self, text: str) -> list[dict[str, Any]]:
        return self._handle.extract([text], self.find, self.labels)[0]

    async def _arun(self, text: str) -> list[dict[str, Any]]:
        return (await self._handle.aextract([text], self.find, self.labels))[0]


class ShoalTagger(ModelBase, BaseDocumentTransformer):
    """Copy documents, with extracted entities, labels or relations as `metadata[find]`, in
    `ShoalExtractor`'s form.
    """

    find: Findings = "entities"
    labels: list[str] = Field(default_factory=list)

    def transform_documents(self, documents: Sequence[Document], **_: Any) -> Sequence[Document]:
        return self._tagged(
            documents, self._handle.extract(_contents(documents), self.find, self.labels)
        )

    async def atransform_documents(
        self, documents: Sequence[Document], **_: Any
    ) -> Sequence[Document]:
        return self._tagged(
            documents, await self._handle.aextract(_contents(documents), self.find, self.labels)
        )

    def _tagged(
        self, documents: Sequence[Document], found: list[list[dict[str, Any]]]
    ) -> list[Document]:
        return [
            _with_metadata(document, self.find, one)
            for document, one in zip(documents, found, strict=True)
        ]


def _contents(documents: Sequence[Document]) -> list[str]:
    return [document.page_content for document in documents]


def _ranked(documents: Sequence[Document], ranking: list[tuple[int, float]]) -> list[Document]:
    return [_with_metadata(documents[index], "relevance_score", score) for index, score in ranking]


def _with_metadata(document: Document, key: str, value: Any) -> Document:
    return document.model_copy(update={"metadata": document.metadata | {key: value}})
