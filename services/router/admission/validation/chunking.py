"""Validate the division of texts into chunks, and estimate its cost. Pure.

Routers have no tokenizer, so they estimate the tokens and the chunks of a text from its bytes; a
worker, which tokenises the text, refuses items with too many chunks. Routers do not read documents
either: they estimate the text from bytes and pages (`libs/documents/text_size.py`), and never
refuse a document because of such an estimate alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from shoal.v1 import inference_pb2 as pb

from libs.documents.text_size import NO_TEXT, TextBudget, estimated_text_bytes, text_budget
from libs.errors import InvalidInput
from services.router.admission.validation import limits

DEFAULT_CHUNK_TOKENS: Final = 512
"""Tokens of a chunk by default. It must equal the worker's default
(libs/models/text/processing/chunking/dividing.py).
"""
BYTES_PER_TOKEN: Final = 4
"""Assumed bytes of a token, which is about right for most languages."""


_TOO_LONG: Final = (
    "send it as a document (plain text or Markdown), which may have "
    f"{limits.DIVIDED.number}, or its parts as items"
)
POOLING_DIVISOR: Final = 4
"""A token that belongs to another, overlapping late chunk is pooled again but not read again by the
model. This is charged at 1/POOLING_DIVISOR of the cost of reading it.
"""


@dataclass(frozen=True, slots=True)
class ChunkedItem:
    """The estimated cost of an item that is divided into chunks."""

    bytes: int
    """Bytes of text that the model reads."""
    chunks: int
    """Number of chunks."""
    budget: TextBudget = NO_TEXT
    """The budget of a document's text."""


@dataclass(frozen=True, slots=True)
class _Documents:
    """The documents of a request.

    Attributes:
        files: The files to which documents may refer by index.
        count: The number of documents.
        unknown_pages: The maximum pages of each document without a given last page. Such
            documents divide equally the pages of a request that the other documents leave.
    """

    files: Sequence[bytes]
    count: int
    unknown_pages: int

    def budget(self, document: pb.Document) -> TextBudget:
        """Return the maximum pages and text of a document, which `requests.py` has checked."""
        return text_budget(self._data(document), self._pages(document), self.count)

    def text_bytes(self, document: pb.Document) -> int:
        """Estimate the text of a document."""
        return estimated_text_bytes(self._data(document), self._pages(document))

    def _data(self, document: pb.Document) -> bytes:
        is_shared = document.WhichOneof("source") == "file"
        return self.files[document.file] if is_shared else document.data

    def _pages(self, document: pb.Document) -> int:
        return _pages(document) or self.unknown_pages


def check(request: pb.EncodeRequest, *, has_token_vectors: bool) -> list[ChunkedItem]:
    """Validate the chunking of a request, and return the cost of each item. Raises InvalidInput.

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
    if not is_document:
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
    """Return the bytes of all spans (`start`:`end` in characters) with their contexts. Bytes are
    counted as if all characters of the text had the same size. Raises InvalidInput for a span
    outside the text.

    Args:
        path: The path of the spans in the request, for errors.
        characters: Characters of the text.
        size: Bytes of the text.
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
