"""Notifications between routers: each waiting pull that could serve a request is woken, although
only routers that found its lane empty are notified.

Reminders are switched off, so a pull that misses its notification waits until the test fails.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial

import pytest
from redis.asyncio import Redis
from shoal.v1 import mesh_pb2

from libs.queue import LaneKey
from libs.queue.keys import KEYS, RedisKeys
from services.router.lanes.pending_pulls import PendingPulls
from services.router.lanes.wakeups import Wakeups
from tests.router.parts import MODEL, Client, FakeWorker, card, router, until, vector, worker_stub
from tests.router.test_cancel import asking


@pytest.fixture(autouse=True)
def _no_reminders(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Wakeups, "remind", lambda *_: None)


@asynccontextmanager
async def routers(redis_url: str, count: int) -> AsyncIterator[list[Client]]:
    async with AsyncExitStack() as stack:
        yield [
            await stack.enter_async_context(router(redis_url, f"router-{number}"))
            for number in range(count)
        ]


async def test_racing_requests_are_served_by_workers_at_other_routers(redis_url: str) -> None:
    """Each worker pulls from one router, and one router has none."""
    async with (
        routers(redis_url, 3) as (alone, second, third),
        FakeWorker(second.address, "w2", models=[card()]).working(),
        FakeWorker(third.address, "w3", models=[card()]).working(),
    ):
        await alone.sees("w2", "w3")

        async def call(client: Client, count: int) -> None:
            for number in range(count):
                assert (await client.encode(f"text {number}")).dense.data == vector(
                    f"text {number}"
                )

        await asyncio.gather(call(alone, 40), call(alone, 40), call(second, 20), call(third, 20))


async def test_request_does_not_wait_for_a_pull_that_was_cancelled(
    redis_url: str, redis: Redis, pending_pulls: list[PendingPulls]
) -> None:
    """The router of that pull is notified; the next pull there or elsewhere serves the request."""
    async with routers(redis_url, 3) as (asked, second, third):
        for number, taker in enumerate((second, third)):
            cancelled = worker_stub(second.channel).Pull(asking(f"gone-{number}"))
            await watched_by(redis, "router-1")
            cancelled.cancel()
            await until(lambda: not len(pending_pulls[1]))
            call = asyncio.create_task(asked.encode(f"text {number}"))
            pulled = await worker_stub(taker.channel).Pull(asking(f"w{number}"))
            assert len(pulled.jobs) == 1
            call.cancel()
            await asyncio.gather(call, return_exceptions=True)


async def test_lost_subscriptions_leave_no_pull_asleep(redis_url: str, redis: Redis) -> None:
    async with (
        routers(redis_url, 2) as (asked, second),
        FakeWorker(second.address, models=[card()]).working(),
    ):
        await watched_by(redis, "router-1")
        await redis.execute_command("CLIENT", "KILL", "TYPE", "pubsub")
        assert (await asked.encode("a text")).dense.data == vector("a text")


async def test_lane_of_a_lost_copy_is_offered_to_workers_of_all_routers(
    redis_url: str, redis: Redis
) -> None:
    """The only router that found the lane empty has no worker that could load the model."""
    async with routers(redis_url, 3) as (asked, second, third):
        async with FakeWorker(second.address, "gone", models=[card()]).working() as gone:
            await watched_by(redis, "router-1")
            await asked.sees("gone")
            await asked.encode("first")
            await gone.hold_beats()
            await gone.beat(leaving=True)
        async with FakeWorker(third.address, "able", on_disk=[card()], can_load=True).working():
            await until(partial(workers_are, asked, {"able"}))
            assert (await asked.encode("second")).dense.data == vector("second")


async def workers_are(client: Client, expected: set[str]) -> bool:
    mesh = (await client.mesh.GetMesh(mesh_pb2.GetMeshRequest())).mesh
    return {worker.worker_id for worker in mesh.workers} == expected


async def watched_by(redis: Redis, router_id: str) -> None:
    """Return once the router counts the model's lane as empty."""
    watchers = RedisKeys(1).lane_keys(LaneKey("cpu", MODEL))[KEYS.index("watchers")]

    async def is_watching() -> bool:
        return await redis.zscore(watchers, router_id) is not None

    await until(is_watching, f"{router_id} to watch the lane")
