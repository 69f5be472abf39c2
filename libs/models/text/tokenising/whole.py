"""All tokens of a long text, which is tokenised in overlapping pieces where the tokenizer is local.

The library takes some 600 bytes per token while it tokenises, and a token may be one byte of the
text, so one call for a MiB would take 600 MB. A piece ends where its tokens no longer depend on the
text after it (`cutting.py`), and the next one begins some characters before that place. Both are
joined there only if a word begins there in both and they have the same tokens before it. Otherwise,
as with a text that is one word, the whole text is tokenised, or its rest is divided where the text
is too long for that.

Pieces are returned as the text is read, because later text does not change them.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray
from tokenizers import Encoding

from libs.models.interface.work import ANY_LENGTH, CancelCheck
from libs.models.text.tokenising.cutting import MARGIN, NEAR, Cutter

ReadText: TypeAlias = Callable[[int], tuple[str, bool]]
"""Returns the beginning of a text, of at least this many characters if it has as many, and whether
that is all of it.
"""

PIECE: Final = 1 << 14
"""Characters that are tokenised in one call, some 10 MB for text that is mostly punctuation."""
MAX_WHOLE_BYTES: Final = 1 << 17
"""Maximum UTF-8 bytes of a text that is tokenised in one call because its pieces cannot be joined:
at most as many tokens, 80 MB. The rest of a longer one is divided into parts. Tokens near a border
of parts may differ from those of the whole text.
"""
_BREAKS: Final = re.compile(r"[\n\u3002\uff01\uff1f.!?]")
"""Characters after which a text is divided if any is near a part's end."""
OVERLAP: Final = 2048
"""Characters before the end of a piece that the next one has, too: beyond the margin, enough for
NEAR tokens of ordinary text.
"""


_SPACES: Final = np.array([code for code in range(0x3001) if chr(code).isspace()], np.uint32)
"""White space. U+3000 is the last one."""


@dataclass(frozen=True, slots=True)
class TokenRows:
    """Tokens in order, special ones included.

    The tokens of the text are `first` to `end`.

    Attributes:
        starts, ends: Offsets in code points, meaningful only for the tokens of the text.
        word_starts: Whether a token begins a word.
        closing_ids, closing_types: The special tokens after a text, also if later tokens were cut.
    """

    ids: NDArray[np.uint32]
    types: NDArray[np.uint32]
    starts: NDArray[np.int32]
    ends: NDArray[np.int32]
    word_starts: NDArray[np.bool_]
    first: int
    end: int
    closing_ids: NDArray[np.uint32]
    closing_types: NDArray[np.uint32]


@dataclass(frozen=True, slots=True)
class _Joint:
    """The border of two pieces: the character at which a word begins, and the tokens before it
    (ids, starts, ends).
    """

    at: int
    before: NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class WholeText:
    """The tokens of a prompt and a text, with special tokens around them, or a part of them: the
    first part has those before the text, the last one those after it.
    """

    ids: NDArray[np.int32]
    """All tokens: [tokens]."""
    type_ids: NDArray[np.int32] | None
    """The types of all tokens: [tokens]."""
    first: int
    """The text's first token."""
    end: int
    """The end of the text's tokens."""
    starts: NDArray[np.int64]
    """Code point at which each token of the text begins, after white space that the token begins
    with."""
    ends: NDArray[np.int64]
    """Code point at which each token of the text ends."""
    word_starts: NDArray[np.bool_]
    """Whether the token begins a word, or a character if the tokenizer has no words."""
    closing_ids: NDArray[np.int32]
    """The special tokens after a text."""
    closing_type_ids: NDArray[np.int32] | None
    """Their types."""


@dataclass(slots=True)
class _Progress:
    """The part of a text that was returned: its characters, and its tokens with special ones."""

    characters: int = 0
    tokens: int = 0


def rows_in_parts(
    cutter: Cutter, read: ReadText, check_cancelled: CancelCheck
) -> Iterator[TokenRows]:
    """Yield the tokens of a text in parts as it is read, at least one part."""
    done = _Progress()
    text, is_whole = read(PIECE + 1)
    if len(text) > PIECE and cutter.is_local:
        yield from _pieces(cutter, read, done, check_cancelled)
    text, is_whole = (text, is_whole) if is_whole else read(ANY_LENGTH)
    if done.characters == len(text) and done.tokens:
        return
    if len(text) <= MAX_WHOLE_BYTES // 4 or len(text.encode()) <= MAX_WHOLE_BYTES:
        rows = _rows(cutter.encode(text), 0)
        yield _cut(rows, done.tokens, len(rows.ids))
    else:
        yield from _divided(cutter, text, done.characters, check_cancelled)


def _divided(
    cutter: Cutter, text: str, begin: int, check_cancelled: CancelCheck
) -> Iterator[TokenRows]:
    """Yield the tokens of parts of the rest of a text, which is one word for the tokenizer."""
    frame = _rows(cutter.encode("a"), 0)
    while begin < len(text):
        check_cancelled()
        end = _division(text, begin)
        rows = _rows(cutter.encode(text[begin:end]), begin)
        if rows.first == rows.end:  # white space alone: the special tokens are one run
            rows = replace(
                rows,
                first=frame.first,
                end=frame.first,
                closing_ids=frame.closing_ids,
                closing_types=frame.closing_types,
            )
        low, high = 0 if begin == 0 else rows.first, rows.end
        yield _cut(rows, low, high if end < len(text) else len(rows.ids))
        begin = end


def _division(text: str, begin: int) -> int:
    """Return where the part that begins there ends: after a sentence near its end if there is one,
    never within a character of several code points.
    """
    end = min(begin + PIECE, len(text))
    if end == len(text):
        return end
    breaks = [match.end() for match in _BREAKS.finditer(text, end - OVERLAP, end)]
    if breaks:
        return breaks[-1]
    while end > begin + PIECE - OVERLAP and _continues(text, end):
        end -= 1
    return end


def _continues(text: str, at: int) -> bool:
    """Return whether a character of several code points has the one at this place as a later
    part.
    """
    joiner = "\u200d"
    return (
        unicodedata.combining(text[at]) != 0
        or text[at] in ("\ufe0f", joiner)
        or text[at - 1] == joiner
        or "\U0001f3fb" <= text[at] <= "\U0001f3ff"
    )


def _pieces(
    cutter: Cutter, read: ReadText, done: _Progress, check_cancelled: CancelCheck
) -> Iterator[TokenRows]:
    """Yield the tokens of each piece without those that the piece before has, as far as pieces can
    be joined. `done` is kept up to date.
    """
    begin, joint = 0, None
    while True:
        check_cancelled()
        text, is_whole = read(begin + PIECE + 1)
        piece = text[begin : begin + PIECE]
        encoding = cutter.encode(piece)
        rows = _rows(encoding, begin)
        low = 0 if joint is None else _place(rows, joint, cutter.borders(encoding))
        if low < 0:
            return
        if is_whole and begin + len(piece) == len(text):
            done.characters, done.tokens = len(text), done.tokens + len(rows.ids) - low
            yield _cut(rows, low, len(rows.ids))
            return
        stop = cutter.settled(encoding, piece)
        if stop <= max(low, rows.first):
            return
        at = int(rows.starts[stop])
        done.characters, done.tokens = at, done.tokens + stop - low
        yield _cut(rows, low, stop)
        later = max(at - OVERLAP, begin + 1)
        kept = np.flatnonzero(rows.starts[:stop] >= later + MARGIN)[-NEAR:]
        if len(kept) < NEAR:
            return
        begin, joint = later, _Joint(at, _tokens(rows, slice(stop - NEAR, stop)))


def _place(rows: TokenRows, joint: _Joint, borders: NDArray[np.int64]) -> int:
    """Return the token at a joint; -1 if this piece has other tokens there."""
    for row in borders[rows.starts[borders] == joint.at].tolist():
        if row - NEAR >= rows.first and np.array_equal(
            _tokens(rows, slice(row - NEAR, row)), joint.before
        ):
            return int(row)
    return -1


def _tokens(rows: TokenRows, which: slice) -> NDArray[np.int64]:
    return np.stack((rows.ids[which], rows.starts[which], rows.ends[which]))


def _rows(encoding: Encoding, shift: int) -> TokenRows:
    offsets = np.array(encoding.offsets, dtype=np.int32).reshape(-1, 2) + shift
    special = np.array(encoding.special_tokens_mask, dtype=np.bool_)
    first, after = _run(special), _run(special[::-1])
    end = max(len(special) - after, first)
    words = np.full(len(special), -2, dtype=np.int64)
    words[first:end] = [-1 if word is None else word for word in encoding.word_ids[first:end]]
    return TokenRows(
        np.array(encoding.ids, dtype=np.uint32),
        np.array(encoding.type_ids, dtype=np.uint32),
        offsets[:, 0],
        offsets[:, 1],
        np.diff(words, prepend=-2) != 0,
        first,
        end,
        np.array(encoding.ids[end:], dtype=np.uint32),
        np.array(encoding.type_ids[end:], dtype=np.uint32),
    )


def _cut(rows: TokenRows, low: int, high: int) -> TokenRows:
    """Copies, so that the rest of the piece is freed."""
    return TokenRows(
        rows.ids[low:high].copy(),
        rows.types[low:high].copy(),
        rows.starts[low:high].copy(),
        rows.ends[low:high].copy(),
        rows.word_starts[low:high].copy(),
        max(rows.first - low, 0),
        min(rows.end, high) - low,
        rows.closing_ids,
        rows.closing_types,
    )


def _run(mask: NDArray[np.bool_]) -> int:
    """Return how many of the first values are true."""
    return len(mask) if mask.all() else int(mask.argmin())


class TokenPlaces:
    """The places of a text's tokens, of one part after the other.

    Args:
        prompt: Characters of the prompt before the text.
        has_words: Whether the tokenizer has words. None: the first part with two tokens decides.
    """

    def __init__(self, prompt: int, *, has_words: bool | None = None) -> None:
        self._prompt = prompt
        # State: whether the text has begun, the end of its last token, and whether the tokenizer
        # has words.
        self._has_begun = False
        self._last_end = 0
        self._has_words = has_words

    def of_part(
        self, rows: TokenRows, read: ReadText
    ) -> tuple[int, NDArray[np.int64], NDArray[np.int64], NDArray[np.bool_]]:
        """Return the first token of the text, and `starts`, `ends` and `word_starts` of
        `WholeText`.
        """
        first, end = rows.first, rows.end
        if self._prompt and not self._has_begun:
            first += int(np.count_nonzero(rows.ends[first:end] <= self._prompt))
        starts = np.maximum(rows.starts[first:end].astype(np.int64) - self._prompt, 0)
        ends = rows.ends[first:end].astype(np.int64) - self._prompt
        if first == end:
            return first, starts, ends, np.zeros(0, np.bool_)
        begins = rows.word_starts[first:end].copy()
        begins[0] |= not self._has_begun
        if self._has_words is None and len(begins) > 1:
            self._has_words = bool(begins[1:].any())
        if not self._has_words:
            begins[:] = True
        begins &= np.diff(ends, prepend=self._last_end) > 0
        begins[1:] &= starts[1:] >= ends[:-1]
        begins[0] &= not self._has_begun or bool(starts[0] >= self._last_end)
        self._has_begun, self._last_end = True, int(ends[-1])
        _skip_space(read(0)[0], starts, ends)
        return first, starts, ends, begins


def join_parts(parts: Sequence[WholeText]) -> WholeText:
    """Return all parts as one."""
    if len(parts) == 1:
        return parts[0]
    ids = np.concatenate([part.ids for part in parts])
    types = [part.type_ids for part in parts if part.type_ids is not None]
    return WholeText(
        ids,
        np.concatenate(types) if types else None,
        sum(part.first for part in parts),
        len(ids) - (len(parts[-1].ids) - parts[-1].end),
        np.concatenate([part.starts for part in parts]),
        np.concatenate([part.ends for part in parts]),
        np.concatenate([part.word_starts for part in parts]),
        parts[0].closing_ids,
        parts[0].closing_type_ids,
    )


def _skip_space(text: str, starts: NDArray[np.int64], ends: NDArray[np.int64]) -> None:
    """Move each start past the white space that its token begins with, unless the token is nothing
    else.
    """
    low, high = int(starts.min()), int(ends.max())
    codes = np.frombuffer(f"{text[low:high]} ".encode("utf-32-le", "surrogatepass"), np.uint32)
    is_space = np.isin(codes[np.minimum(starts - low, len(codes) - 1)], _SPACES)
    for index in np.flatnonzero(is_space & (ends > starts)).tolist():
        start, end = int(starts[index]), int(ends[index])
        own = text[start:end]
        starts[index] = start + (len(own) - len(own.lstrip()) if not own.isspace() else 0)
