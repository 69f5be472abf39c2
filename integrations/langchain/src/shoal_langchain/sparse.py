"""`ShoalSparseEmbeddings`, over the interface that langchain-qdrant has for hybrid search."""

from __future__ import annotations

from langchain_qdrant.sparse_embeddings import SparseEmbeddings, SparseVector

from shoal_langchain.components import ModelBase


class ShoalSparseEmbeddings(ModelBase, SparseEmbeddings):
    """Rows of weights, for `QdrantVectorStore(retrieval_mode=RetrievalMode.HYBRID,
    sparse_embedding=...)`.
    """

    def embed_documents(self, texts: list[str]) -> list[SparseVector]:
        return _vectors(self._handle.sparse(texts, "document"))

    def embed_query(self, text: str) -> SparseVector:
        return _vectors(self._handle.sparse([text], "query"))[0]

    async def aembed_documents(self, texts: list[str]) -> list[SparseVector]:
        return _vectors(await self._handle.asparse(texts, "document"))

    async def aembed_query(self, text: str) -> SparseVector:
        return _vectors(await self._handle.asparse([text], "query"))[0]


def _vectors(rows: list[tuple[list[int], list[float]]]) -> list[SparseVector]:
    return [SparseVector(indices=indices, values=values) for indices, values in rows]
