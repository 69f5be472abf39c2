"""A document splitter of Haystack over a Shoal mesh."""

from __future__ import annotations

from copy import deepcopy
from itertools import pairwise
from typing import Any, Literal, get_args

from haystack import Document, component
from haystack.utils import Secret
from haystack_integrations.components.embedders.shoal.model_base import (
    TOKEN,
    ModelBase,
    checked,
    texts,
)

from shoal import Chunking
from shoal.handle import TextChunk

__all__ = ["ShoalDocumentSplitter"]
Method = Literal["sentences", "tokens", "markdown"]


@component
class ShoalDocumentSplitter(ModelBase):
    """Divide documents into documents that the model's own tokenizer measures.

    Each has its parent's meta, and `source_id`, `split_id`, `split_idx_start` and `page_number`:
    the parent's `page_number` (default 1) and the form feeds before the chunk. With `overlap` it
    has `_split_overlap` in the form of Haystack's `DocumentSplitter`. Documents without text have
    no chunks. The mesh computes a vector for each chunk in any case. Other arguments as for
    `ModelBase`.

    Args:
        method: Where chunks end: at paragraphs and sentences ("sentences"), after `max_tokens`
            ("tokens"), or at headings and blocks ("markdown").
        max_tokens: Maximum tokens of a chunk; 0: 512, or the model's maximum if that is smaller.
        overlap: Tokens of the previous chunk that a chunk repeats, at most half of `max_tokens`.
        embed: Set the `embedding` of each document.
        late: Set embeddings that reflect the text around each chunk (late chunking).
    """

    def __init__(
        self,
        model: str,
        *,
        method: Method = "sentences",
        max_tokens: int = 0,
        overlap: int = 0,
        embed: bool = False,
        late: bool = False,
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
        if method not in get_args(Method):
            allowed = ", ".join(get_args(Method))
            raise ValueError(f"method must be one of {allowed}, not {method!r}")
        self._chunking = Chunking(method, max_tokens, overlap, late)
        self._embeds = embed or late
        self._written |= {
            "method": method,
            "max_tokens": max_tokens,
            "overlap": overlap,
            "embed": embed,
            "late": late,
        }

    @component.output_types(documents=list[Document])
    def run(self, documents: list[Document]) -> dict[str, Any]:
        contents = texts(checked(documents))
        chunks = self._handle.chunks(contents, self._chunking, embed=self._embeds)
        return self._output(documents, chunks)

    @component.output_types(documents=list[Document])
    async def run_async(self, documents: list[Document]) -> dict[str, Any]:
        contents = texts(checked(documents))
        chunks = await self._handle.achunks(contents, self._chunking, embed=self._embeds)
        return self._output(documents, chunks)

    def _output(self, documents: list[Document], chunks: list[list[TextChunk]]) -> dict[str, Any]:
        made: list[Document] = []
        for parent, own in zip(documents, chunks, strict=True):
            split = _split(parent, own)
            if self._chunking.overlap:
                _add_overlaps(split)
            made += split
        return {"documents": made}


def _split(parent: Document, chunks: list[TextChunk]) -> list[Document]:
    """Return the documents of a parent's chunks."""
    content = parent.content or ""
    first_page = parent.meta.get("page_number")
    page = first_page if isinstance(first_page, int) else 1
    counted = 0
    made = []
    for number, chunk in enumerate(chunks):
        page += content.count("\f", counted, chunk.start)
        counted = chunk.start
        meta = deepcopy(parent.meta) | {
            "source_id": parent.id,
            "page_number": page,
            "split_id": number,
            "split_idx_start": chunk.start,
        }
        made.append(Document(content=chunk.text, meta=meta, embedding=chunk.vector))
    return made


def _add_overlaps(split: list[Document]) -> None:
    """Write to each document which of its characters its neighbours have, too."""
    for one in split:
        one.meta["_split_overlap"] = []
    for previous, one in pairwise(split):
        begin = one.meta["split_idx_start"] - previous.meta["split_idx_start"]
        length = len(previous.content or "")
        if begin < length:
            one.meta["_split_overlap"].append({"doc_id": previous.id, "range": (begin, length)})
            previous.meta["_split_overlap"].append({"doc_id": one.id, "range": (0, length - begin)})
