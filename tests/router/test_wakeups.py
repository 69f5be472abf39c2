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
from shoal.v1 import mesh_pb2, worker_pb2

from libs.queue import LaneKey
from libs.queue.keys import KEYS, RedisKeys
from services.router.lanes.pending_pulls import PendingPulls
from services.router.lanes.wakeups import Wakeups
from tests.router.parts import (
    MODEL,
    Client,
    FakeWorker,
    card,
    encode_request,
    router,
    until,
    vector,
    worker_stub,
)
from tests.router.test_cancel import asking

REMIND = Wakeups.remind


@pytest.fixture(autouse=True)
def reminders(monkeypatch: pytest.MonkeyPatch) -> dict[Wakeups, None]:
    """Return the wakeups of each router that the test has started."""
    started: dict[Wakeups, None] = {}
    monkeypatch.setattr(Wakeups, "remind", lambda wakeups, *_: started.setdefault(wakeups))
    return started


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


async def test_pull_that_excludes_a_tenant_is_notified_of_jobs_added_to_those_left(
    redis_url: str, redis: Redis
) -> None:
    """Its own router notifies it of none: a pull at another router leaves jobs of that tenant, then
    another pull that excludes it does.
    """
    async with routers(redis_url, 2) as (asked, second), AsyncExitStack() as calls:

        def call(tenant: str) -> None:
            sent = asked.inference.Encode(
                encode_request(tenant), timeout=60, metadata=(("x-shoal-tenant", tenant),)
            )
            calls.callback(sent.cancel)

        async def are_queued(jobs: int) -> bool:
            return await redis.hlen(key("payload")) == jobs

        for jobs in range(1, 4):
            call("heavy")
            await until(partial(are_queued, jobs), "the backlog")
        waiting: set[asyncio.Future[worker_pb2.PullResponse]] = set()
        for worker_id in ("w1", "w2"):
            await redis.delete(key("watchers"))
            request = asking(worker_id)
            request.except_tenants.append("heavy")
            waiting.add(asyncio.ensure_future(worker_stub(second.channel).Pull(request)))
            await watched_by(redis, "router-1")
        request = asking("w3")
        request.budget_jobs = 1
        assert len((await worker_stub(asked.channel).Pull(request)).jobs) == 1
        for tenant in ("light", "lighter"):
            call(tenant)
            done, waiting = await asyncio.wait(
                waiting, timeout=30, return_when=asyncio.FIRST_COMPLETED
            )
            pulled = [job for pull in done for job in pull.result().jobs]
            assert [worker_pb2.Job.FromString(job).encode.items[0].text for job in pulled] == [
                tenant
            ]


async def test_lost_subscriptions_leave_no_pull_asleep(redis_url: str, redis: Redis) -> None:
    async with (
        routers(redis_url, 2) as (asked, second),
        FakeWorker(second.address, models=[card()]).working(),
    ):
        await watched_by(redis, "router-1")
        await redis.execute_command("CLIENT", "KILL", "TYPE", "pubsub")
        assert (await asked.encode("a text")).dense.data == vector("a text")


async def test_lost_watcher_reads_an_idle_lane_again_within_a_minute(
    redis_url: str, redis: Redis, reminders: dict[Wakeups, None]
) -> None:
    """Another router becomes the only watcher, and its pull ends."""
    async with (
        routers(redis_url, 3) as (asked, second, third),
        FakeWorker(second.address, models=[card()]).working(),
    ):
        await watched_by(redis, "router-1")
        await redis.delete(key("watchers"))
        ended = worker_stub(third.channel).Pull(asking("ended"))
        await watched_by(redis, "router-2")
        ended.cancel()
        for _ in range(60):
            REMIND([*reminders][1], (), 0)
        await watched_by(redis, "router-1")
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
    """Return once the router watches the model's lane."""

    async def is_watching() -> bool:
        return any(await redis.zmscore(key("watchers"), [router_id, f"+{router_id}"]))

    await until(is_watching, f"{router_id} to watch the lane")


def key(name: str) -> str:
    """Return this key of the model's lane."""
    return RedisKeys(1).lane_keys(LaneKey("cpu", MODEL))[KEYS.index(name)]
