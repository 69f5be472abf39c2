"""Chunks in the requests and results of `encode`. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from shoal.errors import InvalidInput
from shoal.requests.arguments import enum_value, has_document, message
from shoal.results import EncodeResult
from shoal.tasks import Chunking, Item, Parts, Span
from shoal.v1 import inference_pb2 as pb

_METHODS: Final = {
    "sentences": pb.Chunking.METHOD_SENTENCES,
    "tokens": pb.Chunking.METHOD_TOKENS,
    "markdown": pb.Chunking.METHOD_MARKDOWN,
    "spans": pb.Chunking.METHOD_SPANS,
}
_DEFAULT_CHUNK_TOKENS: Final = 512
_CHARACTERS_PER_TOKEN: Final = 4


class ChunkPlan:
    """The division of a call's items into chunks. Raises InvalidInput for an item that no request
    can hold.
    """

    def __init__(self, chunking: Chunking, items: Sequence[Item]) -> None:
        self.has_documents = any(map(has_document, items))
        self.message: pb.Chunking = message(
            pb.Chunking,
            method=enum_value("chunking.method", chunking.method, _METHODS),
            max_tokens=chunking.max_tokens,
            overlap=chunking.overlap,
            late=chunking.late,
            return_text=self.has_documents,
        )
        for name, given in (("contexts", chunking.contexts), ("spans", chunking.spans)):
            if given and (isinstance(given, str) or len(given) != len(items)):
                wrong = f"chunking.{name} has {len(given)} entries for {len(items)} items"
                raise InvalidInput(
                    f"{wrong}; it must be a list with one for each item", field=f"chunking.{name}"
                )
        self._contexts, self._spans = chunking.contexts, chunking.spans
        self._stride = (
            max(1, (chunking.max_tokens or _DEFAULT_CHUNK_TOKENS) - chunking.overlap)
            * _CHARACTERS_PER_TOKEN
        )

    def lengths(self, lengths: Sequence[int]) -> list[int]:
        """Return the expected lengths of the chunks of items, in characters."""
        if self._spans:
            return [self._stride] * sum(map(len, self._spans))
        return [
            min(length, self._stride)
            for length in lengths
            for _ in range(length // self._stride + 1)
        ]

    def complete(self, items: Sequence[pb.Item], places: Sequence[int]) -> None:
        """Add contexts and spans to messages of the items at these indices."""
        for item, place in zip(items, places, strict=True):
            path = f"items[{place}]"
            if self._contexts:
                item.context = message(pb.Item, context=self._contexts[place]).context
            if self._spans:
                item.spans.extend(
                    [
                        _span(f"{path}.spans[{index}]", span)
                        for index, span in enumerate(self._spans[place])
                    ]
                )


def with_texts(result: EncodeResult, items: Sequence[Item]) -> EncodeResult:
    """Return the result with the texts of the items, of which chunks are parts. Those of documents
    are not known here.
    """
    return replace(result, _chunks=replace(result.chunks, texts=[_text(item) for item in items]))


def _span(path: str, span: Span | tuple[int, int]) -> pb.Span:
    try:
        start, end, context = (
            (span.start, span.end, span.context) if isinstance(span, Span) else (*span, "")
        )
        return pb.Span(start=start, end=end, context=context)
    except (TypeError, ValueError) as error:
        raise InvalidInput(f"{path} does not fit the request: {error}", field=path) from None


def _text(item: Item) -> str:
    if isinstance(item, Parts):
        return _text(item.pieces[0]) if len(item.pieces) == 1 else ""
    return item if isinstance(item, str) else ""
