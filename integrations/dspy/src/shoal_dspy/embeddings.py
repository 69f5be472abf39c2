"""The embedder, and a retriever over a corpus in memory."""

from __future__ import annotations

from typing import Any

import dspy
import numpy as np
import numpy.typing as npt
from shoal import ModelHandle
from shoal.tasks import Role

Floats = npt.NDArray[np.float32]


class ShoalEmbedder(dspy.Embedder):
    """Dense vectors in one role; float32 [texts, dimensions], or [dimensions] of a single text.

    `role`: "query", "document" or None for no prompt. Other arguments as for `shoal.ModelHandle`.
    DSPy's cache is off, because it identifies callables by their source, which is the same for all
    models. DSPy's batches are off, because the client splits lists itself.
    """

    def __init__(self, model: str, *, role: Role | None = None, **settings: Any) -> None:
        super().__init__(self._encode, caching=False)
        self.role: Role | None = role
        self.handle = ModelHandle(model, **settings)

    def for_role(self, role: Role) -> ShoalEmbedder:
        """The same model, by the same connection, in another role."""
        other = ShoalEmbedder(self.handle.model, role=role)
        other.handle = self.handle
        return other

    def __call__(
        self,
        inputs: str | list[str],
        batch_size: int | None = None,
        caching: bool | None = None,
        **_: Any,
    ) -> Floats:
        texts = [inputs] if isinstance(inputs, str) else inputs
        return _array(self.handle.dense(texts, self.role), inputs)

    async def acall(
        self,
        inputs: str | list[str],
        batch_size: int | None = None,
        caching: bool | None = None,
        **_: Any,
    ) -> Floats:
        texts = [inputs] if isinstance(inputs, str) else inputs
        return _array(await self.handle.adense(texts, self.role), inputs)

    def _encode(self, texts: list[str]) -> list[list[float]]:
        return self.handle.dense(texts, self.role)


class ShoalRetriever(dspy.retrievers.Embeddings):
    """The `k` passages of a corpus that are nearest to a query. The corpus is encoded as documents
    and queries as queries, which `dspy.retrievers.Embeddings` with one embedder cannot say."""

    def __init__(
        self, corpus: list[str], embedder: ShoalEmbedder, k: int = 5, **options: Any
    ) -> None:
        super().__init__(corpus, embedder.for_role("document"), k, **options)
        self.embedder = embedder.for_role("query")

    async def aforward(self, query: str) -> dspy.Prediction:
        """Run `forward` with asyncio."""
        vector = (await self.embedder.acall(query))[None]
        ((passages, indices, _),) = self._rerank_and_predict(
            *self._candidates(self._normalize(vector) if self.normalize else vector)
        )
        return dspy.Prediction(passages=passages, indices=indices)

    async def acall(self, query: str) -> dspy.Prediction:
        return await self.aforward(query)

    def load(self, path: str, embedder: ShoalEmbedder) -> ShoalRetriever:
        super().load(path, embedder.for_role("query"))
        return self

    def _candidates(self, vectors: Floats) -> tuple[Floats, Any]:
        return vectors, self._faiss_search(vectors, self.k * 10) if self.index else None


def _array(rows: list[list[float]], inputs: str | list[str]) -> Floats:
    array = np.array(rows, np.float32)
    found: Floats = array[0] if isinstance(inputs, str) else array
    return found
