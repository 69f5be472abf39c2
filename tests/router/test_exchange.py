"""Pulls and answers of one worker on one stream: what its calls alone would give, whatever order
they end in.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from shoal.v1 import worker_pb2

from libs.serving import Security
from libs.versions import WIRE_VERSION
from services.router import app
from services.router.lanes import exchange
from services.router.settings import Settings
from tests.router.parts import answer, router, vector, worker_stub
from tests.router.test_cancel import asking
from tests.support.redis import RedisServer


class Stream:
    """A worker's side of one stream."""

    def __init__(
        self, channel: grpc.aio.Channel, metadata: tuple[tuple[str, str], ...] = ()
    ) -> None:
        self._call: Any = worker_stub(channel).Exchange(metadata=metadata)

    async def send(self, *calls: worker_pb2.WorkerCall) -> None:
        await self._call.write(worker_pb2.ExchangeRequest(calls=calls))

    async def answers(self, count: int) -> dict[int, worker_pb2.CallAnswer]:
        """The next answers, by number."""
        found: dict[int, worker_pb2.CallAnswer] = {}
        async with asyncio.timeout(60):
            while len(found) < count:
                response = await self._call.read()
                assert response is not grpc.aio.EOF, "the stream ended"
                found |= {one.number: one for one in response.answers}
        return found

    async def end(self) -> grpc.StatusCode:
        async with asyncio.timeout(60):
            try:
                while await self._call.read() is not grpc.aio.EOF:
                    pass
            except grpc.aio.AioRpcError as error:
                code: grpc.StatusCode = error.code()
                return code
            return await self._call.code()

    async def close(self) -> None:
        await self._call.done_writing()

    def cut(self) -> None:
        self._call.cancel()


@asynccontextmanager
async def streaming(redis_url: str) -> AsyncIterator[tuple[Any, Stream]]:
    # An abandoned batch is given back by the router, not by the end of its lease.
    async with router(redis_url, lease_ms=600_000) as client:
        yield client, Stream(client.channel)


def pull(number: int, **more: Any) -> worker_pb2.WorkerCall:
    return worker_pb2.WorkerCall(number=number, pull=asking(**more))


def completing(number: int, pulled: worker_pb2.PullResponse) -> worker_pb2.WorkerCall:
    jobs = [worker_pb2.Job.FromString(payload) for payload in pulled.jobs]
    done = [
        worker_pb2.CompletedJob(job_id=job.job_id, result=answer(job).SerializeToString())
        for job in jobs
    ]
    request = worker_pb2.CompleteRequest(
        worker_id="w1", lane=pulled.lane, batch_id=pulled.batch_id, jobs=done, release=True
    )
    return worker_pb2.WorkerCall(number=number, complete=request)


async def test_jobs_and_their_answers_go_over_one_stream(redis_url: str) -> None:
    async with streaming(redis_url) as (client, stream):
        call = asyncio.create_task(client.encode("a text", timeout=120))
        await stream.send(pull(1), pull(7, worker_id="w1", wait_seconds=0.0))
        found = await stream.answers(2)
        pulled = next(one.pull for one in found.values() if one.pull.batch_id)
        assert sorted(len(one.pull.jobs) for one in found.values()) == [0, 1], (
            "one job, in one of the answers"
        )
        await stream.send(completing(8, pulled))
        assert (await stream.answers(1))[8].complete.accepted == 1
        assert (await call).dense.data == vector("a text")
        await stream.close()
        assert await stream.end() is grpc.StatusCode.OK


async def test_answer_does_not_wait_for_the_calls_before_it(redis_url: str) -> None:
    async with streaming(redis_url) as (_, stream):
        await stream.send(pull(1))
        await stream.send(pull(2, wait_seconds=0.0))
        assert list(await stream.answers(1)) == [2]
        stream.cut()


async def test_stream_that_the_worker_closes_ends_when_its_calls_are_answered(
    redis_url: str,
) -> None:
    async with streaming(redis_url) as (_, stream):
        await stream.send(pull(1, wait_seconds=0.5))
        await stream.close()
        assert list(await stream.answers(1)) == [1]
        assert await stream.end() is grpc.StatusCode.OK


@pytest.mark.parametrize("how", ["cancelled", "cut"])
async def test_batch_of_abandoned_pull_goes_to_another_worker(redis_url: str, how: str) -> None:
    async with streaming(redis_url) as (client, stream):
        await stream.send(pull(1))
        await stream.send(pull(2, wait_seconds=0.0))
        await stream.answers(1)  # the first is there by now
        if how == "cut":
            stream.cut()
        else:
            await stream.send(worker_pb2.WorkerCall(number=1, cancelled=True))
        call = asyncio.create_task(client.encode("a text", timeout=120))
        taken = await worker_stub(client.channel).Pull(asking("w2"))
        assert len(taken.jobs) == 1
        call.cancel()


async def test_call_that_is_cancelled_before_it_begins_leaves_nothing(redis_url: str) -> None:
    async with streaming(redis_url) as (_, stream):
        await stream.send(
            pull(1), worker_pb2.WorkerCall(number=1, cancelled=True), pull(2, wait_seconds=0.0)
        )
        assert list(await stream.answers(1)) == [2]
        await stream.send(pull(1, wait_seconds=0.0))
        assert (await stream.answers(1))[1].WhichOneof("outcome") == "pull"
        await stream.close()
        assert await stream.end() is grpc.StatusCode.OK


async def test_invalid_call_is_refused_and_others_continue(redis_url: str) -> None:
    async with streaming(redis_url) as (_, stream):
        wrong = pull(1)
        wrong.pull.budget_jobs = 0
        old = pull(2)
        old.pull.worker_id = ""
        await stream.send(wrong, old, worker_pb2.WorkerCall(number=3), pull(4, wait_seconds=0.0))
        found = await stream.answers(4)
        assert [found[number].refusal.code for number in (1, 2, 3)] == [
            grpc.StatusCode.INVALID_ARGUMENT.value[0]
        ] * 3
        assert "budget_jobs" in found[1].refusal.message
        assert found[4].WhichOneof("outcome") == "pull"
        await stream.send(pull(5), pull(5))
        refused = (await stream.answers(1))[5].refusal
        assert "number" in refused.message
        stream.cut()


async def test_invalid_message_ends_stream(redis_url: str) -> None:
    async with streaming(redis_url) as (_, stream):
        await stream.send(worker_pb2.WorkerCall(number=1, traceparent="x" * 257, pull=asking()))
        assert await stream.end() is grpc.StatusCode.INVALID_ARGUMENT


async def test_stream_ends_at_its_age(redis_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange, "EXCHANGE_SECONDS", 0.2)
    async with streaming(redis_url) as (_, stream):
        await stream.send(pull(1))
        assert await stream.end() is grpc.StatusCode.OK


@pytest.mark.usefixtures("redis")
async def test_worker_id_of_another_credential_ends_the_stream(
    server: RedisServer, tmp_path: Path
) -> None:
    tokens = tmp_path / "tokens.yaml"
    tokens.write_text(
        "".join(
            [
                "tokens:\n",
                *(f"- {{token: {name * 20}, subject: {name}, role: worker}}\n" for name in "ab"),
            ]
        )
    )
    settings = Settings(
        "r",
        "127.0.0.1:0",
        security=Security(tokens=tokens),
        redis_url=server.url,
        grace_seconds=1.0,
    )
    async with app.running(settings) as address, grpc.aio.insecure_channel(address) as channel:
        mine, other = ((("authorization", f"Bearer {name * 20}"),) for name in "ab")
        beat = worker_pb2.HeartbeatRequest(
            wire_version=WIRE_VERSION, worker_id="w1", epoch="e", pool="cpu"
        )
        await worker_stub(channel).Heartbeat(beat, metadata=mine)
        stream = Stream(channel, other)
        await stream.send(pull(1))
        assert await stream.end() is grpc.StatusCode.PERMISSION_DENIED
