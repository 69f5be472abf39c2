"""Divide a text into chunks of a number of tokens, as its tokens become known."""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from libs.models.interface.work import Span
from libs.models.text.tokenising.whole import WholeText

_GROWTH_DIVISOR: Final = 4
"""Tokens in which no chunk ends are searched again when they have grown by this part."""

Borders = tuple[tuple[NDArray[np.bool_], bool], ...]
"""Whether a text may be divided before each token, and whether only in a chunk's second half: after
white space, before a word, between two characters; the best one first.
"""


def by_tokens(
    text: str, whole: WholeText, most: int, overlap: int = 0, *, whole_words: bool = False
) -> list[Span]:
    """Return the chunks of a text as `TokenDivider` does."""
    divider = TokenDivider(most, overlap, whole_words=whole_words)
    return [*divider.add(text, whole), *divider.finish(text)]


class TokenDivider:
    """Divides one text into chunks of at most `most` tokens. None begins or ends with white space.

    A chunk ends before the last word of its second half, otherwise before a character. A single
    character of more tokens is one chunk. Characters without a token, such as an accent that the
    tokenizer drops, belong to the previous chunk.

    Args:
        most: Maximum tokens of a chunk.
        overlap: Tokens that a chunk repeats of the previous one.
        whole_words: Let a chunk end before any word, or at white space, rather than in a word.
    """

    def __init__(self, most: int, overlap: int = 0, *, whole_words: bool = False) -> None:
        self._most, self._overlap, self._whole_words = most, overlap, whole_words
        # State: the tokens from the next chunk's first one on, those of later parts, how many there
        # are of both, how many of them the previous chunk has, whether no chunk has begun, and the
        # number of tokens in which no end of a chunk was found.
        self._starts: NDArray[np.int64] = np.zeros(0, np.int64)
        self._ends: NDArray[np.int64] = np.zeros(0, np.int64)
        self._word_starts: NDArray[np.bool_] = np.zeros(0, np.bool_)
        self._parts: list[WholeText] = []
        self._count = 0
        self._repeated = 0
        self._is_first = True
        self._tried = 0

    def add(self, text: str, part: WholeText) -> list[Span]:
        """Add the next tokens, and return the chunks that later ones do not change.

        Args:
            text: The text, as far as it was read.
        """
        self._parts.append(part)
        self._count += len(part.starts)
        # A long run of white space has no end of a chunk: it is searched again only after it has
        # grown by a share of itself, so that the time stays proportional to the text.
        if self._count <= max(self._most, self._tried + self._tried // _GROWTH_DIVISOR):
            return []
        return self._divide(text, is_whole=False)

    def finish(self, text: str) -> list[Span]:
        """Return the last chunks."""
        return self._divide(text, is_whole=True)

    def _divide(self, text: str, *, is_whole: bool) -> list[Span]:
        kept = (self._starts, self._ends, self._word_starts)
        added = [(part.starts, part.ends, part.word_starts) for part in self._parts]
        self._starts, self._ends, self._word_starts = map(
            np.concatenate, zip(kept, *added, strict=True)
        )
        self._parts.clear()
        count = self._count
        begins = self._borders(text)
        ends = (
            (*begins[:-1], (_any(begins[:-1]), False), begins[-1]) if self._whole_words else begins
        )
        found: list[Span] = []
        begin, end = 0, self._repeated
        while end < count:
            after, limit = max(begin, end), begin + self._most
            next_end = count if limit >= count else _border(ends, after, begin, limit)
            if next_end == count and not is_whole:
                break
            end = next_end
            start = 0 if self._is_first else int(self._starts[begin])
            stop = len(text) if end == count else int(self._starts[end])
            self._is_first = False
            chunk = text[start:stop]
            if chunk.strip():
                start += len(chunk) - len(chunk.lstrip())
                found.append(Span(start, start + len(chunk.strip())))
            again = end - self._overlap
            begin = (
                min(end, _border(begins, begin, begin, again))
                if self._overlap and again > begin
                else end
            )
        self._repeated = end - begin
        self._starts, self._ends = self._starts[begin:], self._ends[begin:]
        self._word_starts = self._word_starts[begin:]
        self._count = count - begin
        self._tried = 0 if begin else count
        return found

    def _borders(self, text: str) -> Borders:
        """Compute the borders. A token of white space never begins a chunk, except with
        `whole_words`, when these are borders too, after words.
        """
        places = self._starts.tolist()
        apart = np.diff(self._starts, prepend=-1) > 0
        apart[1:] &= self._starts[1:] >= np.maximum.accumulate(self._ends)[:-1]
        blank = np.array([text[place : place + 1].isspace() for place in places], dtype=np.bool_)
        clean = apart & ~blank & (self._starts < len(text))
        spaced = np.array(
            [place > 0 and text[place - 1].isspace() for place in places], dtype=np.bool_
        )
        words = ((spaced & clean, True), (self._word_starts & clean, True))
        return (*words, *(((apart & blank, True),) if self._whole_words else ()), (clean, False))


def _any(borders: Borders) -> NDArray[np.bool_]:
    found: NDArray[np.bool_] = np.logical_or.reduce([marks for marks, _ in borders])
    return found


def _border(borders: Borders, after: int, begin: int, end: int) -> int:
    """Return the token, beyond `after` and up to `end`, before which a chunk from `begin` on is
    best divided.

    1. The last one of the best border that the chunk's second half, or all of it, has.
    2. Otherwise the first character's after `end`, or the end of the text."""
    half = max(after + 1, begin + max(1, (end - begin) // 2))
    for marks, in_half in borders:
        low = half if in_half else after + 1
        places = np.flatnonzero(marks[low : end + 1])
        if len(places):
            return low + int(places[-1])
    later = np.flatnonzero(borders[-1][0][end + 1 :])
    return end + 1 + int(later[0]) if len(later) else len(borders[-1][0])
