"""Cancellation as far as the worker, drains of workers and routers, and versions that differ."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable
from contextlib import AsyncExitStack
from functools import partial

import grpc
import pytest
from shoal.v1 import worker_pb2

from libs.fleet.versions import OLDEST_WIRE_VERSION, WIRE_VERSION, check_worker
from libs.serving import server
from services.router.lanes import pull
from services.router.lanes.pending_pulls import PendingPulls
from tests.router.parts import (
    MODEL,
    Client,
    FakeWorker,
    card,
    encode_answer,
    refused,
    router,
    until,
    vector,
    worker_stub,
)


def asking(
    worker_id: str = "w1", *, wait_seconds: float = 120.0, wire_version: int = WIRE_VERSION
) -> worker_pb2.PullRequest:
    return worker_pb2.PullRequest(
        worker_id=worker_id, epoch="e", pool="cpu",
        lanes=[worker_pb2.Lane(pool="cpu", model=MODEL)],
        budget_tokens=1000, budget_jobs=10, wait_seconds=wait_seconds, wire_version=wire_version,
    )  # fmt: skip


def beating(
    worker_id: str = "w1", *, draining: bool = False, wire_version: int = WIRE_VERSION
) -> worker_pb2.HeartbeatRequest:
    return worker_pb2.HeartbeatRequest(
        worker_id=worker_id, epoch="e", pool="cpu", draining=draining, wire_version=wire_version
    )


@pytest.mark.parametrize("routers", [1, 2])
async def test_cancellation_reaches_worker_before_its_next_heartbeat(
    redis_url: str, routers: int
) -> None:
    """The worker is notified even if its pull waits at another router than the client's."""
    async with AsyncExitStack() as stack:
        clients = [
            await stack.enter_async_context(router(redis_url, router_id=f"r{number}"))
            for number in range(routers)
        ]
        worker = await stack.enter_async_context(
            FakeWorker(clients[-1].address, models=[card()]).working()
        )
        await worker.hold_beats()
        worker.hold()
        leaving = asyncio.create_task(clients[0].encode("leaves", timeout=120))
        await until(lambda: worker.jobs, "the worker to hold the job")
        asking_again = asyncio.ensure_future(worker_stub(clients[-1].channel).Pull(asking()))
        await asyncio.sleep(0.1)
        leaving.cancel()
        assert (await asking_again).heartbeat_now
        await worker.beat()
        assert worker.cancelled == {worker.jobs[0].job_id}
        worker.resume()


async def test_dead_workers_jobs_are_recovered_while_others_wait(redis_url: str) -> None:
    """I6: nothing else wakes them, no heartbeat and no new work."""
    async with router(redis_url, lease_ms=1000) as client:
        stub = worker_stub(client.channel)
        asking_again = asyncio.create_task(client.encode("kept", timeout=120))
        leased = await stub.Pull(asking("dead"))
        began = time.monotonic()
        taken = await stub.Pull(asking("alive"))
        seconds = time.monotonic() - began
        assert seconds < 60, "the lease of 1 s has expired for long"
        assert list(taken.jobs) == list(leased.jobs)
        assert taken.batch_id != leased.batch_id
        asking_again.cancel()


async def test_batch_of_dead_router_is_given_again_by_another(
    redis_url: str,
) -> None:
    """The batch is given at once, not after the lease has expired."""
    async with router(redis_url, router_id="r1", lease_ms=600_000) as client:
        waiting = asyncio.create_task(client.encode("kept", timeout=120))
        named = asking()
        named.batch_id = "e-1"
        async with router(redis_url, router_id="r2", lease_ms=600_000) as dies:
            lost = await worker_stub(dies.channel).Pull(named)
        assert lost.batch_id == "e-1"
        stub = worker_stub(client.channel)
        unasked = asking(wait_seconds=0.0)
        unasked.batch_id = "e-2"
        assert not (await stub.Pull(unasked)).batch_id
        named.asked_again = True
        found = await stub.Pull(named)
        assert (found.batch_id, found.lane, list(found.jobs)) == ("e-1", lost.lane, list(lost.jobs))
        answer = worker_pb2.JobResult(
            encode=encode_answer(worker_pb2.Job.FromString(found.jobs[0]).encode)
        )
        job_id = worker_pb2.Job.FromString(found.jobs[0]).job_id
        done = worker_pb2.CompletedJob(job_id=job_id, result=answer.SerializeToString())
        await stub.Complete(
            worker_pb2.CompleteRequest(
                worker_id="w1", lane=found.lane, batch_id="e-1", jobs=[done], release=True
            )
        )
        assert (await waiting).dense.data == vector("kept")
        named.wait_seconds = 0.0
        assert not (await stub.Pull(named)).batch_id, "it is over"


async def test_pull_response_has_redis_time(redis_url: str) -> None:
    async with router(redis_url) as client:
        answer = await worker_stub(client.channel).Pull(asking(wait_seconds=0.0))
        assert abs(answer.now_unix_ms / 1000 - time.time()) < 60


async def test_waiting_pull_of_a_worker_that_drains_ends_at_once(
    redis_url: str, pending_pulls: list[PendingPulls]
) -> None:
    async with router(redis_url) as client:
        stub = worker_stub(client.channel)
        waiting = [asyncio.ensure_future(stub.Pull(asking())) for _ in range(2)]
        other = asyncio.ensure_future(stub.Pull(asking("w2")))
        await until(lambda: len(pending_pulls[0]) == 3, "the pulls to wait")
        await stub.Heartbeat(beating(draining=True))
        async with asyncio.timeout(60):
            assert [answer.batch_id for answer in await asyncio.gather(*waiting)] == ["", ""]
        assert not other.done()
        leaving = asyncio.create_task(client.encode("for the other", timeout=120))
        async with asyncio.timeout(60):
            assert len((await other).jobs) == 1
        leaving.cancel()


async def test_router_at_the_end_of_its_grace_sends_clients_to_another_one(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The time in which the last answers are sent; it ends as soon as they are.
    monkeypatch.setattr(server, "_HANG_UP_SECONDS", 60.0)
    async with router(redis_url, router_id="r1") as staying:
        async with router(redis_url, router_id="r2", grace_seconds=0.2) as going:
            client = Client(going.address)  # `going` is closed before its router ends
            waiting = asyncio.create_task(
                refused(client.encode("in flight", request_id="same", timeout=120))
            )

            async def is_queued() -> bool:
                return (await staying.lane()).queued_jobs == 1

            await until(is_queued, "the job")
        refusal = await waiting
        await client.close()
        assert (refusal.code, refusal.reason) == (grpc.StatusCode.UNAVAILABLE, "DRAINING")
        assert refusal.retry_seconds > 0
        assert (await staying.lane()).cancelled_jobs == 0
        # Its job is where it was: who asks again waits for that, and not for a second one.
        async with FakeWorker(staying.address, models=[card()]).working():
            answer = await staying.encode("in flight", request_id="same", timeout=120)
            assert answer.dense.data == vector("in flight")
            lane = await staying.lane()
            assert lane.enqueued_jobs == 1


async def test_long_polls_end_when_a_router_drains_though_calls_are_in_flight(
    redis_url: str, pending_pulls: list[PendingPulls]
) -> None:
    async with AsyncExitStack() as stack:
        address = (await stack.enter_async_context(router(redis_url, grace_seconds=120.0))).address
        client = Client(address)
        calling = asyncio.create_task(client.encode("in flight", timeout=120))

        async def is_queued() -> bool:
            return (await client.lane()).queued_jobs == 1

        await until(is_queued, "the job")
        stub = worker_stub(client.channel)
        pulled = worker_pb2.PullRequest.FromString(asking().SerializeToString())
        del pulled.lanes[:]
        waiting = asyncio.ensure_future(stub.Pull(pulled))
        await until(lambda: len(pending_pulls[0]) == 1, "the pull to wait")
        leaving = asyncio.create_task(stack.aclose())
        async with asyncio.timeout(60):
            assert not (await waiting).batch_id
        assert not calling.done()
        # It still hands out what its calls in flight need.
        batch = await stub.Pull(asking())
        jobs = [worker_pb2.Job.FromString(data) for data in batch.jobs]
        assert [job.encode.items[0].text for job in jobs] == ["in flight"]
        failure = worker_pb2.JobResult(
            failure=worker_pb2.Failure(reason="INVALID_INPUT", message="as good as any")
        )
        done = [
            worker_pb2.CompletedJob(job_id=job.job_id, result=failure.SerializeToString())
            for job in jobs
        ]
        await stub.Complete(
            worker_pb2.CompleteRequest(
                worker_id="w1", lane=batch.lane, batch_id=batch.batch_id, jobs=done, release=True
            )
        )
        assert (await refused(calling)).message == "as good as any"
        await leaving
        await client.close()


async def test_outdated_workers_are_refused_with_upgrade_advice(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pull, "check_worker", partial(check_worker, oldest=WIRE_VERSION + 3))
    async with router(redis_url) as client:
        stub = worker_stub(client.channel)
        calls: tuple[Awaitable[object], ...] = (stub.Pull(asking()), stub.Heartbeat(beating()))
        for call in calls:
            refusal = await refused(call)
            assert (refusal.code, refusal.reason) == (
                grpc.StatusCode.FAILED_PRECONDITION,
                "OUTDATED",
            )
            wanted = (
                f"wire version {WIRE_VERSION}",
                f"needs {WIRE_VERSION + 3} or newer",
                "upgrade the worker",
                "w1",
            )
            assert all(words in refusal.message for words in wanted)


@pytest.mark.parametrize("wire_version", [OLDEST_WIRE_VERSION, WIRE_VERSION, WIRE_VERSION + 1000])
async def test_workers_of_other_versions_work(redis_url: str, wire_version: int) -> None:
    async with router(redis_url) as client:
        stub = worker_stub(client.channel)
        reported = await stub.Heartbeat(beating(wire_version=wire_version))
        assert reported.wire_version == WIRE_VERSION
        await stub.Pull(asking(wait_seconds=0.0, wire_version=wire_version))
