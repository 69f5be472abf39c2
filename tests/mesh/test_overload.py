"""More load than the mesh can serve, through two routers: admitted requests are answered, the rest
are refused with a retry delay, and memory does not grow. `make bench-overload` measures the
quality.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import psutil
import pytest

from benchmarks.stress.overload import ENVIRONMENT, MODEL, Asker, ClientTally
from tests.parity.checkpoints import SentenceFiles, write_checkpoint
from tests.support.cluster import Cluster
from tests.support.texts import texts

pytestmark = pytest.mark.alone

SECONDS = 8.0
DEADLINE = 4.0
"""Seconds, of which a busy machine may leave the worker or the client without a core for two."""
OVERLOAD = 4.0
"""Offered load as a multiple of the capacity measured just before, which depends on the machine and
its other load.
"""
WINDOWS = 6
"""Maximum number of measurements: the offered load is doubled while most of it is served, and a
machine that slows down during a window makes requests late that were admitted at its earlier speed.
"""
WORDS = (80, 100)
"""Words of a text, some 15 to 50 ms of a core: few enough requests fit that clients and routers do
not compete with the worker.
"""
GROWTH_BYTES = 200 << 20


async def test_overload_is_refused_with_retry_info_and_admitted_requests_are_answered(
    tmp_path: Path,
) -> None:
    write_checkpoint(
        "bert",
        tmp_path / "models" / MODEL,
        hidden=768,
        layers=6,
        heads=12,
        sentence=SentenceFiles(),
    )
    (tmp_path / "mesh").mkdir()
    with Cluster(
        tmp_path / "mesh", models=str(tmp_path / "models"), routers=2, environment=ENVIRONMENT
    ) as cluster:
        askers = [
            Asker(address, texts(100, *WORDS, seed=3), DEADLINE) for address in cluster.addresses
        ]
        after = ClientTally()
        await asyncio.gather(*(asker.ask(after, 180.0) for asker in askers))  # loads the model
        closed = await asyncio.gather(
            *(asker.closed_loop(2.0, 8) for asker in askers)
        )  # the router and the test measure its speed
        rate = OVERLOAD * max(len(each.in_time) for each in closed) / 2.0
        processes = [
            psutil.Process(cluster.processes[name].pid) for name in (*cluster.routers, "redis")
        ]
        before = sum(process.memory_info().rss for process in processes)
        for _ in range(WINDOWS):
            tally = ClientTally()
            for loaded in await asyncio.gather(
                *(asker.open_loop(SECONDS, rate, seed) for seed, asker in enumerate(askers))
            ):
                tally.add(loaded)
            check_endings(tally)
            if len(tally.in_time) > tally.offered / 2:
                rate *= 2  # The machine was slow while its capacity was measured.
            elif tally.in_time and tally.late < tally.offered / 4:
                break  # The mesh is overloaded, and knows its speed.
        grown = sum(process.memory_info().rss for process in processes) - before
        await asyncio.gather(*(asker.ask(after, 180.0) for asker in askers))
        await asyncio.gather(*(asker.close() for asker in askers))
    assert len(tally.in_time) > 0
    assert sum(tally.refused.values()) > tally.offered / 4
    assert tally.late < tally.offered / 4, (
        "few requests are admitted that miss their deadline, though the machine may stumble"
    )
    assert len(after.in_time) == 4
    assert grown < GROWTH_BYTES


def check_endings(tally: ClientTally) -> None:
    """Check that every request was answered, was late, or was refused with a retry delay."""
    refused = sum(tally.refused.values())
    print(
        f"{tally.offered} offered, {len(tally.in_time)} answered, {tally.late} late, "
        f"{refused} refused"
    )
    assert tally.offered == len(tally.in_time) + tally.late + refused
    assert set(tally.refused) <= {"QUEUE_FULL"}
    assert tally.with_retry_info == refused
    assert all(0.1 <= seconds <= 60 for seconds in tally.retry_seconds)
