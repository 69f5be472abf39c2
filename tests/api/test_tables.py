"""Tables of the command line in terminals of any width."""

from __future__ import annotations

import io

import pytest
from shoal.cli.console import SafeConsole, fitted, table

MODEL = "sentence-transformers/all-MiniLM-L6-v2"
PROSE = "loads on worker-1, because its only copy needs 10.3 s for the waiting work"


def lines(width: int, **changes: str) -> list[str]:
    """Return the lines of a table with a long name and a long text."""
    made = table("models", "model", "state", "dimensions", "queued tokens", "on", right=("size",))
    row = {"model": MODEL, "state": "resident", "dimensions": "384", "queued": "0", "on": PROSE}
    made.add_row(*(row | changes).values())
    made.add_row("org/small", "cold", "", "7", "")
    out = io.StringIO()
    console = SafeConsole(file=out, width=width, markup=False)
    console.print(fitted(made, console))
    return out.getvalue().splitlines()


@pytest.mark.parametrize("width", [200, 140, 110, 100])
def test_names_are_whole_in_columns_and_texts_wrap_at_spaces(width: int) -> None:
    found = lines(width)
    assert max(map(len, found)) <= width
    assert sum(MODEL in line for line in found) == 1
    assert found[1].startswith("┏")
    words = " ".join(line.rpartition("│")[0].rpartition("│")[2].strip() for line in found[4:-1])
    assert words.strip() == PROSE


@pytest.mark.parametrize("width", [80, 60])
def test_rows_become_blocks_where_columns_do_not_fit(width: int) -> None:
    found = lines(width)
    assert max(map(len, found)) <= width
    assert found[0].strip() == "models"
    assert found[1].split() == ["model", MODEL]
    assert found[3].split() == ["dimensions", "384"]
    assert ["queued", "tokens", "7"] in [line.split() for line in found]
    second = found[found.index(next(line for line in found if "org/small" in line)) :]
    assert len(second) == 3, "cells without a value have no line"


def test_names_that_a_terminal_has_no_room_for_continue_on_the_next_line() -> None:
    found = lines(40)
    assert max(map(len, found)) <= 40
    assert "".join(line[15:].strip() for line in found[1:3]) == MODEL


def test_word_longer_than_any_column_is_divided() -> None:
    found = lines(130, on="a" * 300)
    assert max(map(len, found)) <= 130
    assert found[1].startswith("┏")
    assert sum(line.count("a") for line in found) >= 300
