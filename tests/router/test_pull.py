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
from shoal.v1.multiplex_pb2 import MultiplexedAnswer, MultiplexedCall

from libs.serving import Security
from libs.versions import WIRE_VERSION
from services.router import app
from services.router.settings import Settings
from tests.router.parts import Stream, answer, changed, router, vector, worker_stub
from tests.router.test_cancel import asking
from tests.support.redis import RedisServer


@asynccontextmanager
async def streaming(redis_url: str) -> AsyncIterator[tuple[Any, Stream]]:
    # An abandoned batch is given back by the router, not by the end of its lease.
    async with router(redis_url, lease_ms=600_000) as client:
        yield client, Stream(worker_stub(client.channel))


def pull(number: int, **more: Any) -> MultiplexedCall:
    return MultiplexedCall(number=number, pull=asking(**more).SerializeToString())


def pulled_by(answer: MultiplexedAnswer) -> worker_pb2.PullResponse:
    assert answer.WhichOneof("outcome") == "response"
    return worker_pb2.PullResponse.FromString(answer.response)


def completing(number: int, pulled: worker_pb2.PullResponse) -> MultiplexedCall:
    jobs = [worker_pb2.Job.FromString(payload) for payload in pulled.jobs]
    done = [
        worker_pb2.CompletedJob(job_id=job.job_id, result=answer(job).SerializeToString())
        for job in jobs
    ]
    request = worker_pb2.CompleteRequest(
        worker_id="w1", lane=pulled.lane, batch_id=pulled.batch_id, jobs=done, release=True
    )
    return MultiplexedCall(number=number, complete=request.SerializeToString())


async def test_jobs_and_their_answers_go_over_one_stream(redis_url: str) -> None:
    async with streaming(redis_url) as (client, stream):
        call = asyncio.create_task(client.encode("a text", timeout=120))
        await stream.send(pull(1), pull(7, worker_id="w1", wait_seconds=0.0))
        found = [pulled_by(one) for one in (await stream.answers(2)).values()]
        pulled = next(one for one in found if one.batch_id)
        assert sorted(len(one.jobs) for one in found) == [0, 1], "one job, in one of the answers"
        await stream.send(completing(8, pulled))
        completed = (await stream.answers(1))[8].response
        assert worker_pb2.CompleteResponse.FromString(completed).accepted == 1
        assert (await call).dense.data == vector("a text")
        await stream.close()
        assert await stream.end() is grpc.StatusCode.OK


async def test_worker_learns_what_passes_through_redis(redis_url: str) -> None:
    async with streaming(redis_url) as (_, stream):
        part = worker_pb2.JobDelta(job_id="j", router="elsewhere", batch_id="1", chunks=b"1" * 1000)
        for number, parts in ((1, [part, part]), (2, [])):
            request = worker_pb2.DeltasRequest(worker_id="w1", deltas=parts)
            await stream.send(MultiplexedCall(number=number, deltas=request.SerializeToString()))
            replied = (await stream.answers(1))[number]
            assert replied.WhichOneof("outcome") == "response", replied
            found = worker_pb2.DeltasResponse.FromString(replied.response)
            assert found.forwarded_bytes == sum(len(one.SerializeToString()) + 3 for one in parts)
        stream.cut()


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
            await stream.send(MultiplexedCall(number=1, cancelled=True))
        call = asyncio.create_task(client.encode("a text", timeout=120))
        taken = await worker_stub(client.channel).Pull(asking("w2"))
        assert len(taken.jobs) == 1
        call.cancel()


async def test_call_that_is_cancelled_before_it_begins_leaves_nothing(redis_url: str) -> None:
    async with streaming(redis_url) as (_, stream):
        await stream.send(
            pull(1), MultiplexedCall(number=1, cancelled=True), pull(2, wait_seconds=0.0)
        )
        assert list(await stream.answers(1)) == [2]
        await stream.send(pull(1, wait_seconds=0.0))
        pulled_by((await stream.answers(1))[1])
        await stream.close()
        assert await stream.end() is grpc.StatusCode.OK


async def test_invalid_call_is_refused_and_others_continue(redis_url: str) -> None:
    async with streaming(redis_url) as (_, stream):
        wrong = {
            "budget_jobs": changed(asking(), budget_jobs=0).SerializeToString(),
            "worker_id": asking("").SerializeToString(),
            "PullRequest": b"\xff",
        }
        calls = [
            MultiplexedCall(number=number, pull=body) for number, body in enumerate(wrong.values())
        ]
        await stream.send(*calls, MultiplexedCall(number=3, encode=b""), pull(4, wait_seconds=0.0))
        found = await stream.answers(5)
        for number, words in enumerate((*wrong, "kind")):
            assert found[number].failure.code == grpc.StatusCode.INVALID_ARGUMENT.value[0]
            assert words in found[number].failure.message
        pulled_by(found[4])
        stream.cut()


@pytest.mark.usefixtures("redis")
async def test_worker_id_of_another_credential_is_refused(
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
        stream = Stream(worker_stub(channel), *other)
        await stream.send(pull(1))
        failure = (await stream.answers(1))[1].failure
        assert failure.code == grpc.StatusCode.PERMISSION_DENIED.value[0]
        stream.cut()
