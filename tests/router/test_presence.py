"""Workers that die, that lose their connection and live, and that say goodbye: what becomes of the
leases they held.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from redis.asyncio import Redis
from shoal.v1 import worker_pb2

from libs.fleet import Fleet
from libs.queue import Idle, Lanes
from services.router.lanes import presence
from services.router.lanes.pending_pulls import PendingPulls
from services.router.lanes.presence import WorkerPresence
from services.router.lanes.wakeups import Wakeups
from services.router.state.background import Background
from services.router.state.view import RouterView
from tests.queue.parts import DEAD, LANE, ids, job
from tests.router.parts import FakeWorker, card, router, until, vector

LEASE_MS = 600_000


async def test_dead_workers_jobs_are_served_by_another_at_once(redis_url: str) -> None:
    """Its lease would last for ten minutes; the client waits for ten seconds."""
    async with router(redis_url, lease_ms=LEASE_MS) as client:
        dying = FakeWorker(client.address, "dying", models=[card()], connects=True)
        dying.hold()
        async with dying.working():
            waiting = asyncio.create_task(client.encode("text"))
            await until(lambda: dying.jobs, "the worker to pull the job")
        async with FakeWorker(client.address, "other", models=[card()]).working():
            assert (await waiting).dense.data == vector("text")


async def test_worker_that_leaves_its_stream_in_order_is_left_alone(redis_url: str) -> None:
    """A router that drains ends the streams of its workers: their leases stay."""
    async with router(redis_url, "b", lease_ms=LEASE_MS) as other:
        worker = FakeWorker(other.address, models=[card()])
        worker.hold()
        async with worker.working():
            async with router(redis_url, "a", lease_ms=LEASE_MS) as client:
                attending = FakeWorker(client.address, connects=True)
                async with attending.working():
                    waiting = asyncio.create_task(other.encode("text"))
                    await until(lambda: worker.jobs, "the worker to pull the job")
                    await client.close()
            worker.resume()
            assert (await waiting).dense.data == vector("text")
        assert len(worker.jobs) == 1


@asynccontextmanager
async def watched(
    redis: Redis, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[tuple[WorkerPresence, Fleet, Lanes, Background]]:
    """Start a presence with a short grace; a lease of `w`'s epoch `e` holds one job."""
    monkeypatch.setattr(presence, "GRACE_SECONDS", 0.2)
    monkeypatch.setattr(presence, "NEXT_SECONDS", 0.2)
    lanes = Lanes(redis, router_id="a", dead_result=DEAD, lease_ms=LEASE_MS)
    await lanes.now_ms()
    fleet, background = Fleet(redis), Background()
    await fleet.report(worker_pb2.HeartbeatRequest(worker_id="w", epoch="e", pool="cpu"))
    await lanes.enqueue(LANE, [[job("held", deadline_ms=2**52)]], max_tokens=-1, notify=False)
    await lanes.pull(LANE, worker_id="w", batch_id="e-1", budget_tokens=1, budget_jobs=1)
    wakeups = Wakeups(PendingPulls(), fleet, RouterView(fleet), background, claim_after_seconds=0.5)
    yield WorkerPresence(lanes, fleet, wakeups, background), fleet, lanes, background
    await background.finished()


async def breaks(watching: WorkerPresence, epoch: str = "e") -> None:
    """A connection that is there, and then is not."""
    stream = asyncio.create_task(watching.attend("w", epoch))
    await asyncio.sleep(0)
    stream.cancel()
    await asyncio.gather(stream, return_exceptions=True)


async def later(fleet: Fleet, since: int) -> int:
    """Redis' time once it is past what counts as the moment of the break."""
    while True:
        await fleet.refresh()
        if fleet.snapshot.now_ms > since + presence.CLOSE_MS:
            return fleet.snapshot.now_ms
        await asyncio.sleep(0.01)


async def test_worker_that_is_silent_after_its_connection_broke_loses_its_leases(
    redis: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with watched(redis, monkeypatch) as (watching, fleet, lanes, background):
        await later(fleet, lanes.clock_ms())
        await breaks(watching)
        await background.finished()
        again = await lanes.pull(LANE, worker_id="other", budget_tokens=1, budget_jobs=1)
        assert not isinstance(again, Idle)
        assert ids(again) == ["held"]
        assert [one.attempts for one in again.jobs] == [1]
        assert "w" not in fleet.snapshot.workers
        assert "w" not in (await fleet.refresh()).workers


async def test_worker_that_sends_a_heartbeat_elsewhere_keeps_its_leases(
    redis: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with watched(redis, monkeypatch) as (watching, fleet, lanes, background):
        broke_ms = lanes.clock_ms()
        await later(fleet, broke_ms)
        await fleet.report(worker_pb2.HeartbeatRequest(worker_id="w", epoch="e", pool="cpu"))
        with monkeypatch.context() as earlier:  # the grace must not end before the heartbeat
            earlier.setattr(lanes, "clock_ms", lambda: broke_ms)
            await breaks(watching)
        await background.finished()
        assert not (await lanes.renew(LANE, "w", ["e-1"]))[0].lost
        assert "w" in fleet.snapshot.workers


async def test_worker_that_connects_again_keeps_its_leases(
    redis: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with watched(redis, monkeypatch) as (watching, fleet, lanes, background):
        await later(fleet, lanes.clock_ms())
        await breaks(watching)
        again = asyncio.create_task(watching.attend("w", "e"))
        await background.finished()
        assert not (await lanes.renew(LANE, "w", ["e-1"]))[0].lost
        watching.close()
        await again


async def test_new_process_with_same_name_does_not_keep_old_leases(
    redis: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with watched(redis, monkeypatch) as (watching, fleet, lanes, background):
        await fleet.report(worker_pb2.HeartbeatRequest(worker_id="w", epoch="next", pool="cpu"))
        await breaks(watching)
        await background.finished()
        assert (await lanes.renew(LANE, "w", ["e-1"]))[0].lost
        assert fleet.snapshot.workers["w"].epoch == "next"


async def test_closing_router_declares_no_worker_dead(
    redis: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with watched(redis, monkeypatch) as (watching, fleet, lanes, background):
        await later(fleet, lanes.clock_ms())
        await breaks(watching)
        watching.close()
        await breaks(watching)
        await background.finished()
        assert not (await lanes.renew(LANE, "w", ["e-1"]))[0].lost
