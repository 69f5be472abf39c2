"""The findings of a run, as a table and a line, or as JSON."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from tests.chaos.faults import Fault, limit


@dataclass(frozen=True, slots=True)
class Recovery:
    """The recovery of all faults of a kind, in seconds, counted from `since`.

    `alone` counts the faults that no other one overlapped. Only these are held to the limit, and
    `median` and `longest` are theirs; `longest_of_all` is that of all.
    """

    kind: str
    count: int
    alone: int
    since: str
    median: float | None
    longest: float | None
    longest_of_all: float
    limit: float | None
    alone_seconds: Sequence[float]
    """The recoveries of the faults that no other one overlapped."""

    @property
    def is_in_time(self) -> bool:
        return self.limit is None or self.longest is None or self.longest <= self.limit


@dataclass(frozen=True, slots=True)
class Report:
    """The findings of one run. `problems`: of invariants and of faults that could not be reverted.
    Latencies are in milliseconds.

    `done_again`: jobs that were done more often than their requests were sent, as happens when an
    answer is lost with a router.
    """

    seed: int
    servers: str
    """The kind of Redis: `single`, `sentinel` or `cluster`."""
    seconds: float
    requests: int
    answered: int
    faults: int
    lost: Sequence[str]
    duplicates: int
    wrong: Sequence[str]
    cancelled: int
    late: int
    done_again: int
    p50_ms: float
    p99_ms: float
    longest_ms: float
    snapshots: int
    problems: Sequence[str]
    recoveries: Sequence[Recovery]
    log: Sequence[str] = field(repr=False)
    directory: Path | None = None
    """The folder of the processes' logs, if they were kept."""

    @property
    def is_clean(self) -> bool:
        return not (self.lost or self.duplicates or self.wrong or self.problems)

    @property
    def is_in_time(self) -> bool:
        return all(recovery.is_in_time for recovery in self.recoveries)

    def line(self) -> str:
        return (
            f"seed {self.seed}: {self.requests:,} requests in {self.seconds:.0f} s, "
            f"{self.faults} faults, {len(self.lost)} lost, "
            f"{self.duplicates} duplicate, {len(self.wrong)} wrong, {len(self.problems)} "
            f"invariants broken; {self.cancelled:,} "
            f"cancelled, {self.late:,} too late as meant, {self.done_again:,} jobs done again; "
            f"p50 {self.p50_ms:.0f} ms, p99 "
            f"{self.p99_ms:.0f} ms, longest {self.longest_ms:.0f} ms; {self.snapshots:,} snapshots"
        )

    def to_json(self) -> dict[str, object]:
        reported = asdict(self) | {
            "directory": str(self.directory or ""),
            "is_clean": self.is_clean,
            "is_in_time": self.is_in_time,
        }
        reported["recoveries"] = [
            asdict(one) | {"is_in_time": one.is_in_time} for one in self.recoveries
        ]
        return reported


def recoveries(faults: Sequence[Fault]) -> list[Recovery]:
    by_kind: dict[str, list[Fault]] = defaultdict(list)
    for fault in faults:
        by_kind[fault.planned.kind].append(fault)
    return [_recovery(kind, of_kind, faults) for kind, of_kind in sorted(by_kind.items())]


def percentile(milliseconds: Sequence[float], share: float) -> float:
    return float(np.percentile(milliseconds, share)) if milliseconds else 0.0


def show(report: Report, console: Console) -> None:
    table = Table(
        "fault",
        "count",
        "alone",
        "counted from",
        "p50 s",
        "max s",
        "max of all s",
        "limit s",
        "",
        title="recovery",
    )
    for row in report.recoveries:
        table.add_row(
            row.kind,
            str(row.count),
            str(row.alone),
            row.since,
            _number(row.median),
            _number(row.longest),
            _number(row.longest_of_all),
            _number(row.limit),
            "" if row.limit is None or row.longest is None else "ok" if row.is_in_time else "LATE",
        )
    console.print(table)
    for title, lines in (
        ("lost", report.lost),
        ("wrong", report.wrong),
        ("invariants", report.problems),
    ):
        for line in lines[:20]:
            console.print(f"{title}: {line}", style="red", markup=False, soft_wrap=True)
        if len(lines) > 20:
            console.print(f"{title}: and {len(lines) - 20} more", style="red")
    if report.directory is not None:
        console.print("faults (UTC, as in the logs):")
        for line in report.log:
            console.print(f"  {line}", markup=False, highlight=False, soft_wrap=True)
        console.print(f"the logs of all processes are in {report.directory}", soft_wrap=True)
    console.print(report.line(), style="green" if report.is_clean else "red", soft_wrap=True)


def _recovery(kind: str, of_kind: Sequence[Fault], faults: Sequence[Fault]) -> Recovery:
    alone = [
        fault.recovery()
        for fault in of_kind
        if not any(_overlap(fault, other) for other in faults if other is not fault)
    ]
    since, allowed = limit(kind)
    return Recovery(
        kind,
        len(of_kind),
        len(alone),
        since,
        float(np.median(alone)) if alone else None,
        max(alone) if alone else None,
        max(fault.recovery() for fault in of_kind),
        allowed,
        alone,
    )


def _overlap(one: Fault, other: Fault) -> bool:
    return one.began < other.until and other.began < one.over


def _number(seconds: float | None) -> str:
    return "" if seconds is None else f"{seconds:.2f}"
