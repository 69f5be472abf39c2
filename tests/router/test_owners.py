"""A worker id belongs to the credential of its heartbeats, at every router."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from contextlib import AsyncExitStack
from pathlib import Path

import grpc
import pytest
from redis.asyncio import Redis
from shoal.v1 import worker_pb2

from libs.serving import Security
from libs.versions import WIRE_VERSION
from services.router import app
from services.router.settings import Settings
from tests.router.parts import MODEL, FakeWorker, card, router, until, vector, worker_stub
from tests.serving.parts import Caller, connected
from tests.support.redis import RedisServer

OK, DENIED = grpc.StatusCode.OK, grpc.StatusCode.PERMISSION_DENIED
HEARTBEAT = "/shoal.v1.WorkerService/Heartbeat"
POOL_A, POOL_B = "token-of-pool-a-0123", "token-of-pool-b-0123"


def beat(
    worker_id: str, *, leaving: bool = False, subject: str = ""
) -> worker_pb2.HeartbeatRequest:
    return worker_pb2.HeartbeatRequest(
        wire_version=WIRE_VERSION,
        worker_id=worker_id,
        epoch="e",
        pool="cpu",
        leaving=leaving,
        subject=subject,
    )


def pull(worker_id: str) -> worker_pb2.PullRequest:
    return worker_pb2.PullRequest(
        wire_version=WIRE_VERSION,
        worker_id=worker_id,
        epoch="e",
        pool="cpu",
        budget_tokens=1,
        budget_jobs=1,
        batch_id="e-1",
    )


def complete(worker_id: str) -> worker_pb2.CompleteRequest:
    return worker_pb2.CompleteRequest(
        worker_id=worker_id, lane=worker_pb2.Lane(pool="cpu", model="o/m"), batch_id="e-1"
    )


@pytest.fixture
async def tokens(tmp_path: Path) -> Path:
    path = tmp_path / "tokens.yaml"
    path.write_text(
        f"tokens:\n- {{token: {POOL_A}, subject: pool-a, role: worker}}\n- {{token: {POOL_B}, "
        f"subject: pool-b, role: worker}}\n"
    )
    return path


async def code_of(call: Awaitable[object]) -> grpc.StatusCode:
    try:
        await call
    except grpc.aio.AioRpcError as error:
        return error.code()
    return OK


async def codes(caller: Caller, worker_id: str) -> set[grpc.StatusCode]:
    """Return the statuses of all kinds of calls under an id."""
    stub = worker_stub(caller.channel, tuple(caller.metadata))
    return {
        await caller.code(HEARTBEAT, beat(worker_id)),
        await code_of(stub.Pull(pull(worker_id))),
        await code_of(stub.Complete(complete(worker_id))),
    }


async def test_other_workers_batches_cannot_be_answered_or_released(
    redis_url: str,
) -> None:
    async with (
        router(redis_url) as client,
        FakeWorker(client.address, models=[card()]).working() as worker,
    ):
        await client.sees("w1")
        worker.hold()
        call = asyncio.ensure_future(client.encode("a text"))
        await until(lambda: worker.jobs)
        async with grpc.aio.insecure_channel(client.address) as channel:
            stub = worker_stub(channel)
            lane, batch_id = worker_pb2.Lane(pool="cpu", model=MODEL), worker.batches[0]
            forged = worker_pb2.JobResult(
                failure=worker_pb2.Failure(reason="INTERNAL", message="forged")
            ).SerializeToString()
            answer = worker_pb2.CompletedJob(job_id=worker.jobs[0].job_id, result=forged)
            for jobs in ([answer], []):
                stolen = worker_pb2.CompleteRequest(
                    worker_id="w2", lane=lane, batch_id=batch_id, jobs=jobs, release=True
                )
                assert (await stub.Complete(stolen)).accepted == 0
            held = beat("w2")
            held.batches.add(lane=lane, batch_id=batch_id)
            assert [one.lost for one in (await stub.Heartbeat(held)).cancelled] == [True]
            again = worker_pb2.PullRequest(
                wire_version=WIRE_VERSION,
                worker_id="w2",
                pool="cpu",
                budget_tokens=9,
                budget_jobs=9,
                lanes=[lane],
                batch_id=batch_id,
                asked_again=True,
            )
            assert not (await stub.Pull(again)).jobs
        worker.resume()
        assert (await call).dense.data == vector("a text")
        assert len(worker.jobs) == 1, "nobody took it back"


async def test_worker_id_belongs_to_one_credential_at_every_router(
    tokens: Path, server: RedisServer, redis: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(app, "TTL_MS", 600_000)  # a worker has its name while the test runs
    async with AsyncExitStack() as stack:
        callers: dict[tuple[str, str], Caller] = {}
        for router_id in ("a", "b"):
            settings = Settings(
                router_id,
                "127.0.0.1:0",
                security=Security(tokens=tokens),
                redis_url=server.url,
                lease_ms=600_000,
                grace_seconds=1.0,
            )
            address = await stack.enter_async_context(app.running(settings))
            for token in (POOL_A, POOL_B):
                callers[router_id, token] = await stack.enter_async_context(
                    connected(address, token=token)
                )
        mine, others, elsewhere = callers["a", POOL_A], callers["a", POOL_B], callers["b", POOL_B]
        assert await mine.code(HEARTBEAT, beat("w1")) == OK
        assert await codes(others, "w1") == {DENIED}

        # Another router knows it when it has looked at the registry; it must not take the name over
        # before.
        async def knows() -> bool:
            stub = worker_stub(elsewhere.channel, tuple(elsewhere.metadata))
            return await code_of(stub.Pull(pull("w1"))) == DENIED

        await until(knows)
        assert await codes(elsewhere, "w1") == {DENIED}
        assert await others.code(HEARTBEAT, beat("w1", leaving=True)) == DENIED
        # A worker with the same credential belongs to the pool; the subject that it reports is
        # ignored.
        assert await codes(callers["b", POOL_A], "w1") == {OK}
        assert await others.code(HEARTBEAT, beat("w2", subject="pool-a")) == OK
        assert await codes(mine, "w2") == {DENIED}
        assert await codes(others, "w2") == {OK}
        # A name is free once its heartbeats have ended.
        assert await mine.code(HEARTBEAT, beat("w1", leaving=True)) == OK
        assert await codes(others, "w1") == {OK}
