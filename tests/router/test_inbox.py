"""Messages from other routers: answers, generated text and wakeups, also after an outage."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any, cast

import pytest
from redis.asyncio import Redis
from shoal.v1 import worker_pb2

from libs.errors import NoCapacity
from libs.queue import LaneKey, Lanes
from services.router import inbox
from services.router.inbox import Inbox
from services.router.lanes.pending_pulls import PendingPull, PendingPulls
from tests.queue.parts import DEAD, LANE, job
from tests.router.parts import until


class FakeDispatcher:
    """Records the answers and deltas that the dispatcher would pass on to requests."""

    def __init__(self) -> None:
        self.results: list[tuple[str, bytes]] = []
        self.deltas: list[str] = []

    def deliver(self, job_id: str, result: bytes) -> None:
        self.results.append((job_id, result))

    def streamed(self, part: worker_pb2.JobDelta) -> None:
        self.deltas.append(part.job_id)


class FakeWakeups:
    """Passes notifications on to the waiting pulls."""

    def __init__(self) -> None:
        self.pending_pulls = PendingPulls()
        self.count = 0

    def wake_all(self) -> None:
        self.count += 1

    def notify(self, lane: LaneKey, *, is_new: bool = True) -> None:
        self.pending_pulls.notify(lane, is_new=is_new)


@asynccontextmanager
async def running(loop: Coroutine[None, None, None]) -> AsyncIterator[None]:
    task = asyncio.create_task(loop)
    yield
    assert not task.done()
    task.cancel()
    await asyncio.wait([task])


def make_inbox(lanes: Lanes) -> tuple[Inbox, FakeDispatcher, FakeWakeups]:
    dispatcher, wakeups = FakeDispatcher(), FakeWakeups()
    return Inbox(lanes, cast(Any, wakeups), cast(Any, dispatcher)), dispatcher, wakeups


def make_lanes(redis: Redis, router_id: str) -> Lanes:
    return Lanes(redis, router_id=router_id, dead_result=DEAD, lease_ms=60_000)


async def test_answers_given_at_another_router_are_delivered(redis: Redis) -> None:
    here, there = make_lanes(redis, "here"), make_lanes(redis, "there")
    found, dispatcher, _ = make_inbox(here)
    await here.enqueue(LANE, [[job("a", deadline_ms=2**52)]], max_tokens=-1, notify=False)
    await there.pull(LANE, worker_id="w", batch_id="1", budget_tokens=100, budget_jobs=1)
    [loop] = found.take_replies()
    async with running(loop):
        await there.complete(LANE, "w", "1", [("a", b"result")], release=True)
        await until(lambda: dispatcher.results, "the answer")
    assert dispatcher.results == [("a", b"result")]


async def test_answers_arrive_after_an_outage(
    redis: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inbox, "RECONNECT_SECONDS", 0.0)
    lanes = make_lanes(redis, "here")
    found, dispatcher, _ = make_inbox(lanes)
    failures = [NoCapacity("Redis is away"), NoCapacity("Redis is away")]

    async def take(wait_seconds: float, inbox: int) -> list[tuple[str, bytes]]:
        if failures:
            raise failures.pop()
        if not dispatcher.results:
            return [("a", b"result")]
        await asyncio.Event().wait()
        return []

    monkeypatch.setattr(lanes, "take_replies", take)
    [loop] = found.take_replies()
    async with running(loop):
        await until(lambda: dispatcher.results, "the answer")
    assert (failures, dispatcher.results) == ([], [("a", b"result")])


async def test_generated_text_is_streamed_to_its_router(redis: Redis) -> None:
    here, there = make_lanes(redis, "here"), make_lanes(redis, "there")
    found, dispatcher, _ = make_inbox(here)
    parts = worker_pb2.DeltasRequest(deltas=[worker_pb2.JobDelta(job_id="a")])
    async with running(found.receive_streamed()):
        while not dispatcher.deltas:  # parts before the subscription are lost
            await there.publish_streamed("here", parts.SerializeToString())
            await asyncio.sleep(0.01)
    assert set(dispatcher.deltas) == {"a"}


async def test_work_at_another_router_wakes_a_pull_here(redis: Redis) -> None:
    found, _, wakeups = make_inbox(make_lanes(redis, "here"))
    pull = PendingPull("w", "cpu", (LANE,), False)
    wakeups.pending_pulls.add(pull)
    async with running(found.receive_wakeups()):
        await until(lambda: wakeups.count, "the subscription")
        there = make_lanes(redis, "there")
        await there.enqueue(LANE, [[job("a", deadline_ms=2**52)]], max_tokens=-1, notify=True)
        await until(pull.event.is_set, "the wakeup")
