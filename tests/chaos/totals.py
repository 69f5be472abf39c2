"""`python -m tests.chaos.totals FILE`: the sum of the runs that `--record FILE` has collected, for
each kind of Redis and in all.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from tests.chaos.report import percentile

ALL = "all"


@dataclass
class Totals:
    """The sum of several runs."""

    runs: int = 0
    seconds: float = 0.0
    requests: int = 0
    faults: int = 0
    kinds: set[str] = field(default_factory=set)
    lost: int = 0
    duplicates: int = 0
    wrong: int = 0
    problems: int = 0
    late: int = 0
    """Faults that no other one overlapped and that took longer to recover than their kind may."""
    recoveries: list[float] = field(default_factory=list)
    """Seconds of all recoveries from faults without an overlapping one."""

    def add(self, run: Mapping[str, Any]) -> None:
        """Add a run, given as the JSON of its report."""
        self.runs += 1
        self.seconds += run["seconds"]
        self.requests += run["requests"]
        self.faults += run["faults"]
        self.lost += len(run["lost"])
        self.duplicates += run["duplicates"]
        self.wrong += len(run["wrong"])
        self.problems += len(run["problems"])
        for one in run["recoveries"]:
            self.kinds.add(one["kind"])
            self.recoveries += one["alone_seconds"]
            limit = one["limit"]
            self.late += sum(limit is not None and taken > limit for taken in one["alone_seconds"])

    def row(self, name: str) -> list[str]:
        return [
            name,
            f"{self.runs:,}",
            f"{self.seconds / 60:.1f}",
            f"{self.requests:,}",
            f"{self.faults:,}",
            f"{len(self.kinds)}",
            f"{self.lost:,}",
            f"{self.duplicates:,}",
            f"{self.wrong:,}",
            f"{self.problems:,}",
            f"{percentile(self.recoveries, 50):.2f}",
            f"{percentile(self.recoveries, 99):.2f}",
            f"{max(self.recoveries, default=0.0):.2f}",
            f"{self.late} of {len(self.recoveries)}",
        ]


HEADINGS = (
    "Redis",
    "runs",
    "minutes",
    "requests",
    "faults",
    "kinds",
    "lost",
    "duplicate",
    "wrong",
    "invariants broken",
    "recovery p50 s",
    "p99 s",
    "max s",
    "above limit",
)


def sum_runs(runs: Iterable[Mapping[str, Any]]) -> dict[str, Totals]:
    """Return the totals of each kind of Redis and of all runs."""
    totals: dict[str, Totals] = {}
    every = Totals()
    for run in runs:
        totals.setdefault(run["servers"], Totals()).add(run)
        every.add(run)
    return totals | {ALL: every}


def rows(runs: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    return [totals.row(name) for name, totals in sum_runs(runs).items()]


def main(file: Annotated[Path, typer.Argument(help="JSON lines, one of each run")]) -> None:
    """Print the sum of recorded runs as a table."""
    runs = [json.loads(line) for line in file.read_text("utf-8").splitlines()]
    table = Table(*HEADINGS)
    for row in rows(runs):
        table.add_row(*row)
    Console(width=None if Console().is_terminal else 200).print(table)


if __name__ == "__main__":
    typer.run(main)
