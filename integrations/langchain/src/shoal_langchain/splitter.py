"""`ShoalTextSplitter`: LangChain's text splitter over the chunks of a mesh."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from copy import deepcopy
from typing import Any, Literal

from langchain_core.documents import Document
from langchain_text_splitters import TextSplitter
from pydantic import Field
from shoal import Chunking
from shoal.handle import TextChunk

from shoal_langchain.components import ModelBase

Metadata = dict[Any, Any]


class ShoalTextSplitter(ModelBase, TextSplitter):
    """Divide texts into chunks that the model's own tokenizer measures.

    The mesh computes a vector for each chunk in any case. `split_and_embed` returns these vectors;
    the other methods discard them.
    """

    method: Literal["sentences", "tokens", "markdown"] = "sentences"
    """The rule by which chunks end: at paragraphs and sentences, after `max_tokens`, or at
    Markdown's headings and blocks.
    """
    max_tokens: int = Field(default=0, ge=0)
    """Maximum tokens of a chunk; 0: 512, or the model's maximum if that is smaller."""
    overlap: int = Field(default=0, ge=0)
    """Tokens of the previous chunk that a chunk repeats, at most half of `max_tokens`."""
    late: bool = False
    """Late chunking: the vectors of `split_and_embed` reflect the text around each chunk."""
    add_start_index: bool = True
    """Write each chunk's first character in its text to `metadata["start_index"]`."""

    def split_text(self, text: str) -> list[str]:
        return [chunk.text for chunk in self._handle.chunks([text], self._chunking)[0]]

    async def asplit_text(self, text: str) -> list[str]:
        return [chunk.text for chunk in (await self._handle.achunks([text], self._chunking))[0]]

    def create_documents(
        self, texts: list[str], metadatas: list[Metadata] | None = None
    ) -> list[Document]:
        return self._documents(self._handle.chunks(texts, self._chunking), metadatas)

    async def acreate_documents(
        self, texts: list[str], metadatas: list[Metadata] | None = None
    ) -> list[Document]:
        return self._documents(await self._handle.achunks(texts, self._chunking), metadatas)

    def split_documents(self, documents: Iterable[Document]) -> list[Document]:
        return self.create_documents(*_texts_and_metadata(documents))

    async def asplit_documents(self, documents: Iterable[Document]) -> list[Document]:
        return await self.acreate_documents(*_texts_and_metadata(documents))

    def split_and_embed(
        self, documents: Iterable[Document]
    ) -> tuple[list[Document], list[list[float]]]:
        """Return the chunks of documents and the dense vector of each, of one forward pass."""
        texts, metadatas = _texts_and_metadata(documents)
        chunks = self._handle.chunks(texts, self._chunking, embed=True)
        return self._documents(chunks, metadatas), _vectors(chunks)

    async def asplit_and_embed(
        self, documents: Iterable[Document]
    ) -> tuple[list[Document], list[list[float]]]:
        """Return the chunks of documents and the dense vector of each, of one forward pass."""
        texts, metadatas = _texts_and_metadata(documents)
        chunks = await self._handle.achunks(texts, self._chunking, embed=True)
        return self._documents(chunks, metadatas), _vectors(chunks)

    async def atransform_documents(
        self, documents: Sequence[Document], **_: Any
    ) -> Sequence[Document]:
        return await self.asplit_documents(documents)

    @property
    def _chunking(self) -> Chunking:
        return Chunking(self.method, self.max_tokens, self.overlap, self.late)

    def _documents(
        self, chunks: list[list[TextChunk]], metadatas: list[Metadata] | None
    ) -> list[Document]:
        made = []
        for own, metadata in zip(chunks, metadatas or [{}] * len(chunks), strict=True):
            for chunk in own:
                place = {"start_index": chunk.start} if self.add_start_index else {}
                made.append(Document(chunk.text, metadata=deepcopy(metadata) | place))
        return made


def _texts_and_metadata(documents: Iterable[Document]) -> tuple[list[str], list[Metadata]]:
    given = list(documents)
    return [one.page_content for one in given], [one.metadata for one in given]


def _vectors(chunks: list[list[TextChunk]]) -> list[list[float]]:
    return [chunk.vector for own in chunks for chunk in own if chunk.vector is not None]
