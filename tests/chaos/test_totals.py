"""The sum of several runs of chaos."""

from __future__ import annotations

import json

from tests.chaos.report import Recovery, Report
from tests.chaos.totals import HEADINGS, rows


def run(servers: str, *, lost: list[str], alone: list[float], limit: float | None) -> Report:
    recovery = Recovery("kill master", 3, len(alone), "", None, None, 9.0, limit, alone)
    return Report(
        seed=1,
        servers=servers,
        seconds=60.0,
        requests=1000,
        answered=1000,
        faults=3,
        lost=lost,
        duplicates=0,
        wrong=[],
        cancelled=0,
        late=0,
        done_again=0,
        p50_ms=1.0,
        p99_ms=2.0,
        longest_ms=3.0,
        snapshots=1,
        problems=["one"],
        recoveries=[recovery],
        log=[],
    )


def test_runs_are_summed_by_kind_of_redis_and_in_all() -> None:
    runs = [
        run("cluster", lost=["a"], alone=[1.0, 2.0], limit=1.5),
        run("cluster", lost=[], alone=[], limit=None),
        run("single", lost=[], alone=[3.0], limit=None),
    ]
    found = rows([json.loads(json.dumps(one.to_json())) for one in runs])
    assert [dict(zip(HEADINGS, row, strict=True)) for row in found] == [
        _row("cluster", "2", "2.0", "2,000", "6", "1", "2", p50="1.50", last="2.00", late="1 of 2"),
        _row("single", "1", "1.0", "1,000", "3", "0", "1", p50="3.00", last="3.00", late="0 of 1"),
        _row("all", "3", "3.0", "3,000", "9", "1", "3", p50="2.00", last="3.00", late="1 of 3"),
    ]


def _row(*values: str, p50: str, last: str, late: str) -> dict[str, str]:
    redis, runs, minutes, requests, faults, lost, broken = values
    return {
        "Redis": redis,
        "runs": runs,
        "minutes": minutes,
        "requests": requests,
        "faults": faults,
        "kinds": "1",
        "lost": lost,
        "duplicate": "0",
        "wrong": "0",
        "invariants broken": broken,
        "recovery p50 s": p50,
        "p99 s": {"cluster": "1.99", "single": "3.00", "all": "2.98"}[redis],
        "max s": last,
        "above limit": late,
    }
