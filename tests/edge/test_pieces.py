"""JSON of long lists in pieces."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from services.edge.messages import pieces


@pytest.mark.parametrize(
    "count", [0, 1, pieces.ENTRIES_AT_ONCE, pieces.ENTRIES_AT_ONCE + 1, 3 * pieces.ENTRIES_AT_ONCE]
)
def test_parts_are_one_json_list(count: int) -> None:
    written = b"".join(pieces.encode_list({"id": number} for number in range(count)))
    assert json.loads(written) == [{"id": number} for number in range(count)]


def test_entries_are_made_when_their_part_is_read() -> None:
    made = 0

    def entries() -> Iterator[int]:
        nonlocal made
        while True:
            made += 1
            yield made

    parts = pieces.encode_list(entries())
    next(parts)
    assert made == pieces.ENTRIES_AT_ONCE


def test_small_parts_are_joined_until_a_piece_is_large_enough() -> None:
    parts = [b"a" * 1000] * 200
    found = list(pieces.group_pieces(parts))
    assert b"".join(found) == b"".join(parts)
    assert all(pieces.PIECE_BYTES <= len(piece) < pieces.PIECE_BYTES + 1000 for piece in found[:-1])
    assert len(found) == 4


def test_body_is_whole_up_to_the_limit_of_entries() -> None:
    assert pieces.build_body([b"[1,", b"2]"], pieces.ENTRIES_AT_ONCE) == b"[1,2]"
    body = pieces.build_body([b"[1,", b"2]"], pieces.ENTRIES_AT_ONCE + 1)
    assert not isinstance(body, bytes)
    assert list(body) == [b"[1,2]"]
