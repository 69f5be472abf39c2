"""A short run of the chaos driver (tests/chaos, docs/chaos.md): under faults, no job is lost,
answered twice or answered wrongly.

SHOAL_CHAOS_SEED selects other faults and requests.
"""

from __future__ import annotations

import os
from pathlib import Path

from tests.chaos import models
from tests.chaos.driver import Settings, run

SEED = int(os.environ.get("SHOAL_CHAOS_SEED", "20261121"))
SETTINGS = Settings(
    SEED,
    seconds=20.0,
    per_minute=51.0,
    requests=3000,
    at_once=24,
    patient_seconds=180.0,
    overdue=20.0,
)
"""Includes every core kind of fault.

Clients keep the mesh overloaded, and bulk work is guaranteed a tenth of a lane: on two slow cores
that other tests share, 64 requests in flight wait longer for it than 60 s. The deadline only bounds
the wait of a lost request. Such a machine may also leave Redis, a router and a worker without a
core for seconds each, one after the other, before the jobs of an expired lease are taken back.
"""


async def test_no_job_is_lost_or_answered_twice(tmp_path: Path) -> None:
    models.write(tmp_path)
    report = await run(SETTINGS, tmp_path)
    print(report.line(), *report.log, f"logs: {report.directory}", sep="\n")
    assert report.lost == []
    assert report.duplicates == 0
    assert report.wrong == []
    assert report.problems == []
    assert report.requests >= 3000
    assert report.requests == report.answered + report.cancelled + report.late
    assert report.faults >= 15
    assert len(report.recoveries) >= 12
    assert {"kill worker", "kill router", "kill redis"} <= {
        recovery.kind for recovery in report.recoveries
    }
