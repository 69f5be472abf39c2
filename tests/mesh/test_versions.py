"""Old and new processes in one mesh: the middle of a rolling upgrade, and refused combinations.

The old processes are from an earlier commit, which stands in for the previous release, taken from
the clone's history: as long as nothing is released, one with today's wire and layout
(`libs/versions.py`). SHOAL_NO_HISTORY=1 declares that no history exists (a source archive, a
shallow clone).
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import tarfile
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
import shoal
from redis.asyncio import Redis

from libs.queue import Lanes, connect
from libs.queue.keys import LAYOUT
from tests.parity.checkpoints import SentenceFiles, write_checkpoint
from tests.support.cluster import Cluster
from tests.support.redis import RedisServer
from tests.support.texts import texts

ROOT = Path(__file__).parents[2]
OLD = "e1ca530fbcfacc5fdf9f31d08f3a32403a8351ef"
MODEL = "random/bert-embed"
TEXTS = texts(60, shortest=1, longest=12, seed=12)
REQUESTS = 300
CANCELLED = 60


def old_tree(directory: Path) -> Path:
    """Check out the old commit."""
    if os.environ.get("SHOAL_NO_HISTORY") == "1":
        pytest.skip("SHOAL_NO_HISTORY=1: this clone has no history")
    archive = subprocess.run(
        ["git", "archive", OLD, "libs", "services"], cwd=ROOT, capture_output=True
    )
    if archive.returncode != 0:
        reported = archive.stderr.decode().strip()
        pytest.fail(
            f"commit {OLD[:7]} is not in this clone ({reported}): fetch its history, or set "
            "SHOAL_NO_HISTORY=1 if it has none"
        )
    with tarfile.open(fileobj=BytesIO(archive.stdout)) as tar:
        tar.extractall(directory, filter="data")
    return directory


def running_from(tree: Path) -> dict[str, str]:
    """Return variables with which `python -m` uses a service from this tree instead of the current
    directory.
    """
    return {"PYTHONPATH": f"{tree}:{tree / 'libs/api'}", "PYTHONSAFEPATH": "1"}


async def ask(client: shoal.AsyncClient, wanted: list[int]) -> np.ndarray:
    dense = (await client.encode(MODEL, [TEXTS[index] for index in wanted], timeout=180)).dense
    assert dense is not None
    return np.asarray(dense)


async def ask_all(clients: list[shoal.AsyncClient], expected: np.ndarray) -> None:
    """Send requests to each router alternately, concurrently. Some are cancelled."""
    free = asyncio.Semaphore(16)

    async def one(number: int) -> None:
        wanted = [(7 * number + step) % len(TEXTS) for step in range(1 + number % 5)]
        async with free:
            task = asyncio.create_task(ask(clients[number % len(clients)], wanted))
            if number % (REQUESTS // CANCELLED) == 0:
                await asyncio.sleep(0.002 * (number % 7))
                task.cancel()
                await asyncio.wait([task])
                return
            assert np.allclose(await task, expected[wanted], atol=1e-5), f"request {number}"

    async with asyncio.TaskGroup() as group:
        for number in range(REQUESTS):
            group.create_task(one(number))


async def ends_idle(lanes: Lanes) -> bool:
    """Return whether within 120 s no jobs remain, and each has ended in one way without error."""
    for _ in range(1200):
        (lane,) = await lanes.lane_gauges()
        if (
            lane.queued_tokens == lane.leased_tokens == lane.dead == lane.expired == 0
            and lane.enqueued == lane.done + lane.cancelled
        ):
            return True
        await asyncio.sleep(0.1)
    return False


async def test_old_workers_and_routers_work_next_to_new_ones(tmp_path: Path) -> None:
    old, root = running_from(old_tree(tmp_path / "old")), tmp_path / "models"
    write_checkpoint("bert", root / MODEL, sentence=SentenceFiles())
    each: dict[str, dict[str, str]] = {"router-1": {**old}, "worker-1": {**old}}
    cluster = Cluster(tmp_path, models=str(root), routers=2, workers=2, each=each)
    # Each worker only connects to the router of the other version, and both routers use one Redis.
    cluster.each["worker-0"] = {"SHOAL_ROUTERS": cluster.addresses[1]}
    cluster.each["worker-1"] = {**old, "SHOAL_ROUTERS": cluster.addresses[0]}
    with cluster:
        clients = [shoal.AsyncClient(address) for address in cluster.addresses]
        expected = await ask(clients[0], list(range(len(TEXTS))))
        assert np.allclose(await ask(clients[1], list(range(len(TEXTS)))), expected, atol=1e-5)
        await ask_all(clients, expected)
        redis = connect(cluster.redis_url, slots=cluster.queue_slots)
        lanes = Lanes(redis, router_id="observer", dead_result=b"", slots=cluster.queue_slots)
        await lanes.check()
        assert await ends_idle(lanes)
        # Each worker must serve while the other is down, and must shut down cleanly with calls in
        # flight.
        for name, other in (("worker-0", "worker-1"), ("worker-1", "worker-0")):
            waiting = [
                asyncio.create_task(ask(client, [1, 2, 3])) for client in clients for _ in range(8)
            ]
            assert await asyncio.to_thread(cluster.stop, name) == 0
            for task in waiting:
                assert np.allclose(await task, expected[[1, 2, 3]], atol=1e-5)
            assert cluster.processes[other].poll() is None
            await asyncio.to_thread(cluster.start, name)
        await redis.aclose()
        for client in clients:
            await client.close()
        assert [cluster.stop(name) for name in cluster.routers] == [0, 0]


@pytest.mark.parametrize("service", ["router", "scheduler"])
async def test_unknown_redis_layout_is_refused(
    service: str, server: RedisServer, redis: Redis
) -> None:
    await redis.set(LAYOUT, "99")
    addresses = dict.fromkeys(("SHOAL_ADDRESS", "SHOAL_SCHEDULER_ADDRESS"), "127.0.0.1:0")
    environment = os.environ | {"SHOAL_REDIS_URL": server.url} | addresses
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        f"services.{service}",
        cwd=ROOT,
        env=environment,
        stderr=asyncio.subprocess.PIPE,
    )
    _, said = await asyncio.wait_for(process.communicate(), 180)
    await redis.flushall()  # other tests of this process share the server
    assert process.returncode == 2
    last = said.decode().splitlines()[-1]
    assert "layout 99" in last
    assert "run the version that wrote it" in last
