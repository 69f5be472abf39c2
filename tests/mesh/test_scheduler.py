"""Schedulers as real processes: they place cold models, one of them leads, and killing or freezing
it loses and duplicates nothing.

Tests share a mesh and run in any order, so each uses separate cold models.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import signal
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import shoal
from grpc_health.v1 import health_pb2, health_pb2_grpc

from libs.fleet import Fleet, LeaderRecord
from libs.queue import LaneKey, connect
from tests.parity.checkpoints import SentenceFiles, write_checkpoint
from tests.support.cluster import Cluster
from tests.support.waiting import wait_until

ENVIRONMENT = {"SHOAL_HEARTBEAT_SECONDS": "0.5", "SHOAL_PULL_WAIT_SECONDS": "2"}
EITHER = [
    f"{kind}/{number}"
    for kind in ("killed", "pair", "frozen", "alone", "warm")
    for number in range(6)
]
"""Models that both workers have on disk, a few for each test."""
OWN = {
    "worker-0": [f"first/{number}" for number in range(3)],
    "worker-1": [f"second/{number}" for number in range(3)],
}


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Run one router, two workers with enough memory, and two schedulers."""
    models = write_models(tmp_path_factory.mktemp("both"), EITHER)
    directory = tmp_path_factory.mktemp("mesh")
    with Cluster(
        directory, models=str(models), workers=2, schedulers=2, environment=ENVIRONMENT
    ) as cluster:
        yield cluster


def write_models(root: Path, names: Sequence[str]) -> Path:
    """Write the same checkpoint under each name."""
    first = write_checkpoint("bert", root / names[0], sentence=SentenceFiles())
    for name in names[1:]:
        shutil.copytree(first, root / name)
    return root


@pytest.fixture
async def cluster(mesh: Cluster) -> AsyncIterator[Cluster]:
    """Provide the mesh with both schedulers running and one of them leading."""
    await asyncio.to_thread(start_schedulers, mesh)
    await leader(mesh)
    yield mesh
    for name in mesh.schedulers:
        mesh.processes[name].send_signal(signal.SIGCONT)  # no effect on an ended process


def start_schedulers(mesh: Cluster) -> None:
    for name in mesh.schedulers:
        process = mesh.processes[name]
        if process.poll() is None:
            process.send_signal(signal.SIGCONT)
        else:
            mesh.start(name)
    for address in mesh.scheduler_addresses:
        wait_until(partial(serves, address, "readiness"), 120.0, f"{address} to serve")


def serves(address: str, service: str) -> bool:
    with grpc.insecure_channel(address) as channel:
        wanted = health_pb2.HealthCheckRequest(service=service)
        answer = health_pb2_grpc.HealthStub(channel).Check(wanted, wait_for_ready=True, timeout=60)
    return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


@asynccontextmanager
async def fleet(mesh: Cluster) -> AsyncIterator[Fleet]:
    redis = connect(mesh.redis_url)
    try:
        yield Fleet(redis)
    finally:
        await redis.aclose()


async def leader(mesh: Cluster, *, other_than: str = "") -> LeaderRecord:
    """Return the leader once one exists and has planned."""
    async with fleet(mesh) as known, asyncio.timeout(120):
        while True:
            found = (await known.refresh()).leader
            if found is not None and found.plan and found.scheduler_id != other_than:
                return found
            await asyncio.sleep(0.02)


def said(mesh: Cluster, names: Sequence[str], message: str) -> list[dict[str, Any]]:
    """Return the log lines with this message, in order by process."""
    lines = [
        line
        for name in names
        for line in (mesh.directory / f"{name}.log").read_text().splitlines()
        if message in line
    ]
    found = (json.loads(line) for line in lines if line.startswith("{"))
    return [line for line in found if line["message"] == message]


def loads(mesh: Cluster, models: Sequence[str]) -> Counter[tuple[str, str]]:
    """Count loads of each model by each worker."""
    lines = [(line, name) for name in mesh.workers for line in said(mesh, [name], "model loaded")]
    return Counter((line["model"], name) for line, name in lines if line["model"] in models)


def ordered(mesh: Cluster, models: Sequence[str]) -> list[str]:
    return [
        line["model"] for line in said(mesh, mesh.schedulers, "ordered") if line["model"] in models
    ]


def claimed(mesh: Cluster, models: Sequence[str]) -> set[str]:
    lanes = {LaneKey.parse(line["lane"]).model for line in said(mesh, mesh.routers, "lane claimed")}
    return lanes & {*models}


def names(kind: str) -> list[str]:
    return [f"{kind}/{number}" for number in range(6)]


async def ask(client: shoal.AsyncClient, models: Sequence[str]) -> None:
    """Request each model once, concurrently. All have the same weights."""
    answers = await asyncio.gather(
        *(client.encode(model, ["to be or not to be"], timeout=180) for model in models)
    )
    vectors = [answer.dense for answer in answers if answer.dense is not None]
    assert len(vectors) == len(models)
    assert np.allclose(np.concatenate(vectors), vectors[0], atol=1e-6)


def assert_loaded_once(mesh: Cluster, models: Sequence[str]) -> None:
    found = loads(mesh, models)
    assert Counter(model for model, _ in found.elements()) == dict.fromkeys(models, 1)
    assert said(mesh, mesh.workers, "model unloaded") == []


def assert_one_leader_a_number(mesh: Cluster) -> None:
    """Every plan's fencing number belongs to only one scheduler, and each scheduler's numbers
    increase.
    """
    orders = [
        (line["time"], line["plan"] >> 32, name)
        for name in mesh.schedulers
        for line in said(mesh, [name], "ordered")
    ]
    assert len({fence for _, fence, _ in orders}) == len(
        {(fence, name) for _, fence, name in orders}
    )
    terms = [
        (line["time"], line["fence"], name)
        for name in mesh.schedulers
        for line in said(mesh, [name], "leading")
    ]
    fences = [fence for _, fence, _ in sorted(terms)]
    assert fences == sorted(set(fences))
    assert {(fence, name) for _, fence, name in orders} <= {
        (fence, name) for _, fence, name in terms
    }
    for name in mesh.workers:
        plans = [line["plan"] for line in said(mesh, [name], "order") if line.get("plan")]
        assert plans == sorted(plans)


async def test_cold_models_are_loaded_where_they_are_on_disk(tmp_path: Path) -> None:
    """Routers leave a model to the leader long enough that a busy machine does not turn orders into
    claims.
    """
    each = {
        name: {"SHOAL_MODELS": str(write_models(tmp_path / name, own))} for name, own in OWN.items()
    }
    environment = {**ENVIRONMENT, "SHOAL_CLAIM_AFTER_SECONDS": "60"}
    models = [model for own in OWN.values() for model in own]
    with Cluster(
        tmp_path, models=str(tmp_path), workers=2, schedulers=1, environment=environment, each=each
    ) as cluster:
        await leader(cluster)
        async with shoal.AsyncClient(cluster.address) as client:
            await ask(client, models)
        assert_loaded_once(cluster, models)
        assert loads(cluster, models) == {
            (model, name): 1 for name, own in OWN.items() for model in own
        }
        assert sorted(ordered(cluster, models)) == models
        assert claimed(cluster, models) == set()
        async with fleet(cluster) as known, asyncio.timeout(60):
            while True:  # a plan's notes are published after its orders
                notes = await known.plan_notes(*models)
                if len(notes) == len(models):
                    break
                await asyncio.sleep(0.02)
        assert {model: note.partition(":")[0] for model, note in notes.items()} == {
            model: f"loads on {name}" for name, own in OWN.items() for model in own
        }


async def test_two_schedulers_order_as_one(cluster: Cluster) -> None:
    models = names("pair")
    async with shoal.AsyncClient(cluster.address) as client:
        await ask(client, models)
    assert_loaded_once(cluster, models)
    # A leader that has no core for its lease of 3 s is replaced, and the next one plans again.
    lines = said(cluster, cluster.schedulers, "ordered")
    orders = [(line["plan"] >> 32, line["model"]) for line in lines if line["model"] in models]
    assert len(orders) == len({*orders})
    assert_one_leader_a_number(cluster)


async def test_leader_killed_while_ordering_is_replaced(
    cluster: Cluster,
) -> None:
    models, served = names("killed"), names("warm")[:2]
    stop, answered = asyncio.Event(), 0
    async with shoal.AsyncClient(cluster.address) as client:
        await ask(client, served)

        async def traffic() -> None:
            nonlocal answered
            while not stop.is_set():
                await client.encode(served[answered % 2], ["and in between"], timeout=180)
                answered += 1

        async with asyncio.TaskGroup() as group:
            group.create_task(traffic())
            first = await leader(cluster)
            asking = group.create_task(ask(client, models[:4]))
            await asyncio.to_thread(
                wait_until,
                lambda: bool(ordered(cluster, models) or asking.done()),
                60.0,
                "an order",
            )
            cluster.kill(first.scheduler_id)
            await asking
            second = await leader(cluster, other_than=first.scheduler_id)
            assert second.fence > first.fence
            await ask(client, models[4:])
            stop.set()
    assert answered
    assert_loaded_once(cluster, models)
    assert_one_leader_a_number(cluster)


async def test_leader_frozen_past_its_lease_gives_no_more_orders(cluster: Cluster) -> None:
    models = names("frozen")
    first = await leader(cluster)
    frozen = cluster.processes[first.scheduler_id]
    earlier = len(said(cluster, [first.scheduler_id], "lead lost"))
    async with shoal.AsyncClient(cluster.address) as client:
        asking = asyncio.create_task(ask(client, models[:3]))
        frozen.send_signal(signal.SIGSTOP)
        await asking
        second = await leader(cluster, other_than=first.scheduler_id)
        frozen.send_signal(signal.SIGCONT)
        await ask(client, models[3:])
    await asyncio.to_thread(
        wait_until,
        lambda: len(said(cluster, [first.scheduler_id], "lead lost")) > earlier,
        60.0,
        "the frozen leader to notice",
    )
    assert second.fence > first.fence
    last = await leader(cluster)  # another than the second if that had no core for its lease
    assert last.scheduler_id == second.scheduler_id or last.fence > second.fence
    assert_loaded_once(cluster, models)
    assert_one_leader_a_number(cluster)


async def test_without_schedulers_workers_claim_cold_models(cluster: Cluster) -> None:
    models = names("alone")
    for name in cluster.schedulers:
        assert await asyncio.to_thread(cluster.stop, name) == 0
    async with fleet(cluster) as known:
        assert (await known.refresh()).leader is None  # released, not expired
    async with shoal.AsyncClient(cluster.address) as client:
        await ask(client, models)
    assert claimed(cluster, models) == {*models}
    assert_loaded_once(cluster, models)


def test_scheduler_answers_health_checks(mesh: Cluster) -> None:
    start_schedulers(mesh)
    for service in ("liveness", "externalscaler.ExternalScaler", ""):
        wait_until(
            partial(serves, mesh.scheduler_addresses[0], service), 120.0, f"{service!r} to serve"
        )
