"""More than the mesh can do, through two routers: what is let in is answered, what is not is told when to come again, and memory
stays where it was. `make bench-overload` measures how well."""

from __future__ import annotations

import asyncio
from pathlib import Path

import psutil

from benchmarks.stress.overload import ENVIRONMENT, MODEL, Asker, Tally
from tests.parity.checkpoints import SentenceFiles, write_checkpoint
from tests.support.cluster import Cluster
from tests.support.texts import texts

SECONDS = 4.0
RATE = 60.0
"""Requests a second at each router: more would take the processor from the worker."""
WORDS = (80, 100)
"""Of a text, which takes some 50 ms of a core then: six times what can be done is asked."""
GROWTH_BYTES = 200 << 20


async def test_too_much_work_is_refused_in_time_and_what_is_let_in_is_answered(tmp_path: Path) -> None:
    write_checkpoint("bert", tmp_path / "models" / MODEL, hidden=768, layers=6, heads=12, sentence=SentenceFiles())
    (tmp_path / "mesh").mkdir()
    with Cluster(tmp_path / "mesh", models=str(tmp_path / "models"), routers=2, environment=ENVIRONMENT) as cluster:
        askers = [Asker(address, texts(100, *WORDS, seed=3), 2.0) for address in cluster.addresses]
        tally, after = Tally(), Tally()
        await asyncio.gather(*(asker.closed_loop(2.0, 8) for asker in askers))  # its speed in full batches is known then
        processes = [psutil.Process(cluster.processes[name].pid) for name in (*cluster.routers, "redis")]
        before = sum(process.memory_info().rss for process in processes)
        for loaded in await asyncio.gather(*(asker.open_loop(SECONDS, RATE, seed) for seed, asker in enumerate(askers))):
            tally.add(loaded)
        grown = sum(process.memory_info().rss for process in processes) - before
        await asyncio.gather(*(asker.ask(after, 60.0) for asker in askers))
        await asyncio.gather(*(asker.close() for asker in askers))
    refused = sum(tally.refused.values())
    print(f"{tally.offered} asked, {len(tally.in_time)} answered, {tally.late} late, {refused} refused, {grown:,} bytes more")
    assert tally.offered == len(tally.in_time) + tally.late + refused, "every request has ended in one of these ways"
    assert set(tally.refused) == {"QUEUE_FULL"}
    assert tally.with_retry_info == refused > len(tally.in_time) > 0
    assert all(0.1 <= seconds <= 60 for seconds in tally.retry_seconds)
    assert tally.late < tally.offered / 4, "little is let in that cannot be answered, though the machine may stumble"
    assert len(after.in_time) == 2
    assert grown < GROWTH_BYTES
