"""Divide texts into chunks by sentences, tokens, Markdown, or the caller's spans.

`embedding.py` calls it in a worker's preparing threads. The package semantic-text-splitter
(Unicode's rules for sentences and words, CommonMark) selects the ends of chunks by the tokens that
the model's tokenizer makes of candidates. It runs without the interpreter's lock and calls `check_cancelled`
before it counts each candidate, so that a job can be cancelled and yields to others.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Protocol

import numpy as np
from numpy.typing import NDArray

from libs.errors import InvalidInput, TaskNotSupported
from libs.models.text.tokenising.text import TextProcessor, WholeText
from libs.models.work import CancelCheck, Chunking, EncodeWork, Span

DEFAULT_TOKENS: Final = 512
"""Default tokens of a chunk, the first recommendation of most guides to retrieval."""

MAX_CHUNKS: Final = 8192
"""Maximum chunks of one text. The router (services/router/admission/validation/limits.py) has the
same limit but only an estimate.
"""


_DOUBT: Final = 8
"""Tokens by which a part, alone, is taken to differ from its tokens in the text at most. Chunks are
counted exactly in any case.
"""
_BACK: Final = 1 << 16
"""Characters before the last part in which the next one is looked for first."""


class Splitter(Protocol):
    """A splitter of semantic-text-splitter."""

    def chunk_indices(self, text: str) -> list[tuple[int, str]]:
        """Return the place of each chunk in code points, and the chunk."""


def divide(
    text: TextProcessor, work: EncodeWork, index: int, room: int, check_cancelled: CancelCheck
) -> list[Span]:
    """Return the chunks of text `index` of a work with `chunking`, in order; at least one.

    Raises InvalidInput for more than MAX_CHUNKS, TaskNotSupported without semantic-text-splitter.

    Args:
        room: Maximum tokens of a chunk.
    """
    chunking, own = _chunking(work), work.texts[index]
    if chunking.method == "spans":
        return list(work.spans[index])
    most = chunking.max_tokens or min(DEFAULT_TOKENS, room)
    check_cancelled()
    whole = text.encode_whole(own)
    check_cancelled()
    if len(whole.starts) > (most - chunking.overlap) * MAX_CHUNKS:
        raise _too_many(index)
    if chunking.method == "tokens":
        found = by_tokens(own, whole, most, chunking.overlap)
    else:
        found = _by_sense(_Sizes(text, own, whole, most, check_cancelled), chunking)
    if len(found) > MAX_CHUNKS:
        raise _too_many(index)
    return found or [Span(0, len(own))]


def by_tokens(text: str, whole: WholeText, most: int, overlap: int = 0) -> list[Span]:
    """Return chunks of at most `most` tokens of a text. None begins or ends with white space.

    A chunk ends before the last word of its second half, otherwise before a character. A single
    character of more tokens is one chunk. Characters without a token, such as an accent that the
    tokenizer drops, belong to the previous chunk.
    """
    borders = _borders(text, whole)
    found: list[Span] = []
    begin = end = 0
    count = len(whole.starts)
    while end < count:
        last, end = end, begin + most
        end = count if end >= count else _border(borders, max(begin, last), begin, end)
        start, stop = (
            int(whole.starts[begin]) if begin else 0,
            len(text) if end == count else int(whole.starts[end]),
        )
        chunk = text[start:stop]
        if chunk.strip():
            start += len(chunk) - len(chunk.lstrip())
            found.append(Span(start, start + len(chunk.strip())))
        again = end - overlap
        begin = (
            min(end, _border(borders, begin, begin, again)) if overlap and again > begin else end
        )
    return found


Borders = tuple[NDArray[np.bool_], ...]
"""Whether a text may be divided before each token: after white space, before a word, between two
characters; the best one first.
"""


def _borders(text: str, whole: WholeText) -> Borders:
    """Compute the borders. A token of white space never begins a chunk."""
    starts = whole.starts.tolist()
    clean = np.diff(whole.starts, prepend=-1) > 0
    clean[1:] &= whole.starts[1:] >= np.maximum.accumulate(whole.ends)[:-1]
    clean &= np.array(
        [start < len(text) and not text[start].isspace() for start in starts], dtype=np.bool_
    )
    spaced = np.array([start > 0 and text[start - 1].isspace() for start in starts], dtype=np.bool_)
    return spaced & clean, whole.word_starts & clean, clean


def _border(borders: Borders, after: int, begin: int, end: int) -> int:
    """Return the token, beyond `after` and up to `end`, before which a chunk from `begin` on is
    best divided.

    1. The last word's in the chunk's second half.
    2. Otherwise the last character's.
    3. Otherwise the first character's after `end`, or the end of the text."""
    half = max(after + 1, begin + max(1, (end - begin) // 2))
    for marks, low in zip(borders, (half, half, after + 1), strict=True):
        places = np.flatnonzero(marks[low : end + 1])
        if len(places):
            return low + int(places[-1])
    later = np.flatnonzero(borders[-1][end + 1 :])
    return end + 1 + int(later[0]) if len(later) else len(borders[-1])


def _chunking(work: EncodeWork) -> Chunking:
    if work.chunking is None:
        raise ValueError("the work has no chunking")
    return work.chunking


class _Sizes:
    """The tokens of parts of a text. Most parts are far from the requested size and are counted by
    the tokens of the whole text, because a part's tokens differ from these only at its ends."""

    def __init__(
        self,
        text: TextProcessor,
        own: str,
        whole: WholeText,
        most: int,
        check_cancelled: CancelCheck,
    ) -> None:
        self.own, self.most = own, most
        self._text, self._go_on = text, check_cancelled
        self._starts = np.maximum.accumulate(whole.starts)
        # State: about where the last part was found, and the parts that are known to fit.
        self._near = 0
        self._fitting: set[str] = set()

    def count(self, part: str) -> int:
        """Return the tokens of a part; an estimate if that is not near `most`."""
        self._go_on()
        place = self._find(part)
        begin, end = np.searchsorted(self._starts, (place, place + len(part)))
        about = max(1, int(end - begin))
        return about if abs(about - self.most) > _DOUBT else self._exact(part)

    def fitting(self, part: str) -> list[Span]:
        """Return the part, or parts of it, of at most `most` tokens, or of one character."""
        self._go_on()
        if len(part) < 2 or part in self._fitting or self._exact(part) <= self.most:
            return [Span(0, len(part))]
        pieces = by_tokens(part, self._text.encode_whole(part), self.most)
        if len(pieces) < 2:
            half = len(part) // 2
            later = part[half:].lstrip()
            parts = [(0, part[:half].rstrip()), (len(part) - len(later), later)]
        else:
            parts = [(piece.start, part[piece.start : piece.end]) for piece in pieces]
        return [
            Span(start + piece.start, start + piece.end)
            for start, part in parts
            for piece in self.fitting(part)
        ]

    def _exact(self, part: str) -> int:
        found = self._text.count_tokens(part, self.most, self._go_on)
        if found <= self.most:
            self._fitting.add(part)
        return found

    def _find(self, part: str) -> int:
        """Return any position of the part in the text, because equal parts have equal tokens."""
        place = self.own.find(part, max(0, self._near - _BACK))
        if place < 0:
            place = self.own.find(part)
        self._near = place
        return place


def _by_sense(sizes: _Sizes, chunking: Chunking) -> list[Span]:
    """Divide by sentences or Markdown.

    The package assumes that a longer part has more tokens. Some chunks are too large if a tokenizer
    makes more tokens of a part than of the whole; these are divided further."""
    chunks = _splitter(chunking, sizes.most, sizes.count).chunk_indices(sizes.own)
    return [
        Span(start + piece.start, start + piece.end)
        for start, chunk in chunks
        for piece in sizes.fitting(chunk)
    ]


def _too_many(index: int) -> InvalidInput:
    message = (
        f"items[{index}].text would have more than {MAX_CHUNKS:,} chunks: request larger ones, or "
        "send its parts as items"
    )
    return InvalidInput(message, field=f"items[{index}].text")


def _splitter(chunking: Chunking, most: int, count: Callable[[str], int]) -> Splitter:
    try:
        from semantic_text_splitter import MarkdownSplitter, TextSplitter
    except ImportError:
        message = (
            "chunks by sentences or Markdown need the package semantic-text-splitter on the worker"
        )
        raise TaskNotSupported(
            f"{message}: pip install 'shoal-mesh[chunking]'", field="chunking.method"
        ) from None
    kind = MarkdownSplitter if chunking.method == "markdown" else TextSplitter
    splitter: Splitter = kind.from_callback(count, most, overlap=chunking.overlap)
    return splitter
