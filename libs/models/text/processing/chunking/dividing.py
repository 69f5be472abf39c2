"""Divide texts into chunks by sentences, tokens, Markdown, or the caller's spans.

`embedding.py` calls it in a worker's preparing threads. A text is divided as it is read, so the
first chunks of a document are known before its last pages. The package
semantic-text-splitter (Unicode's rules for sentences and words, CommonMark) selects the ends of
chunks by the tokens that the model's tokenizer makes of candidates. It runs without the
interpreter's lock and calls `check_cancelled` before it counts each candidate, so that a job can be
cancelled and yields to others.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Final, Protocol

import numpy as np

from libs.errors import InvalidInput, TaskNotSupported
from libs.models.interface.work import CancelCheck, Chunking, EncodeWork, Span
from libs.models.text.processing.chunking.token_chunks import TokenDivider, by_tokens
from libs.models.text.tokenising.text import TextProcessor

MAX_CONTEXT_CHARACTERS: Final = 4 << 20
"""Maximum length of the contexts of all chunks of a text together. It is also the router's limit,
which knows only an estimate.
"""

DEFAULT_TOKENS: Final = 512
"""Default tokens of a chunk, the first recommendation of most guides to retrieval."""

MAX_CHUNKS: Final = 8192
"""Maximum chunks of one text. The router (services/router/admission/validation/limits.py) has the
same limit but only an estimate.
"""

MAX_JOB_CHUNKS: Final = 65_536
"""Maximum chunks of all texts of a job: those that a request may have by the router's estimate."""


WINDOW: Final = 16_384
"""Characters of a text that are divided at once, for sentences and Markdown: semantic-text-splitter
takes hundreds of bytes a character, and a time that grows with the square of a text without white
space."""
_WINDOW_CHUNKS: Final = 3
"""A window has at least the characters of this many chunks, by the mean length of a token."""
_FENCE: Final = re.compile(r"^ {0,3}(?:```|~~~)", re.MULTILINE)
"""The beginning or end of a code block of Markdown."""
_BLANK_LINE: Final = re.compile(r"\n[ \t\r]*\n[ \t]*\Z")
"""The blank line before a block of Markdown. A heading needs none."""
_BLANK_CHARACTERS: Final = 256
"""Characters before a chunk in which a blank line is looked for."""

_DOUBT: Final = 8
"""Tokens by which a part, alone, is taken to differ from its tokens in the text at most. Chunks are
counted exactly in any case.
"""


class Splitter(Protocol):
    """A splitter of semantic-text-splitter."""

    def chunk_indices(self, text: str) -> list[tuple[int, str]]:
        """Return the place of each chunk in code points, and the chunk."""


def divide(
    text: TextProcessor, work: EncodeWork, index: int, room: int, check_cancelled: CancelCheck
) -> list[Span]:
    """Return all chunks of a text, as `divide_in_parts` does."""
    return [
        span for part in divide_in_parts(text, work, index, room, check_cancelled) for span in part
    ]


def divide_in_parts(
    text: TextProcessor, work: EncodeWork, index: int, room: int, check_cancelled: CancelCheck
) -> Iterator[list[Span]]:
    """Yield the chunks of text `index` of a work with `chunking`, in order; at least one.

    They are yielded as the text is read, the caller's spans all at a time.

    Raises InvalidInput for more than MAX_CHUNKS, TaskNotSupported without semantic-text-splitter.

    Args:
        room: Maximum tokens of a chunk.
    """
    chunking = _chunking(work)
    if chunking.method == "spans":
        yield list(work.spans[index])
        return
    most = chunking.max_tokens or min(DEFAULT_TOKENS, room)
    check_cancelled()
    own, is_whole = work.read_text(index, 0)
    most_tokens = (most - chunking.overlap) * MAX_CHUNKS
    if is_whole and len(own) > most_tokens:
        whole = text.encode_whole(own, check_cancelled=check_cancelled)
        if len(whole.starts) > most_tokens:
            raise _too_many(index)
        del whole
    count = 0
    for part in (
        _divide_by_tokens(text, work, index, most, check_cancelled)
        if chunking.method == "tokens"
        else _by_sense(ChunkSizes(text, work, index, most, check_cancelled), chunking)
    ):
        count += len(part)
        if count > MAX_CHUNKS:
            raise _too_many(index)
        if part:
            yield part
    if not count:
        yield [Span(0, len(work.read_text(index)[0]))]


def _divide_by_tokens(
    text: TextProcessor, work: EncodeWork, index: int, most: int, check_cancelled: CancelCheck
) -> Iterator[list[Span]]:
    """Yield the chunks of a text by tokens as it is read."""
    divider = TokenDivider(most, _chunking(work).overlap)
    read = partial(work.read_text, index)
    for part in text.encode_in_parts(read, check_cancelled=check_cancelled):
        check_cancelled()
        yield divider.add(read(0)[0], part)
    yield divider.finish(read(0)[0])


def check_total(work: EncodeWork, chunks: int, index: int) -> None:
    """Refuse the texts of a job up to text `index` if they have too many chunks together. Raises
    InvalidInput.
    """
    most = min(_chunking(work).max_chunks or MAX_JOB_CHUNKS, MAX_JOB_CHUNKS)
    if chunks > most:
        field = f"items[{index}]"
        raise InvalidInput(
            f"the items up to {field} would have more than {most:,} chunks, which is all "
            "that an answer may have: set a larger chunking.max_tokens, or send fewer items or "
            "fewer pages of documents; over gRPC, EncodeStream has a larger limit",
            field=field,
        )


def check_contexts(spans: Sequence[Span], context: str, index: int) -> None:
    """Refuse chunks of a text if their contexts, one copy for each chunk, have too many characters.
    Raises InvalidInput.
    """
    characters = len(spans) * len(context) + sum(len(span.context) for span in spans)
    if characters > MAX_CONTEXT_CHARACTERS:
        field = f"items[{index}].context" if context else f"items[{index}].spans"
        message = (
            f"{field}: the contexts of {len(spans):,} chunks have {characters:,} characters "
            "together; at most "
            f"{MAX_CONTEXT_CHARACTERS:,} are allowed: shorten them, or ask for larger chunks"
        )
        raise InvalidInput(message, field=field)


def _chunking(work: EncodeWork) -> Chunking:
    if work.chunking is None:
        raise ValueError("the work has no chunking")
    return work.chunking


class ChunkSizes:
    """The tokens of parts of a window of a text.

    1. A part that begins and ends between words has the window's tokens, if the tokenizer reads
       each word by itself: these are counted.
    2. Of other parts, most are far from the requested size. The window's tokens are an estimate for
       them, because a part's tokens differ from these only at its ends.
    3. The rest is tokenised.
    """

    def __init__(
        self,
        text: TextProcessor,
        work: EncodeWork,
        index: int,
        most: int,
        check_cancelled: CancelCheck,
    ) -> None:
        self.most = most
        self.window, self.is_last = "", False
        self._text, self._work, self._index = text, work, index
        self._go_on = check_cancelled
        # State: the place of the window; where its tokens begin and end, and whether each begins a
        # word (empty if words depend on each other); where the last part was found in the window;
        # and the parts that are known to fit.
        self._place = (0, 0)
        self._starts: list[int] = []
        self._ends: list[int] = []
        self._word_starts: list[bool] = []
        self._near = 0
        self._fitting: set[str] = set()

    @property
    def mean_characters(self) -> int:
        """Characters of a token."""
        return max(1, len(self.window) // max(1, len(self._starts)))

    def enter(self, begin: int, length: int) -> None:
        """Read the text up to the end of a window, and let parts be those of it."""
        if self._place == (begin, length):
            return
        own, is_whole = self._work.read_text(self._index, begin + length + 1)
        self._place, self._near = (begin, length), 0
        self.window = own[begin : begin + length]
        self.is_last = is_whole and begin + length >= len(own)
        whole = self._text.encode_whole(self.window, check_cancelled=self._go_on)
        self._starts = np.maximum.accumulate(whole.starts).tolist()
        self._ends = np.maximum.accumulate(whole.ends).tolist()
        self._word_starts = (
            [*whole.word_starts.tolist(), True] if self._text.has_independent_words else []
        )
        self._fitting.clear()

    def count(self, part: str) -> int:
        """Return the tokens of a part; an estimate if that is not near `most`."""
        self._go_on()
        place = self._find(part)
        if place < 0:
            return self._tokenised(part)
        stop = place + len(part)
        begin = bisect_left(self._starts, place)
        end = bisect_left(self._starts, stop, begin)
        about = max(1, end - begin)
        if abs(about - self.most) > _DOUBT:
            return about
        if self._is_between_words(place, begin) and self._is_between_words(stop, end):
            return end - begin
        return self._tokenised(part)

    def fitting(self, place: int, part: str) -> list[Span]:
        """Return the part at a place of the window, or parts of it, of at most `most` tokens, or of
        one character.
        """
        self._go_on()
        if len(part) < 2 or part in self._fitting:
            return [Span(place, place + len(part))]
        known = self.known(place, place + len(part))
        if (self._tokenised(part) if known is None else known) <= self.most:
            return [Span(place, place + len(part))]
        pieces = by_tokens(part, self._text.encode_whole(part), self.most)
        if len(pieces) < 2:
            half = len(part) // 2
            later = part[half:].lstrip()
            parts = [(0, part[:half].rstrip()), (len(part) - len(later), later)]
        else:
            parts = [(piece.start, part[piece.start : piece.end]) for piece in pieces]
        return [piece for start, own in parts for piece in self.fitting(place + start, own)]

    def known(self, place: int, stop: int) -> int | None:
        """Return the tokens of the part from one place to another without tokenising it; None if it
        does not begin and end between words.
        """
        begin, end = bisect_left(self._starts, place), bisect_left(self._starts, stop)
        is_known = self._is_between_words(place, begin) and self._is_between_words(stop, end)
        return end - begin if is_known else None

    def _tokenised(self, part: str) -> int:
        """Return the tokens of a part; any number above `most` for more."""
        found = self._text.count_tokens(part, self.most, self._go_on)
        if found <= self.most:
            self._fitting.add(part)
        return found

    def _is_between_words(self, place: int, token: int) -> bool:
        """Return whether the place is between words. `token` is the next one that begins."""
        return bool(
            self._word_starts
            and self._word_starts[token]
            and (token == 0 or self._ends[token - 1] <= place)
        )

    def _find(self, part: str) -> int:
        """Return a position of the part in the window: any one, because equal parts have equal
        tokens. -1 if the part is not in the window.
        """
        # Most candidates begin where the last one did. `find` would prepare a search first.
        if self.window.startswith(part, self._near):
            return self._near
        place = self.window.find(part, self._near)
        if place < 0:
            place = self.window.find(part)
        self._near = max(place, 0)
        return place


def _by_sense(sizes: ChunkSizes, chunking: Chunking) -> Iterator[list[Span]]:
    """Yield the chunks of each window of a text, divided by sentences or Markdown.

    The package assumes that a longer part has more tokens, and leaves some chunks too large if a
    tokenizer makes more tokens of a part than of the whole: these are divided further.

    A text is divided in windows. A chunk depends on the text after its beginning, as far as a chunk
    may reach. So all chunks of a window except the last one equal those of the whole text, and the
    next window begins where the last one does.
    """
    splitter = _splitter(chunking, sizes.most, sizes.count)
    sizes.enter(0, WINDOW)
    least = max(WINDOW, 0 if sizes.is_last else _WINDOW_CHUNKS * sizes.most * sizes.mean_characters)
    begin, length = 0, least
    while True:
        sizes.enter(begin, length)
        chunks = splitter.chunk_indices(sizes.window)
        kept = len(chunks) if sizes.is_last else _kept(sizes.window, chunks, chunking)
        if kept < 1 and not sizes.is_last:
            length *= 2  # a chunk, or white space, of more than a window
            continue
        yield [
            Span(begin + piece.start, begin + piece.end)
            for start, chunk in chunks[:kept]
            for piece in sizes.fitting(start, chunk)
        ]
        if sizes.is_last:
            return
        begin, length = begin + chunks[kept][0], least


def _kept(window: str, chunks: Sequence[tuple[int, str]], chunking: Chunking) -> int:
    """Return how many of the first chunks of a window are kept: those that end before the window
    does. With an overlap one fewer, since a chunk's beginning depends on the previous chunk's end.

    Of Markdown they are fewer if the next window can begin with a block, since the parts of a block
    depend on its beginning.
    """
    end = len(window.rstrip())
    last = next(
        (number for number, (start, chunk) in enumerate(chunks) if start + len(chunk) >= end),
        len(chunks) - 1,
    )
    last -= bool(chunking.overlap)
    if chunking.method == "markdown":
        fences = [found.start() for found in _FENCE.finditer(window)]
        for number in range(last, 0, -1):
            start = chunks[number][0]
            if (
                _BLANK_LINE.search(window, max(0, start - _BLANK_CHARACTERS), start)
                and bisect_left(fences, start) % 2 == 0
            ):
                return number
    return last


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
