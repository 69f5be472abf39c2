"""Validate the division of texts into chunks, and estimate its cost. Pure.

A worker knows the number of a text's chunks once it has tokenised it; routers have no tokenizer. So
their number is estimated from the text's bytes, as its tokens are, and a worker refuses items with
too many. Routers do not read documents either: their text is estimated from their bytes and pages
(`libs/documents/text_size.py`), and no document is refused by an estimate of it alone. The bytes of
plain text and Markdown are exact: they are compared with the limit before anything is read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from shoal.v1 import inference_pb2 as pb

from libs.documents.text_size import (
    NO_TEXT,
    TextBudget,
    estimated_text_bytes,
    min_text_bytes,
    text_budget,
)
from libs.errors import InvalidInput
from services.router.admission.validation import limits

DEFAULT_CHUNK_TOKENS: Final = 512
"""Tokens of a chunk by default: the worker's own default
(libs/models/text/processing/chunking/dividing.py).
"""
BYTES_PER_TOKEN: Final = 4
"""Bytes of a token; most languages are close to this."""


_TOO_LONG: Final = (
    "send it as a document (plain text or Markdown), which may have "
    f"{limits.DIVIDED.number}, or its parts as items"
)
_TOO_LARGE: Final = "request a range of pages, or send ranges of pages as items"
POOLING_DIVISOR: Final = 4
"""Pooling a token's state again, for late chunks that overlap, is charged at this fraction (1/4) of
reading it.
"""


@dataclass(frozen=True, slots=True)
class ChunkedItem:
    """The cost of an item with chunks: bytes that the model reads, and the estimated number of its
    chunks.
    """

    bytes: int
    chunks: int
    budget: TextBudget = NO_TEXT
    """The budget of a document's text."""


@dataclass(frozen=True, slots=True)
class _Documents:
    """The documents of a request.

    Attributes:
        files: The files that they share.
        count: Their number.
        unknown_pages: Pages that may be read of each document without a last page: an equal share
            of those that a request may have, after the others have theirs.
    """

    files: Sequence[bytes]
    count: int
    unknown_pages: int

    def budget(self, document: pb.Document) -> TextBudget:
        """Return the pages and the text that a document may have. `requests.py` has checked it."""
        return text_budget(self._data(document), self._pages(document), self.count)

    def min_bytes(self, document: pb.Document) -> int:
        """Return the fewest bytes of text that a document has, if it is plain text and has more
        than may be divided; else 0.
        """
        return min_text_bytes(self._data(document), document.first_page or 1, document.last_page)

    def text_bytes(self, document: pb.Document) -> int:
        """Estimate the text of a document."""
        return estimated_text_bytes(self._data(document), self._pages(document))

    def _data(self, document: pb.Document) -> bytes:
        is_shared = document.WhichOneof("source") == "file"
        return self.files[document.file] if is_shared else document.data

    def _pages(self, document: pb.Document) -> int:
        return _pages(document) or self.unknown_pages


def check(request: pb.EncodeRequest, *, has_token_vectors: bool) -> list[ChunkedItem]:
    """Validate the chunking. Raises InvalidInput.

    Args:
        has_token_vectors: The answer has a vector for each token of each chunk.
    """
    chunking = request.chunking
    if chunking.method and chunking.method not in pb.Chunking.Method.values():
        methods = ", ".join(pb.Chunking.Method.keys())
        raise InvalidInput(
            f"chunking.method is {chunking.method}, which is none of {methods}",
            field="chunking.method",
        )
    by_spans = chunking.method == pb.Chunking.METHOD_SPANS
    limits.CHUNK_TOKENS.check(chunking.max_tokens, "chunking.max_tokens")
    limits.CHUNK_OVERLAP.check(chunking.overlap, "chunking.overlap")
    for name, count in (("max_tokens", chunking.max_tokens), ("overlap", chunking.overlap)):
        if by_spans and count:
            raise InvalidInput(
                f"chunking.{name} is {count}, but the spans of the items are the chunks",
                field=f"chunking.{name}",
            )
    if 2 * chunking.overlap > (chunking.max_tokens or DEFAULT_CHUNK_TOKENS):
        message = f"chunking.overlap is {chunking.overlap}; at most half of max_tokens is allowed"
        raise InvalidInput(message, field="chunking.overlap")
    if by_spans and chunking.return_text:
        raise InvalidInput(
            "chunking.return_text is not supported with chunking.method SPANS: the client has the "
            "texts of its spans",
            field="chunking.return_text",
        )
    is_pooled = chunking.late and not has_token_vectors
    documents = _documents(request)
    found = [
        _item(item, f"items[{index}]", chunking, by_spans, is_pooled, documents)
        for index, item in enumerate(request.items)
    ]
    _check_count(sum(item.chunks for item in found), limits.REQUEST_CHUNKS, "items")
    return found


def _check_count(chunks: int, limit: limits.Limit, path: str) -> None:
    if chunks > limit.most:
        raise InvalidInput(
            f"{path} would have about {chunks:,} chunks; at most {limit.most:,} are allowed:"
            " request larger ones, or send less",
            field=path,
        )


def _item(
    item: pb.Item,
    path: str,
    chunking: pb.Chunking,
    by_spans: bool,
    is_pooled: bool,
    documents: _Documents,
) -> ChunkedItem:
    content = item.parts[0].WhichOneof("content") if len(item.parts) == 1 else None
    if item.parts and content not in ("text", "document"):
        raise InvalidInput(
            f"{path} has parts, and only one text or document can be divided", field=f"{path}.parts"
        )
    if item.WhichOneof("content") == "image":
        raise InvalidInput(
            f"{path} is an image, and only a text can be divided", field=f"{path}.image"
        )
    is_document = content == "document"
    text = item.parts[0].text if item.parts else item.text
    size = documents.text_bytes(item.parts[0].document) if is_document else _utf8(text)
    if is_document:
        least = documents.min_bytes(item.parts[0].document)
        limits.DIVIDED.check(least, f"{path}.parts[0].document", _TOO_LARGE)
    else:
        limits.CHUNKED.check(size, f"{path}.text", _TOO_LONG)
    limits.CONTEXT.check(len(item.context), f"{path}.context")
    if chunking.late and item.context:
        raise InvalidInput(
            f"{path}.context is for chunks that are not late", field=f"{path}.context"
        )
    if not by_spans:
        if item.spans:
            raise InvalidInput(f"{path}.spans are for chunking.method SPANS", field=f"{path}.spans")
        most = chunking.max_tokens or DEFAULT_CHUNK_TOKENS
        chunks = size // (BYTES_PER_TOKEN * (most - chunking.overlap)) + 1
        if is_document:
            chunks = min(chunks, limits.CHUNKS.most)
        _check_count(chunks, limits.CHUNKS, f"{path}.text")
        contexts = chunks * _utf8(item.context)
        if contexts > limits.CHUNK_CONTEXTS.most and not is_document:
            message = (
                f"{path}.context would be read with about {chunks:,} chunks, {contexts:,} bytes "
                "together; at most "
                f"{limits.CHUNK_CONTEXTS.most:,} are allowed: shorten it, or ask for larger chunks"
            )
            raise InvalidInput(message, field=f"{path}.context")
        repeated = (
            size
            * chunking.overlap
            // (most - chunking.overlap)
            // (POOLING_DIVISOR if is_pooled else 1)
        )
        budget = documents.budget(item.parts[0].document) if is_document else NO_TEXT
        return ChunkedItem(size + repeated + contexts, chunks, budget)
    if is_document:
        raise InvalidInput(
            f"{path} is a document, and chunking.method SPANS divides only texts",
            field=f"{path}.parts[0].document",
        )
    if not item.spans:
        raise InvalidInput(
            f"{path}.spans are required for chunking.method SPANS", field=f"{path}.spans"
        )
    limits.CHUNKS.check(len(item.spans), f"{path}.spans")
    read = _spanned(item.spans, f"{path}.spans", len(text), size, is_late=chunking.late) + len(
        item.spans
    ) * _utf8(item.context)
    limits.SPANNED.check(read, f"{path}.spans")
    return ChunkedItem(size + read // POOLING_DIVISOR if is_pooled else read, len(item.spans))


def _documents(request: pb.EncodeRequest) -> _Documents:
    pages = [
        _pages(part.document)
        for item in request.items
        for part in item.parts
        if part.WhichOneof("content") == "document"
    ]
    unknown = pages.count(0)
    rest = max(0, limits.REQUEST_PAGES.most - sum(pages))
    share = min(rest // unknown, limits.CHUNKED_PAGES.most) if unknown else 0
    return _Documents(request.files, len(pages), max(share, limits.UNKNOWN_PAGES.most))


def _pages(document: pb.Document) -> int:
    """Return the requested pages; 0 without a last page."""
    first, last = document.first_page or 1, document.last_page
    return last - first + 1 if last else 0


def _spanned(
    spans: Sequence[pb.Span], path: str, characters: int, size: int, *, is_late: bool
) -> int:
    """Return the bytes of all spans with their contexts, as if all characters of the text had
    equally many. Raises InvalidInput.
    """
    covered = contexts = 0
    for index, span in enumerate(spans):
        start, end, context = span.start, span.end, span.context
        if not start < end <= characters:
            raise InvalidInput(
                f"{path}[{index}] is at {start}..{end}, which is outside the text's"
                f" 0..{characters}",
                field=f"{path}[{index}]",
            )
        covered += end - start
        if context:
            own = f"{path}[{index}].context"
            limits.CONTEXT.check(len(context), own)
            if is_late:
                raise InvalidInput(f"{own} is for chunks that are not late", field=own)
            contexts += _utf8(context)
    return covered * size // max(1, characters) + contexts


def _utf8(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode())
