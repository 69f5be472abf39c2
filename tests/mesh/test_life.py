"""The lifecycle of workers and models: loading on demand, eviction by order, SIGTERM under load."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import shoal

from services.local.settings import MINILM
from tests.support.cluster import Cluster
from tests.support.texts import texts
from tests.support.waiting import wait_until

TEXTS = texts(60, shortest=1, longest=12, seed=11)


async def test_sigterm_of_a_worker_under_load_loses_nothing(tmp_path: Path, models: str) -> None:
    """Half of the workers are stopped while 400 requests run. They exit with status 0, and every
    request is answered.
    """
    with Cluster(tmp_path, models=models, workers=2) as cluster:
        async with shoal.AsyncClient(cluster.address, timeout=180) as client:
            await client.encode(MINILM, TEXTS)
            calls = [
                asyncio.create_task(client.encode(MINILM, TEXTS[index % 60]))
                for index in range(400)
            ]
            await asyncio.wait(calls, return_when=asyncio.FIRST_COMPLETED)
            status = await asyncio.to_thread(cluster.stop, "worker-0")
            answers = await asyncio.gather(*calls)
    assert status == 0
    assert all(answer.dense is not None and answer.dense.shape == (1, 384) for answer in answers)


def test_model_is_loaded_pinned_and_evicted_by_order(client: shoal.Client) -> None:
    name = "random/distilbert-embed"
    assert client.models.load(name).state == "resident"
    assert client.models.pin(name).places[0].pinned
    assert not client.models.pin(name, pinned=False).places[0].pinned
    assert client.models.evict(name)
    wait_until(lambda: client.models.get(name).state == "cold", 60, "the model to be unloaded")
    dense = client.encode(name, ["it is loaded again on request"]).dense
    assert dense is not None
    wait_until(lambda: client.models.get(name).state == "resident", 60, "its report")


def test_broken_checkpoint_is_refused_with_its_reason_and_others_continue(
    tmp_path: Path, models: str, checkpoints: Path
) -> None:
    broken = tmp_path / "broken"
    broken.mkdir()
    for file in (checkpoints / "random" / "bert-embed").iterdir():
        if file.is_file():
            (broken / file.name).write_bytes(
                file.read_bytes()[:200] if file.suffix == ".safetensors" else file.read_bytes()
            )
    with (
        Cluster(tmp_path, models=f"my/broken={broken}:{models}") as cluster,
        shoal.Client(cluster.address) as client,
    ):
        with pytest.raises(shoal.ShoalError) as caught:
            client.encode("my/broken", ["text"])
        assert caught.value.reason == "MODEL_LOAD_FAILED"
        assert "model.safetensors" in str(caught.value)
        assert client.encode(MINILM, ["text"]).dense is not None
        wait_until(lambda: client.models.get("my/broken").state == "failed", 60, "its report")


def test_client_disconnect_cancels_its_jobs(mesh: Cluster) -> None:
    """A cancelled request leaves no jobs in its lane."""

    async def leave() -> None:
        async with shoal.AsyncClient(mesh.address) as client:
            call = asyncio.create_task(client.encode(MINILM, TEXTS * 40))
            await asyncio.sleep(0.05)
            call.cancel()
            await asyncio.gather(call, return_exceptions=True)

    asyncio.run(leave())
    with shoal.Client(mesh.address) as client:
        wait_until(
            lambda: all(lane.queued_tokens == 0 for lane in client.mesh().lanes),
            60,
            "the lane to be empty",
        )


async def test_jobs_of_a_killed_worker_are_answered_before_its_leases_expire(
    tmp_path: Path, models: str
) -> None:
    """Leases last for ten minutes here, and no request waits longer than three."""
    with Cluster(
        tmp_path, models=models, workers=2, environment={"SHOAL_LEASE_MS": "600000"}
    ) as cluster:
        async with shoal.AsyncClient(cluster.address, timeout=180) as client:
            await asyncio.gather(*(client.encode(MINILM, TEXTS) for _ in range(8)))
            calls = [
                asyncio.create_task(client.encode(MINILM, TEXTS[index % 60]))
                for index in range(400)
            ]
            await asyncio.wait(calls, return_when=asyncio.FIRST_COMPLETED)
            await asyncio.to_thread(cluster.kill, "worker-0")
            answers = await asyncio.gather(*calls)
    assert all(answer.dense is not None and answer.dense.shape == (1, 384) for answer in answers)
