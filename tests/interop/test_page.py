"""The table of docs/interop.md after runs of some clients, and the rows that are errors."""

from __future__ import annotations

import math
from datetime import UTC, datetime
from typing import Any

import pytest

from tests.interop.__main__ import MAX_DIFFERENCE, PAGE, judged, merged, rows_of, table

BEFORE = """# A page

<!-- interop -->
| client | call | largest difference to `shoal.Client` | seen |
| --- | --- | --- | --- |
| one 1.0, other 2.0 | embed | 0 | 2020-01-01 |
| one 1.0, other 2.0 | errors | as expected | 2020-01-01 |
| third 3.0 | embed | 1.0e-09 | 2020-01-02 |
<!-- /interop -->

The end.
"""


def test_only_clients_that_ran_get_new_rows_and_dates() -> None:
    found = [{"call": "embed", "difference": 2e-9, "error": ""}]
    after = merged(BEFORE, table([("one 1.1, other 2.0", found)]))
    assert after.splitlines()[3:-3] == [
        "| client | call | largest difference to `shoal.Client` | seen |",
        "| --- | --- | --- | --- |",
        f"| one 1.1, other 2.0 | embed | 2.0e-09 | {datetime.now(UTC):%Y-%m-%d} |",
        "| third 3.0 | embed | 1.0e-09 | 2020-01-02 |",
    ]
    assert (after.splitlines()[:3], after.splitlines()[-3:]) == (
        BEFORE.splitlines()[:3],
        BEFORE.splitlines()[-3:],
    )


def test_errors_are_shown_in_one_cell() -> None:
    found = [{"call": "embed", "difference": None, "error": "Error: a | b\nc"}]
    (row,) = rows_of(table([("one 1.0", found)]))
    assert [cell.strip() for cell in row.split("|")[1:4]] == ["one 1.0", "embed", "Error: a / b c"]


def test_each_row_of_the_page_has_a_date() -> None:
    page = PAGE.read_text()
    rows = rows_of(page.split("<!-- interop -->\n")[1].split("\n<!-- /interop -->")[0])
    assert rows
    for row in rows:
        datetime.strptime(row.split("|")[4].strip(), "%Y-%m-%d").replace(tzinfo=UTC)


@pytest.mark.parametrize("difference", [None, 0.0, MAX_DIFFERENCE])
def test_small_differences_pass(difference: float | None) -> None:
    assert judged(row("embed", difference), refusals=0) == row("embed", difference)


@pytest.mark.parametrize("difference", [2 * MAX_DIFFERENCE, 1.0, math.nan, math.inf, -math.inf])
def test_large_difference_is_an_error(difference: float) -> None:
    assert judged(row("embed", difference), refusals=0)["error"].startswith("differs by")


def test_rate_limited_call_without_a_refusal_is_an_error() -> None:
    limited = row("embed (rate limited)", 0.0)
    assert judged(limited, refusals=0)["error"] == "no call was rate limited"
    assert judged(limited, refusals=1) == limited


def row(call: str, difference: float | None) -> dict[str, Any]:
    return {"call": call, "difference": difference, "error": ""}
