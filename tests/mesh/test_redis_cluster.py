"""A mesh on a Redis Cluster, with real processes: a master is killed under load, and its replica
takes over.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import shoal

from libs.queue.connection.acl import ROUTER, SCHEDULER
from libs.queue.keys import slot_number
from tests.mesh.test_rolling import MODEL, load
from tests.parity.checkpoints import SentenceFiles, write_checkpoint
from tests.support.cluster import Cluster
from tests.support.redis_cluster import RedisCluster
from tests.support.waiting import wait_until

SLOTS = 16
OTHER_MASTERS = "redis has other masters"


def tag_of(model: str) -> str:
    return f"{{{slot_number(model, SLOTS)}}}"


async def encode_once(address: str, model: str) -> None:
    """Send a request without retries."""
    async with shoal.AsyncClient(address, retry=shoal.RetryPolicy(attempts=1)) as client:
        await client.encode(model, ["text"], timeout=180)


async def test_killed_master_of_a_cluster_loses_no_request(tmp_path: Path) -> None:
    """The master that holds the lane is killed with requests in flight. Every request is answered
    once and correctly, whatever the replica had not received yet. A model on another master is
    served without a failover.
    """
    with RedisCluster() as redis:
        own = redis.master_port(tag_of(MODEL))
        names = (f"random/other-{number}" for number in range(100))
        other = next(name for name in names if redis.master_port(tag_of(name)) != own)
        for model in (MODEL, other):
            write_checkpoint("bert", tmp_path / "models" / model, sentence=SentenceFiles())
        cluster = Cluster(
            tmp_path,
            models=str(tmp_path / "models"),
            routers=2,
            workers=2,
            schedulers=1,
            environment={
                "SHOAL_QUEUE_SLOTS": str(SLOTS),
                "SHOAL_REDIS_URL": redis.url_as(ROUTER),
            },
            each={"scheduler-0": {"SHOAL_REDIS_URL": redis.url_as(SCHEDULER)}},
        )
        processes = (*cluster.routers, *cluster.workers, *cluster.schedulers)

        def said(words: str) -> int:
            logs = ((tmp_path / f"{name}.log").read_text() for name in processes)
            return sum(log.count(words) for log in logs)

        with cluster:
            async with load(cluster.addresses) as tally:

                async def more(answers: int, what: str) -> None:
                    wanted = tally.answered + answers
                    await asyncio.to_thread(wait_until, lambda: tally.answered >= wanted, 180, what)

                await encode_once(cluster.address, other)  # so that a worker loads it
                await more(50, "answers")
                with redis.without_failover():
                    # A busy machine may have made another node of this shard the master by now.
                    before = redis.master_port(tag_of(MODEL))
                    redis.kill(before)
                    for address in cluster.addresses:
                        await encode_once(address, other)
                await more(50, "answers after the failover")
                assert redis.master_port(tag_of(MODEL)) != before
                await asyncio.to_thread(redis.restore)
                await more(50, "answers after the old master returned")
            with shoal.Client(cluster.address) as client:
                wait_until(
                    lambda: all(not lane.queued_tokens for lane in client.mesh().lanes),
                    60,
                    "the lanes to be empty",
                )
            wait_until(lambda: said(OTHER_MASTERS) >= 3, 60, "all to know the new master")
            assert [name for name in processes if cluster.processes[name].poll() is not None] == []
        # A scheduler tries to load scripts that a new master lacks; a router then loads them.
        expected = {("shoal-scheduler", "script")}
        assert {(one["username"], one["object"]) for one in redis.refusals()} <= expected
    assert tally.wrong == 0
    assert tally.errors == []
    assert said("Traceback") == 0
