"""Every process of a mesh is replaced in turn, by SIGTERM and a new one, under load, without client
errors.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import shoal
from grpc_health.v1 import health_pb2, health_pb2_grpc
from numpy.typing import NDArray

from libs.queue import Lanes, connect
from services.worker.jobs.pulling.pulls import MAX_PULLS
from tests.parity.checkpoints import SentenceFiles, write_checkpoint
from tests.support.cluster import Cluster
from tests.support.texts import texts
from tests.support.waiting import wait_until

MODEL = "random/bert-embed"
TEXTS = texts(100, shortest=1, longest=12, seed=11)
ASKERS = 4
"""Askers for each of two clients."""


@dataclass
class Tally:
    answered: int = 0
    wrong: int = 0
    errors: list[str] = field(default_factory=list)


async def ask(
    client: shoal.AsyncClient,
    expected: NDArray[np.number],
    stop: asyncio.Event,
    seed: int,
    tally: Tally,
) -> None:
    generator = random.Random(seed)
    while not stop.is_set():
        wanted = [generator.randrange(len(TEXTS)) for _ in range(generator.choice((1, 2, 8)))]
        try:
            dense = (
                await client.encode(MODEL, [TEXTS[index] for index in wanted], timeout=180)
            ).dense
        except shoal.ShoalError as error:
            tally.errors.append(f"{type(error).__name__}: {error}")
        else:
            tally.answered += 1
            tally.wrong += dense is None or not np.allclose(dense, expected[wanted], atol=1e-5)


@asynccontextmanager
async def load(addresses: Sequence[str]) -> AsyncIterator[Tally]:
    """Run clients with the default policy until the context ends. Some start at each router."""
    tally, stop = Tally(), asyncio.Event()
    async with AsyncExitStack() as stack:
        orders = (addresses, addresses[::-1])
        clients = [
            await stack.enter_async_context(shoal.AsyncClient(",".join(order))) for order in orders
        ]
        expected = (await clients[0].encode(MODEL, TEXTS, timeout=180)).dense
        assert expected is not None
        askers = await stack.enter_async_context(asyncio.TaskGroup())
        for number in range(ASKERS * len(clients)):
            askers.create_task(ask(clients[number % len(clients)], expected, stop, number, tally))
        try:
            yield tally
        finally:
            stop.set()


def wait_serving(address: str) -> None:
    with grpc.insecure_channel(address) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        request = health_pb2.HealthCheckRequest()

        def serves() -> bool:
            answer = health.Check(request, wait_for_ready=True, timeout=60)
            return answer.status == health_pb2.HealthCheckResponse.SERVING

        wait_until(serves, 60, f"{address} to serve")


def known_workers(cluster: Cluster) -> set[str]:
    """Return the workers known to any router."""
    known = set()
    for address in cluster.addresses:
        with shoal.Client(address) as client:
            known |= {worker.worker_id for worker in client.mesh().workers}
    return known


def wait_replaced(cluster: Cluster, name: str) -> None:
    if name in cluster.routers:
        cluster.wait_ready(cluster.addresses[cluster.routers.index(name)])
    elif name in cluster.schedulers:
        wait_serving(cluster.scheduler_addresses[cluster.schedulers.index(name)])
    else:
        wait_until(lambda: name in known_workers(cluster), 180, name)


async def replace(cluster: Cluster, name: str, tally: Tally) -> None:
    before = tally.answered
    assert await asyncio.to_thread(cluster.stop, name) == 0, f"{name} did not end as it should"
    if name in cluster.workers:
        await asyncio.to_thread(
            wait_until, lambda: name not in known_workers(cluster), 60, "the mesh to forget it"
        )
    await asyncio.to_thread(cluster.start, name)
    await asyncio.to_thread(wait_replaced, cluster, name)
    await asyncio.to_thread(
        wait_until, lambda: tally.answered >= before + 20, 180, "the load to go on"
    )


@dataclass(frozen=True)
class SeenPull:
    """`at`: Unix seconds."""

    worker: str
    epoch: str
    at: float


def logged(cluster: Cluster, name: str, message: str) -> list[tuple[float, dict[str, Any]]]:
    """Return a process's log lines with this message, with their Unix seconds."""
    texts = (cluster.directory / f"{name}.log").read_text().splitlines()
    lines = [json.loads(text) for text in texts if text.startswith("{") and text.endswith("}")]
    return [
        (datetime.fromisoformat(line["time"]).timestamp(), line)
        for line in lines
        if line["message"] == message
    ]


def seen_pulls(cluster: Cluster) -> list[SeenPull]:
    """Return all pulls that reached a router."""
    return [
        SeenPull(line["worker"], line["epoch"], at)
        for name in cluster.routers
        for at, line in logged(cluster, name, "pull")
    ]


def epochs(pulls: Sequence[SeenPull], worker: str) -> set[str]:
    return {pull.epoch for pull in pulls if pull.worker == worker}


async def test_every_process_is_replaced_under_load_without_client_errors(
    tmp_path: Path,
) -> None:
    root = tmp_path / "models"
    write_checkpoint("bert", root / MODEL, sentence=SentenceFiles())
    logs = {name: {"SHOAL_LOG_LEVEL": "DEBUG"} for name in ("router-0", "router-1")}
    with Cluster(
        tmp_path, models=str(root), routers=2, workers=2, schedulers=2, each=logs
    ) as cluster:
        names = [*cluster.routers, *cluster.workers, *cluster.schedulers]
        async with asyncio.timeout(1200), load(cluster.addresses) as tally:
            for name in names:
                await replace(cluster, name, tally)
        redis = connect(cluster.redis_url, slots=cluster.queue_slots)
        lanes = Lanes(redis, router_id="observer", dead_result=b"", slots=cluster.queue_slots)
        await lanes.check()
        (lane,) = await lanes.lane_gauges()
        await redis.aclose()
        await asyncio.to_thread(
            wait_until,
            lambda: all(len(epochs(seen_pulls(cluster), name)) > 1 for name in cluster.workers),
            60,
            "each new worker to pull",
        )
        pulls = seen_pulls(cluster)
        stops = {
            name: logged(cluster, name, "the worker is shutting down")[0][0]
            for name in cluster.workers
        }
    print(f"{tally.answered} answered, {len(pulls)} pulls")
    assert tally.errors == []
    assert tally.wrong == 0
    assert tally.answered >= 20 * len(names)
    assert (lane.dead, lane.expired, lane.cancelled, lane.done) == (0, 0, 0, lane.enqueued)
    for name in cluster.workers:
        old = {pull.epoch for pull in pulls if pull.worker == name and pull.at < stops[name]}
        assert len(old) == 1
        assert len(epochs(pulls, name)) == 2
        # A router may log pulls late that were under way, at most MAX_PULLS of them.
        assert sum(pull.epoch in old and pull.at > stops[name] for pull in pulls) <= MAX_PULLS
