"""Two routers, three workers, Redis with AOF, and SIGKILL for all of them: nothing is lost, nothing is answered twice.

The seed and the number of requests may be given: SHOAL_CHAOS_SEED, SHOAL_CHAOS_REQUESTS.
"""

from __future__ import annotations

import asyncio
import os
import random
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import shoal
from numpy.typing import NDArray
from redis.asyncio import Redis

from libs.queue import LaneGauges, Lanes, connect
from tests.support.cluster import Cluster
from tests.support.texts import texts

SEED = int(os.environ.get("SHOAL_CHAOS_SEED", "20261121"))
REQUESTS = int(os.environ.get("SHOAL_CHAOS_REQUESTS", "20000"))
CONCURRENT = 64
MODEL = "random/bert-embed"
TEXTS = texts(200, shortest=1, longest=12, seed=5)
ENVIRONMENT = {
    "SHOAL_LEASE_MS": "2000",
    "SHOAL_HEARTBEAT_SECONDS": "0.5",
    "SHOAL_PULL_WAIT_SECONDS": "2",
    "SHOAL_LOG_LEVEL": "WARNING",
    # A job is unlucky here, not poisonous: with the default of 3 an innocent one could be given up.
    "SHOAL_MAX_ATTEMPTS": "100",
}


@dataclass
class Tally:
    answers: Counter[int] = field(default_factory=Counter)
    wrong: list[int] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    kills: Counter[str] = field(default_factory=Counter)


def plan(generator: random.Random) -> list[list[int]]:
    """For each request the texts it asks for: one to four."""
    return [[generator.randrange(len(TEXTS)) for _ in range(generator.choice((1, 1, 2, 4)))] for _ in range(REQUESTS)]


async def ask(client: shoal.AsyncClient, number: int, wanted: list[int], expected: NDArray[np.number], tally: Tally) -> None:
    try:
        dense = (await client.encode(MODEL, [TEXTS[index] for index in wanted], timeout=60)).dense
    except shoal.ShoalError as error:
        tally.errors.append(f"{number}: {error}")
        return
    tally.answers[number] += 1
    if dense is None or not np.allclose(dense, expected[wanted], atol=1e-5):
        tally.wrong.append(number)


async def askers(client: shoal.AsyncClient, requests: list[list[int]], expected: NDArray[np.number], tally: Tally) -> None:
    todo = iter(enumerate(requests))

    async def one_after_another() -> None:
        for number, wanted in todo:
            await ask(client, number, wanted, expected, tally)

    async with asyncio.TaskGroup() as group:
        for _ in range(CONCURRENT):
            group.create_task(one_after_another())


async def kill_at_random(cluster: Cluster, generator: random.Random, stop: asyncio.Event, tally: Tally) -> None:
    """Every second or two a SIGKILL, and at once a new process in its place."""
    kinds = {"worker": cluster.workers, "router": cluster.routers, "redis": ["redis"]}
    while True:
        try:
            await asyncio.wait_for(stop.wait(), generator.uniform(0.8, 2.0))
            return
        except TimeoutError:
            kind = generator.choices(list(kinds), weights=(40, 30, 30))[0]
            name = generator.choice(kinds[kind])
            await asyncio.to_thread(cluster.kill, name)
            await asyncio.to_thread(cluster.start, name)
            tally.kills[kind] += 1


def is_idle(lane: LaneGauges) -> bool:
    """I4, and I3 with no payload left: every job that was ever queued ended in exactly one way."""
    ended = lane.done + lane.expired + lane.dead + lane.cancelled
    return lane.queued_jobs == lane.queued_tokens == lane.leased_tokens == 0 and lane.enqueued == ended


@asynccontextmanager
async def redis_of(cluster: Cluster) -> AsyncIterator[Redis]:
    redis = connect(cluster.redis_url)
    try:
        yield redis
    finally:
        await redis.aclose()


async def gauges(cluster: Cluster) -> list[LaneGauges]:
    async with redis_of(cluster) as redis:
        return await Lanes(redis, router_id="observer", dead_result=b"").lane_gauges()


async def parts_in_redis(cluster: Cluster) -> set[str]:
    """The last parts of all keys' names (libs/queue/keys.py)."""
    async with redis_of(cluster) as redis:
        return {str(name, "utf-8").rsplit(":", 1)[-1] for name in await redis.keys("*") if isinstance(name, bytes)}


async def test_nothing_is_lost_and_nothing_answered_twice(tmp_path: Path, checkpoints: Path) -> None:
    generator, tally, stop = random.Random(SEED), Tally(), asyncio.Event()
    requests = plan(generator)
    with Cluster(tmp_path, models=str(checkpoints), routers=2, workers=3, durable=True, environment=ENVIRONMENT) as cluster:
        async with shoal.AsyncClient(cluster.address) as client:
            first = (await client.encode(MODEL, TEXTS)).dense
            assert first is not None
            killer = asyncio.create_task(kill_at_random(cluster, generator, stop, tally))
            await askers(client, requests, first, tally)
            stop.set()
            await killer
        left = await wait_for_idle(cluster)
        parts = await parts_in_redis(cluster)
    print(f"seed {SEED}: {len(tally.answers)} of {REQUESTS} answered, kills {dict(tally.kills)}, lanes {left}")
    assert tally.errors == []
    assert tally.wrong == []
    assert len(tally.answers) == REQUESTS
    assert set(tally.answers.values()) == {1}
    assert set(tally.kills) == {"worker", "router", "redis"}
    assert left
    assert all(is_idle(lane) for lane in left)
    assert "meta" in parts
    assert parts.isdisjoint({"i", "b", "pay", "own", "att", "lease", "batch"})


async def wait_for_idle(cluster: Cluster) -> list[LaneGauges]:
    """The lanes once they are empty, or as they are after 30 s."""
    left: list[LaneGauges] = []
    for _ in range(150):
        left = await gauges(cluster)
        if left and all(is_idle(lane) for lane in left):
            break
        await asyncio.sleep(0.2)
    return left
