"""Numbers in answers: quantisation, and JSON in pieces."""

from __future__ import annotations

import base64
import json

import numpy as np
import pytest

from services.edge.messages import numbers


def test_int8_scales_each_row_to_its_largest_number() -> None:
    rows = np.array([[1.0, -2.0, 0.5], [0.0, 0.0, 0.0]], np.float32)
    assert numbers.quantised(rows, "int8").tolist() == [[64, -127, 32], [0, 0, 0]]


def test_binary_is_the_packed_signs_as_signed_bytes() -> None:
    rows = np.array([[1, -1, 1, 0, 0, 0, 0, 1, 1]], np.float32)
    bits = numbers.quantised(rows, "ubinary")
    assert bits.tolist() == [[0b10100001, 0b10000000]]
    assert numbers.quantised(rows, "binary").tolist() == [[0b10100001 - 128, 0]]


def test_signed_bytes_cover_the_whole_range() -> None:
    rows = np.array([[0, 127, 128, 255]], np.uint8)
    assert numbers.signed(rows).tolist() == [[-128, -1, 0, 127]]


@pytest.mark.parametrize("width", [0, 1, 1024, 10 * numbers.PIECE_NUMBERS])
def test_piece_has_at_least_one_row_and_bounded_numbers(width: int) -> None:
    rows = numbers.rows_per_piece(width)
    assert rows == 1 or rows * width <= numbers.PIECE_NUMBERS
    assert rows >= 1


@pytest.mark.parametrize("is_base64", [False, True])
def test_long_list_is_written_in_pieces_with_the_same_numbers(*, is_base64: bool) -> None:
    width = numbers.PIECE_NUMBERS // 2
    rows = np.arange(5 * width, dtype=np.float32).reshape(5, width)
    pieces = list(numbers.listed(rows, is_base64=is_base64))
    found = json.loads(b"".join(pieces))
    if is_base64:
        found = [np.frombuffer(base64.b64decode(row), "<f4") for row in found]
    assert np.array_equal(found, rows)
    assert len(pieces) == 5  # The brackets, and two, two and one rows.


def test_short_list_is_one_piece() -> None:
    assert list(numbers.listed(np.zeros((2, 1), np.float32))) == [b"[[0.0],[0.0]]"]
