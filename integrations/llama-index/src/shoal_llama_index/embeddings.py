"""Embeddings. Their fields are their whole configuration: `to_dict` and `to_json` write it without
the token.
"""

from __future__ import annotations

from typing import Any

from llama_index.core.base.embeddings.base import BaseEmbedding, Embedding
from llama_index.core.base.embeddings.base_sparse import BaseSparseEmbedding, SparseEmbedding
from llama_index.core.bridge.pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    PrivateAttr,
    SecretStr,
)
from shoal import ModelHandle

BATCH = 512
"""Texts per call of LlamaIndex. The client splits lists itself; single batches of 10
would cost a call each.
"""


class ModelBase(BaseModel):
    """The fields that all classes here share: those of `shoal.ModelHandle`.

    LlamaIndex's field is `model_name`. `model` sets it too, as in all of Shoal's integrations.
    """

    model_config = ConfigDict(populate_by_name=True)

    model_name: str = Field(alias="model", description="The model's id, org/name.")
    address: str | None = Field(
        default=None, description="Routers, host:port separated by commas. Default: SHOAL_ADDRESS."
    )
    tenant: str = ""
    token: SecretStr | None = Field(
        default=None, exclude=True, repr=False, description="Default: SHOAL_TOKEN."
    )
    timeout: float = Field(default=60.0, description="Seconds for a request, retries included.")
    query_instruction: str = Field(
        default="", description="Replaces the model's prompt of queries."
    )
    options: dict[str, Any] = Field(
        default_factory=dict, description="Further arguments of shoal.Client's calls."
    )
    _handle: ModelHandle | None = PrivateAttr(default=None)

    @property
    def handle(self) -> ModelHandle:
        if self._handle is None:
            self._handle = ModelHandle(
                self.model_name,
                address=self.address,
                tenant=self.tenant,
                token=self.token.get_secret_value() if self.token else None,
                timeout=self.timeout,
                query_instruction=self.query_instruction,
                options=self.options,
            )
        return self._handle


class ShoalEmbedding(ModelBase, BaseEmbedding):
    """Dense vectors; nodes are encoded as documents, a query as a query."""

    model_name: str = Field(alias="model", description="The model's id, org/name.")
    embed_batch_size: int = Field(default=BATCH, gt=0, le=2048)

    @classmethod
    def class_name(cls) -> str:
        return "ShoalEmbedding"

    def _get_query_embedding(self, query: str) -> Embedding:
        return self.handle.dense([query], "query")[0]

    async def _aget_query_embedding(self, query: str) -> Embedding:
        return (await self.handle.adense([query], "query"))[0]

    def _get_text_embedding(self, text: str) -> Embedding:
        return self.handle.dense([text], "document")[0]

    async def _aget_text_embedding(self, text: str) -> Embedding:
        return (await self.handle.adense([text], "document"))[0]

    def _get_text_embeddings(self, texts: list[str]) -> list[Embedding]:
        return self.handle.dense(texts, "document")

    async def _aget_text_embeddings(self, texts: list[str]) -> list[Embedding]:
        return await self.handle.adense(texts, "document")


class ShoalSparseEmbedding(ModelBase, BaseSparseEmbedding):
    """Rows of weights by column. `documents` and `queries` are what `QdrantVectorStore` takes as
    `sparse_doc_fn` and `sparse_query_fn`."""

    model_name: str = Field(alias="model", description="The model's id, org/name.")
    embed_batch_size: int = Field(default=BATCH, gt=0, le=2048)

    @classmethod
    def class_name(cls) -> str:
        return "ShoalSparseEmbedding"

    def documents(self, texts: list[str]) -> tuple[list[list[int]], list[list[float]]]:
        return _columns_and_weights(self.handle.sparse(texts, "document"))

    def queries(self, texts: list[str]) -> tuple[list[list[int]], list[list[float]]]:
        return _columns_and_weights(self.handle.sparse(texts, "query"))

    def _get_query_embedding(self, query: str) -> SparseEmbedding:
        return _maps(self.handle.sparse([query], "query"))[0]

    async def _aget_query_embedding(self, query: str) -> SparseEmbedding:
        return _maps(await self.handle.asparse([query], "query"))[0]

    def _get_text_embedding(self, text: str) -> SparseEmbedding:
        return _maps(self.handle.sparse([text], "document"))[0]

    async def _aget_text_embedding(self, text: str) -> SparseEmbedding:
        return _maps(await self.handle.asparse([text], "document"))[0]

    def _get_text_embeddings(self, texts: list[str]) -> list[SparseEmbedding]:
        return _maps(self.handle.sparse(texts, "document"))

    async def _aget_text_embeddings(self, texts: list[str]) -> list[SparseEmbedding]:
        return _maps(await self.handle.asparse(texts, "document"))


def _maps(rows: list[tuple[list[int], list[float]]]) -> list[SparseEmbedding]:
    return [dict(zip(columns, weights, strict=True)) for columns, weights in rows]


def _columns_and_weights(
    rows: list[tuple[list[int], list[float]]],
) -> tuple[list[list[int]], list[list[float]]]:
    return [columns for columns, _ in rows], [weights for _, weights in rows]
