"""Validate the division of texts into chunks, and estimate its cost. Pure.

A worker knows the number of a text's chunks once it has tokenised it; routers have no tokenizer. So
their number is estimated from the text's bytes, as its tokens are, and a worker refuses items with
too many.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from shoal.v1 import inference_pb2 as pb

from libs.errors import InvalidInput
from services.router.admission.validation import limits

DEFAULT_CHUNK_TOKENS: Final = 512
"""Tokens of a chunk by default: the worker's own default
(libs/models/text/processing/chunking/dividing.py).
"""
BYTES_PER_TOKEN: Final = 4
"""Bytes of a token; most languages are close to this."""


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
    is_pooled = chunking.late and not has_token_vectors
    found = [
        _item(item, f"items[{index}]", chunking, by_spans, is_pooled)
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
    item: pb.Item, path: str, chunking: pb.Chunking, by_spans: bool, is_pooled: bool
) -> ChunkedItem:
    if item.parts and (len(item.parts) > 1 or item.parts[0].WhichOneof("content") != "text"):
        raise InvalidInput(
            f"{path} has parts, and only a text can be divided", field=f"{path}.parts"
        )
    if item.WhichOneof("content") == "image":
        raise InvalidInput(
            f"{path} is an image, and only a text can be divided", field=f"{path}.image"
        )
    text = item.parts[0].text if item.parts else item.text
    size = _utf8(text)
    limits.CHUNKED.check(size, f"{path}.text")
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
        _check_count(chunks, limits.CHUNKS, f"{path}.text")
        contexts = chunks * _utf8(item.context)
        if contexts > limits.CHUNK_CONTEXTS.most:
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
        return ChunkedItem(size + repeated + contexts, chunks)
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
