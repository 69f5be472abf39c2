"""Count the objects that decoding a body would create, before anything is decoded. Pure.

Decoding creates an object for each text, list and map: 8 MiB of `"a",` would become 1.5 GB of
messages. A JSON body is counted in two steps:

1. Compute an upper bound by counting bytes, with numpy in pieces that fit the processor's cache:
  0.26 ns per byte, a hundredth of the time in which a list of texts becomes a message. Brackets and
  commas inside texts are counted too.
2. If that bound exceeds a limit, or MAX_LOOSE_FACTOR times the size of a large body, count exactly,
  without the contents of texts. The count ends as soon as a limit is exceeded.

A MessagePack body is walked value by value.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from libs.serving.calls.decode import MAX_FIELDS
from services.edge.messages.base import HttpError, invalid

MAX_OBJECTS: Final = MAX_FIELDS
"""The maximum number of texts (including keys), lists and maps of a body: the router's limit of
fields.
"""
MAX_VALUES: Final = 1_000_000
"""The maximum number of values of a body, including numbers: three times OpenAI's limit of token
ids.
"""
MAX_DEPTH: Final = 100
"""The maximum nesting depth of lists and maps, equal to protobuf's."""
OBJECT_BYTES: Final = 512
"""Memory per text, list or map until its request is sent: decoded, as a message, and serialised.
Measured: 560 bytes for an item of one letter, 120 for others.
"""
VALUE_BYTES: Final = 40
"""Memory per other value: a Python number and its slot in a list."""
MIN_EXACT_BYTES: Final = 64 * 1024
"""Bodies up to this size are counted on the event loop, exactly only above a limit, since exact
counting takes thirty times as long.
"""
MAX_LOOSE_FACTOR: Final = 4
"""The maximum memory charged by the upper bound, as a multiple of the body's bytes. Source code has
quotes and brackets for ten times its size.
"""
_PIECE_BYTES: Final = 64 * 1024
_SHORT_BYTES: Final = 4 * 1024
"""Size below which numpy's fixed costs exceed those of bytes.count."""
_QUOTE, _COMMA, _BACKSLASH = ord('"'), ord(","), ord("\\")
_OPEN, _CLOSE, _FOLD = ord("["), ord("]"), 0xDF
"""`_FOLD` maps braces, and no other bytes, to square brackets."""

Positions = NDArray[np.intp]


@dataclass(frozen=True, slots=True)
class ContentCount:
    """The size of a body's contents.

    Attributes:
        objects: Texts, lists and maps.
        values: A lower bound of the entries of lists and maps.
        depth: Nesting of lists and maps; 0 if it is certainly within MAX_DEPTH.
    """

    objects: int
    values: int
    depth: int = 0

    @property
    def bytes(self) -> int:
        """Return the memory of the decoded objects, in addition to the body's bytes."""
        return self.objects * OBJECT_BYTES + self.values * VALUE_BYTES


def count_objects(body: bytes, *, is_msgpack: bool) -> ContentCount:
    """Return an upper bound of what decoding the body creates. Raises HttpError TOO_LARGE above
    MAX_OBJECTS or MAX_VALUES, INVALID_INPUT above MAX_DEPTH.
    """
    count = _count_msgpack(body) if is_msgpack else _count_json(body)
    _check(count)
    return count


def _check(count: ContentCount) -> None:
    if count.depth > MAX_DEPTH:
        raise invalid(
            f"the body is nested more than {MAX_DEPTH} levels deep, which is the limit", ""
        )
    for number, limit, what in (
        (count.objects, MAX_OBJECTS, "texts, lists and objects"),
        (count.values, MAX_VALUES, "values"),
    ):
        if number > limit:
            raise HttpError(
                "TOO_LARGE",
                (
                    f"the body has more than {limit:,} {what}, which is the limit: send fewer "
                    "items at a time"
                ),
            )


def _count_json(body: bytes) -> ContentCount:
    quotes, commas, opens = _count_bytes(body)
    count = ContentCount(quotes // 2 + opens, commas + opens)
    is_loose = len(body) > MIN_EXACT_BYTES and count.bytes > MAX_LOOSE_FACTOR * len(body)
    if is_loose or count.objects > MAX_OBJECTS or count.values > MAX_VALUES or opens > MAX_DEPTH:
        return _count_exactly(body)
    return count


def _count_bytes(body: bytes) -> tuple[int, int, int]:
    """Return the numbers of quotes, commas, and opening brackets of both kinds, inside texts or
    not.
    """
    if len(body) <= _SHORT_BYTES:
        return body.count(b'"'), body.count(b","), body.count(b"[") + body.count(b"{")
    quotes = commas = opens = 0
    whole = np.frombuffer(body, np.uint8)
    found, folded = np.empty(_PIECE_BYTES, np.bool_), np.empty(_PIECE_BYTES, np.uint8)
    for first in range(0, len(whole), _PIECE_BYTES):
        piece = whole[first : first + _PIECE_BYTES]
        size = len(piece)
        quotes += int(np.count_nonzero(np.equal(piece, _QUOTE, out=found[:size])))
        commas += int(np.count_nonzero(np.equal(piece, _COMMA, out=found[:size])))
        np.bitwise_and(piece, _FOLD, out=folded[:size])
        opens += int(np.count_nonzero(np.equal(folded[:size], _OPEN, out=found[:size])))
    return quotes, commas, opens


def _count_exactly(body: bytes) -> ContentCount:
    """Count without the contents of texts until a limit is exceeded. If the count goes wrong
    because the body is not JSON, the decoder stops at the same place.
    """
    objects = values = deepest = depth = first = 0
    is_text = 0
    """1 if a piece begins inside a text."""
    while first < len(body):
        piece = body[first : first + _PIECE_BYTES]
        if first + len(piece) < len(body) and (len(piece) - len(piece.rstrip(b"\\"))) % 2:
            piece = piece[:-1]  # do not split an escape sequence
        first += len(piece)
        found = np.frombuffer(piece, np.uint8)
        folded = found & _FOLD
        quotes = _unescaped(found, np.flatnonzero(found == _QUOTE))
        brackets = np.flatnonzero((folded == _OPEN) | (folded == _CLOSE))
        brackets = brackets[_outside(brackets, quotes, is_text)]
        commas = np.flatnonzero(found == _COMMA)
        steps = np.where(folded[brackets] == _OPEN, 1, -1)
        depths = depth + np.cumsum(steps)
        opens = int(np.count_nonzero(steps > 0))
        objects += (len(quotes) + 1 - is_text) // 2 + opens
        values += int(np.count_nonzero(_outside(commas, quotes, is_text))) + opens
        deepest = max(deepest, int(depths.max(initial=0)))
        depth = int(depths[-1]) if len(depths) else depth
        is_text ^= len(quotes) & 1
        if objects > MAX_OBJECTS or values > MAX_VALUES or deepest > MAX_DEPTH:
            break
    return ContentCount(objects, values, deepest)


def _unescaped(piece: NDArray[np.uint8], quotes: Positions) -> Positions:
    """Return the quotes that end or begin a text: those after an even number of backslashes."""
    behind = (quotes > 0) & (piece[quotes - 1] == _BACKSLASH)
    if not behind.any():
        return quotes
    backslashes = np.flatnonzero(piece == _BACKSLASH)
    starts = backslashes[np.diff(backslashes, prepend=-2) > 1]
    candidates = quotes[behind]
    lengths = candidates - starts[np.searchsorted(starts, candidates) - 1]
    behind[behind] = lengths & 1 == 1
    unescaped: Positions = quotes[~behind]
    return unescaped


def _outside(positions: Positions, quotes: Positions, is_text: int) -> NDArray[np.bool_]:
    """Return which positions are outside texts: those after an even number of quotes."""
    is_outside: NDArray[np.bool_] = (np.searchsorted(quotes, positions) + is_text) % 2 == 0
    return is_outside


_SCALARS: Final = {
    **dict.fromkeys((0xC0, 0xC2, 0xC3, *range(0x80), *range(0xE0, 0x100)), 1),
    0xCA: 5,
    0xCB: 9,
    0xCC: 2,
    0xCD: 3,
    0xCE: 5,
    0xCF: 9,
    0xD0: 2,
    0xD1: 3,
    0xD2: 5,
    0xD3: 9,
}
_TEXTS: Final = {0xA0 + size: 1 + size for size in range(32)} | {
    0xD4: 3,
    0xD5: 4,
    0xD6: 6,
    0xD7: 10,
    0xD8: 18,
    0x80: 1,
    0x90: 1,
}
_LENGTHS: Final = {
    **dict.fromkeys((0xC4, 0xC7, 0xD9), 1),
    **dict.fromkeys((0xC5, 0xC8, 0xDA, 0xDC, 0xDE), 2),
    **dict.fromkeys((0xC6, 0xC9, 0xDB, 0xDD, 0xDF), 4),
}
"""MessagePack (github.com/msgpack/msgpack/blob/master/spec.md), by the first byte of a value.
`_SCALARS` and `_TEXTS` hold the value's size including that byte; `_LENGTHS` holds the size of the
length that follows. Short maps (from 0x81) and lists (from 0x91) are separate.
"""
_SIZES: Final = bytes((_SCALARS | _TEXTS).get(byte, 0) for byte in range(256))
_SHORT_SCALARS: Final = bytes(byte for byte, size in _SCALARS.items() if size == 1)
_SHORT_VALUES: Final = re.compile(b"[" + re.escape(_SHORT_SCALARS + b"\x80\x90\xa0") + b"]+")
"""A run of values of one byte: scalars, and empty texts, lists and maps."""
_MIN_RUN: Final = 16
"""Runs from this length on are counted in one step, fifty times as fast as value by value."""
_EXTENSIONS: Final = (0xC7, 0xC8, 0xC9)
_MAPS, _LISTS = (0xDE, 0xDF), (0xDC, 0xDD)


def _count_msgpack(body: bytes) -> ContentCount:
    """Walk the body until a limit is exceeded. At bytes that are not MessagePack the decoder stops
    too.
    """
    end, sizes, position = len(body), _SIZES, 0
    left, missing = [0], 1
    """The numbers of values still missing in the innermost list or map and in those around it."""
    values = scalars = deepest = 0
    has_runs = True
    """False after a run that was too short, so that a body of such runs costs no more."""
    while position < end:
        while not missing:
            if len(left) == 1:
                return ContentCount(values - scalars, values, deepest)
            missing = left.pop()
        if has_runs and missing >= _MIN_RUN and sizes[body[position]] == 1:
            size, empty, is_deeper = _read_run(body, position, missing)
            values += size
            scalars += size - empty
            missing -= size
            position += size
            has_runs = size >= _MIN_RUN
            deepest = max(deepest, len(left) * is_deeper)
            continue
        missing -= 1
        values += 1
        byte = body[position]
        if size := sizes[byte]:
            position += size
            if byte in _SCALARS:
                scalars += 1
                continue
        if values - scalars > MAX_OBJECTS:
            break
        if size:
            if byte < 0xA0:  # an empty map or list
                deepest = max(deepest, len(left))
            continue
        entries, position = _read_header(body, position, byte)
        if entries < 0:
            continue
        left.append(missing)
        missing = entries
        deepest = max(deepest, len(left) - 1)
        # A list is refused by its declared length before it is walked; each value has at least one
        # byte.
        if values + entries > MAX_VALUES or deepest > MAX_DEPTH:
            return ContentCount(values - scalars, values + entries, deepest)
    return ContentCount(values - scalars, values, deepest)


def _read_run(body: bytes, position: int, missing: int) -> tuple[int, int, bool]:
    """Return the length of the run of values of one byte at a position, the number of empty texts,
    lists and maps among them, and whether there are lists or maps.
    """
    found = _SHORT_VALUES.match(body, position, position + missing)
    run = found[0] if found else b""
    empty = run.translate(None, _SHORT_SCALARS)
    return len(run), len(empty), bool(empty.translate(None, b"\xa0"))


def _read_header(body: bytes, position: int, byte: int) -> tuple[int, int]:
    """Return a container's number of values (-1 for a text) and where they begin or the text
    ends.
    """
    if byte <= 0x9F:
        return (byte - 0x90 if byte >= 0x90 else 2 * (byte - 0x80)), position + 1
    width = _LENGTHS.get(byte, 0)
    start = position + 1 + width
    length = int.from_bytes(body[position + 1 : start], "big")
    if byte in _MAPS:
        return 2 * length, start
    if byte in _LISTS:
        return length, start
    return -1, start + length + (byte in _EXTENSIONS)
