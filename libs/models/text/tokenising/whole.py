"""All tokens of a long text, which is tokenised in overlapping pieces where the tokenizer is local.

The library takes some 600 bytes per token while it tokenises, and a token may be one byte of the
text, so one call for a MiB would take 600 MB. A piece ends where its tokens no longer depend on the
text after it (`cutting.py`), and the next one begins some characters before that place. Both are
joined there only if a word begins there in both and they have the same tokens before it. Otherwise,
as with a text that is one word, the whole text is tokenised, or divided where it is too long for
that.
"""

from __future__ import annotations

import re
import unicodedata
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
from numpy.typing import NDArray
from tokenizers import Encoding

from libs.models.interface.work import CancelCheck
from libs.models.text.tokenising.cutting import MARGIN, NEAR, Cutter

PIECE: Final = 1 << 14
"""Characters that are tokenised in one call, some 10 MB for text that is mostly punctuation."""
MAX_WHOLE_BYTES: Final = 1 << 17
"""Maximum UTF-8 bytes of a text that is tokenised in one call because its pieces cannot be joined:
at most as many tokens, 80 MB. A longer one is divided into parts. Tokens near a border of parts may
differ from those of the whole text.
"""
_BREAKS: Final = re.compile(r"[\n\u3002\uff01\uff1f.!?]")
"""Characters after which a text is divided if any is near a part's end."""
OVERLAP: Final = 2048
"""Characters before the end of a piece that the next one has, too: beyond the margin, enough for
NEAR tokens of ordinary text.
"""


@dataclass(frozen=True, slots=True)
class Rows:
    """Tokens in order, special ones included.

    The tokens of the text are `first` to `end`.

    Attributes:
        starts, ends: Offsets in code points, meaningful only for the tokens of the text.
        word_starts: Whether a token begins a word.
    """

    ids: NDArray[np.uint32]
    types: NDArray[np.uint32]
    starts: NDArray[np.int32]
    ends: NDArray[np.int32]
    word_starts: NDArray[np.bool_]
    first: int
    end: int


@dataclass(frozen=True, slots=True)
class _Joint:
    """The border of two pieces: the character at which a word begins, and the tokens before it
    (ids, starts, ends).
    """

    at: int
    before: NDArray[np.int64]


def rows_of(cutter: Cutter, text: str, check_cancelled: CancelCheck) -> Rows:
    """Return the tokens of a whole text."""
    pieces = (
        _pieces(cutter, text, check_cancelled) if len(text) > PIECE and cutter.is_local else None
    )
    if pieces is None and len(text) > MAX_WHOLE_BYTES // 4:
        pieces = _divided(cutter, text, check_cancelled)
    return _rows(cutter.encode(text), 0) if pieces is None else _joined(pieces)


def _divided(cutter: Cutter, text: str, check_cancelled: CancelCheck) -> list[Rows] | None:
    """Return the tokens of parts of a text that is one word for the tokenizer; None: it is short
    enough to be tokenised whole.
    """
    if len(text.encode()) <= MAX_WHOLE_BYTES:
        return None
    found: list[Rows] = []
    leading = _rows(cutter.encode("a"), 0).first
    begin = 0
    while begin < len(text):
        check_cancelled()
        end = _division(text, begin)
        rows = _rows(cutter.encode(text[begin:end]), begin)
        if rows.first == rows.end:  # white space alone: the special tokens are one run
            rows = replace(rows, first=leading, end=leading)
        low, high = 0 if begin == 0 else rows.first, rows.end
        found.append(_cut(rows, low, high if end < len(text) else len(rows.ids)))
        begin = end
    return found


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


def _pieces(cutter: Cutter, text: str, check_cancelled: CancelCheck) -> list[Rows] | None:
    """Return the tokens of each piece without those that the piece before has; None: the pieces
    cannot be joined.
    """
    found: list[Rows] = []
    begin, joint = 0, None
    while True:
        check_cancelled()
        piece = text[begin : begin + PIECE]
        encoding = cutter.encode(piece)
        rows = _rows(encoding, begin)
        low = 0 if joint is None else _place(rows, joint, cutter.borders(encoding))
        if low < 0:
            return None
        if begin + len(piece) == len(text):
            found.append(_cut(rows, low, len(rows.ids)))
            return found
        stop = cutter.settled(encoding, piece)
        if stop <= max(low, rows.first):
            return None
        at = int(rows.starts[stop])
        found.append(_cut(rows, low, stop))
        later = max(at - OVERLAP, begin + 1)
        kept = np.flatnonzero(rows.starts[:stop] >= later + MARGIN)[-NEAR:]
        if len(kept) < NEAR:
            return None
        begin, joint = later, _Joint(at, _tokens(rows, slice(stop - NEAR, stop)))


def _place(rows: Rows, joint: _Joint, borders: NDArray[np.int64]) -> int:
    """Return the token at a joint; -1 if this piece has other tokens there."""
    for row in borders[rows.starts[borders] == joint.at].tolist():
        if row - NEAR >= rows.first and np.array_equal(
            _tokens(rows, slice(row - NEAR, row)), joint.before
        ):
            return int(row)
    return -1


def _tokens(rows: Rows, which: slice) -> NDArray[np.int64]:
    return np.stack((rows.ids[which], rows.starts[which], rows.ends[which]))


def _rows(encoding: Encoding, shift: int) -> Rows:
    offsets = np.array(encoding.offsets, dtype=np.int32).reshape(-1, 2) + shift
    special = np.array(encoding.special_tokens_mask, dtype=np.bool_)
    first, after = _run(special), _run(special[::-1])
    end = max(len(special) - after, first)
    words = np.full(len(special), -2, dtype=np.int64)
    words[first:end] = [-1 if word is None else word for word in encoding.word_ids[first:end]]
    return Rows(
        np.array(encoding.ids, dtype=np.uint32),
        np.array(encoding.type_ids, dtype=np.uint32),
        offsets[:, 0],
        offsets[:, 1],
        np.diff(words, prepend=-2) != 0,
        first,
        end,
    )


def _cut(rows: Rows, low: int, high: int) -> Rows:
    """Copies, so that the rest of the piece is freed."""
    return Rows(
        rows.ids[low:high].copy(),
        rows.types[low:high].copy(),
        rows.starts[low:high].copy(),
        rows.ends[low:high].copy(),
        rows.word_starts[low:high].copy(),
        max(rows.first - low, 0),
        min(rows.end, high) - low,
    )


def _joined(pieces: list[Rows]) -> Rows:
    last = sum(len(piece.ids) for piece in pieces[:-1])
    return Rows(
        np.concatenate([piece.ids for piece in pieces]),
        np.concatenate([piece.types for piece in pieces]),
        np.concatenate([piece.starts for piece in pieces]),
        np.concatenate([piece.ends for piece in pieces]),
        np.concatenate([piece.word_starts for piece in pieces]),
        pieces[0].first,
        last + pieces[-1].end,
    )


def _run(mask: NDArray[np.bool_]) -> int:
    """Return how many of the first values are true."""
    return len(mask) if mask.all() else int(mask.argmin())
