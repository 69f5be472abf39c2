"""Steps of a check: said as they go, and kept for the report."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any, Final

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from tests.cluster.plan import Found, Step, Way, table

MAX_FAILURE_CHARACTERS: Final = 2_000
"""Maximum characters kept of one failure: kubectl prints a line for each object."""


@dataclass(slots=True)
class Done:
    """The result of one step. `said`: a line of its output."""

    way: Way
    name: str
    ok: bool = False
    seconds: float = 0.0
    said: str = ""


@dataclass
class Progress:
    """`planned` says how many steps there will be."""

    console: Console
    planned: int
    done: list[Done] = field(default_factory=list)

    @contextmanager
    def step(self, step: Step) -> Iterator[Done]:
        """The caller sets `said`. An error ends the step, is said, and goes on to the caller."""
        one = Done(step.way, step.name)
        self.done.append(one)
        began = time.monotonic()
        self.console.print(
            f"[{len(self.done)}/{self.planned}] {step.way}: {step.name} …", markup=False
        )
        try:
            yield one
            one.ok = True
        except Exception as error:
            one.said = f"{type(error).__name__}: {error}"[:MAX_FAILURE_CHARACTERS]
            raise
        finally:
            one.seconds = time.monotonic() - began
            self.console.print(
                f"  {'ok' if one.ok else 'FAILED'} {one.seconds:.1f} s  {one.said}", markup=False
            )


def show(found: Found, console: Console) -> None:
    """Print the table of tools, found and missing."""
    made = Table("", "found", "for", "how to get it")
    for row in table(found):
        made.add_row(row.name, escape(row.found) or "-", row.purpose, "" if row.found else row.how)
    console.print(made)


def report(found: Found, done: list[Done], left_out: list[str], status: int) -> dict[str, Any]:
    """Return the report for --json."""
    return {
        "found": asdict(found),
        "steps": [asdict(one) for one in done],
        "left_out": left_out,
        "status": status,
    }
