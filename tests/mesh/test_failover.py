"""A mesh on Redis behind Sentinels, with real processes: the master is killed under load and
returns as a replica.
"""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path

import numpy as np
import shoal

from libs.queue.keys import WAKEUP_CHANNEL
from tests.mesh.test_rolling import MODEL, load
from tests.parity.checkpoints import SentenceFiles, write_checkpoint
from tests.support.cluster import Cluster
from tests.support.sentinels import FakeSentinel, SentinelSet, TcpServer
from tests.support.waiting import wait_until


def listeners(sentinels: SentinelSet, port: int) -> int:
    """Return the number of processes subscribed to wakeups at a server."""
    with sentinels.client(port) as client:
        return int(client.pubsub_numsub(WAKEUP_CHANNEL)[0][1])


async def ask_once(address: str) -> str:
    """Send a request without retries. Return the class and reason of its error, if any."""
    async with shoal.AsyncClient(address, retry=shoal.RetryPolicy(attempts=1)) as client:
        try:
            await client.encode(MODEL, ["text"], timeout=60)
        except shoal.ShoalError as error:
            return f"{type(error).__name__} {error.reason}"
    return "answered"


async def test_killed_master_returns_as_a_replica_without_lost_requests(tmp_path: Path) -> None:
    """Every request is answered once and correctly. Requests in flight are queued again if the new
    master lacks them; requests during the failover are refused with NO_CAPACITY, which clients
    retry.
    """
    write_checkpoint("bert", tmp_path / "models" / MODEL, sentence=SentenceFiles())
    with SentinelSet(password="s3cret") as sentinels:
        cluster = Cluster(
            tmp_path,
            models=str(tmp_path / "models"),
            routers=2,
            workers=2,
            schedulers=1,
            environment={"SHOAL_REDIS_URL": sentinels.url},
        )
        processes = (*cluster.routers, *cluster.workers, *cluster.schedulers)
        with cluster:
            async with load(cluster.addresses) as tally:

                async def more(answers: int, what: str) -> None:
                    wanted = tally.answered + answers
                    await asyncio.to_thread(wait_until, lambda: tally.answered >= wanted, 180, what)

                await more(50, "answers")
                before = sentinels.master()
                sentinels.kill(before)
                meanwhile = await asyncio.gather(
                    *(ask_once(address) for address in cluster.addresses * 2)
                )
                await asyncio.to_thread(sentinels.wait_for_another, before)
                sentinels.start(
                    before, "--replica-priority", "0"
                )  # Sentinels may choose again on a busy machine, but not this one
                await more(50, "answers after the failover")
                await asyncio.to_thread(
                    wait_until,
                    lambda: sentinels.role(before) == "slave",
                    120,
                    "the old master to follow",
                )
                await more(50, "answers after the old master returned")
            assert sentinels.master() != before
            await asyncio.to_thread(
                wait_until,
                lambda: listeners(sentinels, sentinels.master()) == 3,
                120,
                "everybody to listen at the new master",
            )
            assert listeners(sentinels, before) == 0
            with shoal.Client(cluster.address) as client:
                wait_until(
                    lambda: all(not lane.queued_tokens for lane in client.mesh().lanes),
                    120,
                    "the lanes to be empty",
                )
            assert [name for name in processes if cluster.processes[name].poll() is not None] == []
    assert tally.wrong == 0
    assert tally.errors == []
    print("meanwhile:", meanwhile, "answered:", tally.answered)
    assert set(meanwhile) <= {"NoCapacity NO_CAPACITY", "answered"}
    logs = "".join((tmp_path / f"{name}.log").read_text() for name in processes)
    assert logs.count("redis has another master") >= 3
    assert "Traceback" not in logs
    assert "s3cret" not in logs


async def test_request_survives_a_failover_that_lost_everything(tmp_path: Path) -> None:
    """The new master has none of the old one's data: the waiting request's router queues it again,
    and it is answered.
    """
    write_checkpoint("bert", tmp_path / "models" / MODEL, sentence=SentenceFiles())
    log = tmp_path / "router-0.log"
    old, new = TcpServer(), TcpServer()
    with old, new, FakeSentinel(old.address) as sentinel:
        cluster = Cluster(
            tmp_path,
            models=str(tmp_path / "models"),
            environment={"SHOAL_REDIS_URL": sentinel.url()},
        )
        with cluster:
            async with shoal.AsyncClient(
                cluster.address, retry=shoal.RetryPolicy(attempts=1)
            ) as client:
                expected = (await client.encode(MODEL, ["text"], timeout=300)).dense
                cluster.signal(cluster.workers, signal.SIGSTOP)
                call = asyncio.create_task(client.encode(MODEL, ["text"], timeout=300))
                with old.client() as admin:
                    await asyncio.to_thread(
                        wait_until, lambda: bool(admin.keys("*:pay")), 60, "the job to be there"
                    )
                sentinel.master = new.address
                old.kill()
                await asyncio.to_thread(
                    wait_until,
                    lambda: "jobs queued again" in log.read_text(),
                    120,
                    "the job to be queued again",
                )
                cluster.resume(cluster.workers)
                dense = (await call).dense
    assert expected is not None
    assert dense is not None
    np.testing.assert_allclose(dense, expected, atol=1e-6)
