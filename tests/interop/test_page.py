"""The table of docs/interop.md after runs of some clients."""

from __future__ import annotations

from datetime import UTC, datetime

from tests.interop.__main__ import PAGE, merged, rows_of, table

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
