"""Convert long lists to JSON in pieces. An answer with the tokens of texts takes up to a hundred
times the bytes of the texts, so it must not exist as a whole. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Final

from services.edge.messages.base import encode_json

PIECE_BYTES: Final = 64 << 10
"""Minimum bytes of a piece, except the last one."""
ENTRIES_AT_ONCE: Final = 512
"""Number of entries that exist as Python objects at the same time. Converting them takes less than
a millisecond.
"""


def encode_list(entries: Iterable[object]) -> Iterator[bytes]:
    """Yield the parts of a JSON list. `entries` may be a generator: it is read part by part."""
    rest = iter(entries)
    begin = b"["
    while run := list(islice(rest, ENTRIES_AT_ONCE)):
        yield begin + encode_json(run)[1:-1]
        begin = b","
    yield b"[]" if begin == b"[" else b"]"


def group_pieces(parts: Iterable[bytes]) -> Iterator[bytes]:
    """Yield the same bytes in pieces of about PIECE_BYTES."""
    waiting = bytearray()
    for part in parts:
        waiting += part
        if len(waiting) >= PIECE_BYTES:
            yield bytes(waiting)
            waiting.clear()
    if waiting:
        yield bytes(waiting)


def build_body(parts: Iterable[bytes], entries: int) -> bytes | Iterator[bytes]:
    """Return the body of an answer: whole if it has at most ENTRIES_AT_ONCE entries, in pieces
    otherwise.
    """
    return b"".join(parts) if entries <= ENTRIES_AT_ONCE else group_pieces(parts)
