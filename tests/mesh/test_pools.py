"""Two pools of real processes and a catalog: preference, explicit pools, and overflow while the
first pool is down.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import shoal

from tests.parity.checkpoints import SentenceFiles, write_checkpoint
from tests.support.cluster import Cluster
from tests.support.waiting import wait_until

FIRST, SECOND, BOTH, PLAIN = "random/first", "random/second", "random/both", "random/plain"
POOLS = """
default: cpu-a
pools:
  cpu-a: {device: cpu, cold_start_seconds: 600}
  cpu-b: {device: cpu, cold_start_seconds: 600}
"""
CARDS = f"""
model: [{FIRST}, {BOTH}]
pools: [cpu-a, cpu-b]
---
model: {SECOND}
pools: [cpu-b]
"""


@pytest.fixture(scope="module")
def pooled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Run worker-0 in cpu-a and worker-1 in cpu-b."""
    root = tmp_path_factory.mktemp("pools")
    for model in (FIRST, SECOND, BOTH, PLAIN):
        write_checkpoint("bert", root / "models" / model, sentence=SentenceFiles())
    (root / "cards").mkdir()
    (root / "cards" / "cards.yaml").write_text(CARDS)
    (root / "pools.yaml").write_text(POOLS)
    environment = {"SHOAL_POOLS": str(root / "pools.yaml"), "SHOAL_CATALOG": str(root / "cards")}
    each = {"worker-0": {"SHOAL_POOL": "cpu-a"}, "worker-1": {"SHOAL_POOL": "cpu-b"}}
    with Cluster(
        root, models=str(root / "models"), workers=2, environment=environment, each=each
    ) as cluster:
        yield cluster


def places(client: shoal.Client, model: str) -> list[str]:
    return [
        place.worker_id for place in client.models.get(model).places if place.state == "resident"
    ]


def wait_places(client: shoal.Client, model: str, *workers: str) -> None:
    """Wait until the model is on exactly these workers: reports travel apart from answers."""
    wait_until(lambda: places(client, model) == [*workers], 60, f"{model} on {workers}")


def jobs(client: shoal.Client, model: str, pool: str) -> int:
    """Return the number of jobs ever queued in the lane."""
    return sum(
        lane.enqueued_jobs
        for lane in client.mesh().lanes
        if (lane.model, lane.pool) == (model, pool)
    )


def test_model_is_loaded_in_its_first_pool_or_the_named_one(pooled: Cluster) -> None:
    with shoal.Client(pooled.address) as client:
        for model in (FIRST, SECOND, PLAIN):
            assert client.encode(model, ["text"]).dense is not None
        for model, worker in ((FIRST, "worker-0"), (SECOND, "worker-1"), (PLAIN, "worker-0")):
            wait_places(client, model, worker)
        assert client.encode(PLAIN, ["text"], pool="cpu-b").dense is not None
        wait_places(client, PLAIN, "worker-0", "worker-1")
        # A pool named in one request does not apply to the next.
        wait_until(lambda: jobs(client, PLAIN, "cpu-b") == 1, 60, "the router to count")
        client.encode(PLAIN, ["text"])
        wait_until(lambda: jobs(client, PLAIN, "cpu-a") == 2, 60, "the router to count")
        explained = client.explain(SECOND)
        assert {reason.pool: reason.eligible for reason in explained.workers} == {
            "cpu-a": False,
            "cpu-b": True,
        }
        with pytest.raises(
            shoal.ShoalError, match="pool 'v100' does not exist; pools: cpu-a, cpu-b"
        ) as caught:
            client.encode(FIRST, ["text"], pool="v100")
        assert (caught.value.reason, caught.value.field) == ("INVALID_INPUT", "pool")


def test_second_pool_takes_over_while_the_first_is_down(pooled: Cluster) -> None:
    with shoal.Client(pooled.address) as client:
        assert client.encode(BOTH, ["text"]).dense is not None
        wait_places(client, BOTH, "worker-0")
        assert pooled.stop("worker-0") == 0
        try:
            assert client.encode(BOTH, ["text"]).dense is not None
            wait_places(client, BOTH, "worker-1")
        finally:
            pooled.start("worker-0")
            pooled.wait_ready(pooled.address)
        # A request with a late deadline returns the model to the preferred pool.
        assert client.encode(BOTH, ["text"]).dense is not None
        wait_places(client, BOTH, "worker-0", "worker-1")
