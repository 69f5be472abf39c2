"""Many calls of one client on one stream: each behaves like a separate call."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2
from shoal import AsyncClient, errors
from shoal.transport.addresses import RouterAddresses
from shoal.v1 import inference_pb2 as pb
from shoal.v1 import multiplex_pb2

from libs.serving import Security
from libs.serving.calls import multiplex
from services.router import app, service
from services.router.settings import Settings
from tests.router.parts import (
    MODEL,
    Client,
    FakeWorker,
    Stream,
    card,
    encode_request,
    router,
    score_answer,
    until,
    vector,
)
from tests.support.redis import RedisServer

SECONDS = 120.0
ID = "00000000000000000000000000000001"
PARENT = f"00-{ID}-0000000000000001-01"


def call(number: int, request: Message | str, **more: Any) -> multiplex_pb2.MultiplexedCall:
    message = encode_request(request) if isinstance(request, str) else request
    kind = message.DESCRIPTOR.name.removesuffix("Request").lower()
    fields = {
        "number": number,
        "request_id": f"id-{number}",
        "timeout_seconds": SECONDS,
        kind: message.SerializeToString(),
    }
    return multiplex_pb2.MultiplexedCall(**fields | more)  # type: ignore[arg-type]


def cancelling(number: int) -> multiplex_pb2.MultiplexedCall:
    return multiplex_pb2.MultiplexedCall(number=number, cancelled=True)


def reason(answer: multiplex_pb2.MultiplexedAnswer) -> str:
    info = error_details_pb2.ErrorInfo()
    status = status_pb2.Status.FromString(answer.failure.details)
    assert status.details[0].Unpack(info)
    return info.reason


async def vectors(stream: Stream, count: int) -> dict[int, bytes]:
    return {
        number: pb.EncodeResponse.FromString(one.response).dense.data
        for number, one in (await stream.answers(count)).items()
    }


@asynccontextmanager
async def serving(redis_url: str, **options: Any) -> AsyncIterator[tuple[Client, FakeWorker]]:
    async with (
        router(redis_url, **options) as client,
        FakeWorker(client.address, models=[card()]).working() as worker,
    ):
        yield client, worker


async def test_multiplexed_calls_are_answered_like_separate_calls(
    redis_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with serving(redis_url) as (client, worker):
        stream = Stream(client.inference, ("x-shoal-tenant", "green"))
        score = pb.ScoreRequest(
            model=MODEL, query=pb.Item(text="q"), documents=[pb.Item(text="ab"), pb.Item(text="c")]
        )
        with caplog.at_level(logging.INFO):
            await stream.send(call(1, "one", traceparent=PARENT), call(7, "seven"), call(8, score))
            found = await stream.answers(3)

            def calls() -> set[tuple[str, str]]:
                reported = [
                    record.__dict__["shoal_fields"]
                    for record in caplog.records
                    if record.message == "call"
                ]
                return {
                    (one["method"], one["outcome"])
                    for one in reported
                    if "Inference" in one["method"]
                }

            lines = {(f"/shoal.v1.InferenceService/{name}", "OK") for name in ("Encode", "Score")}
            await until(lambda: calls() == lines, "the calls' lines", timeout=SECONDS)
        answer = pb.EncodeResponse.FromString(found[7].response)
        assert answer.dense.data == vector("seven")
        assert answer.timings.total_seconds > 0
        scored = pb.ScoreResponse.FromString(found[8].response)
        assert scored.scores.data == score_answer(score).scores.data
        assert {job.tenant for job in worker.jobs} == {"green"}
        assert {job.request_id for job in worker.jobs} == {"id-1", "id-7", "id-8"}
        assert (
            next(job for job in worker.jobs if job.request_id == "id-1").traceparent.split("-")[1]
            == ID
        )
        await stream.close()
        assert await stream.end() is grpc.StatusCode.OK


async def test_multiplexed_failure_equals_failure_of_separate_call(redis_url: str) -> None:
    async with serving(redis_url) as (client, _):
        wrong = encode_request("a", "")
        wrong.items[1].Clear()
        alone = await status_of(
            client.inference.Encode(wrong, metadata=(("x-request-id", "id-1"),))
        )
        stream = Stream(client.inference)
        await stream.send(
            call(1, wrong),
            call(2, "fine"),
            call(3, "late", timeout_seconds=SECONDS, request_id="no spaces"),
        )
        found = await stream.answers(3)
        failure = found[1].failure
        assert (failure.code, failure.message, failure.details) == alone
        assert failure.code == grpc.StatusCode.INVALID_ARGUMENT.value[0]
        assert found[2].WhichOneof("outcome") == "response"
        assert found[3].failure.code == grpc.StatusCode.INVALID_ARGUMENT.value[0]
        stream.cut()


async def status_of(answer: Any) -> tuple[int, str, bytes]:
    try:
        await answer
    except grpc.aio.AioRpcError as error:
        details = dict(list(error.trailing_metadata() or ()))["grpc-status-details-bin"]
        return error.code().value[0], error.details() or "", details
    raise AssertionError("the call was answered")


async def test_same_request_on_a_stream_and_alone_is_one_job(redis_url: str) -> None:
    async with serving(redis_url) as (client, worker):
        worker.hold()
        alone = asyncio.create_task(client.encode("text", timeout=SECONDS, request_id="same"))
        await until(lambda: worker.jobs, "the job", timeout=SECONDS)
        stream = Stream(client.inference)
        await stream.send(call(1, "text", request_id="same"))
        worker.resume()
        assert await vectors(stream, 1) == {1: vector("text")}
        assert (await alone).dense.data == vector("text")
        assert len(worker.jobs) == 1
        stream.cut()


@pytest.mark.parametrize("how", ["cancelled", "cut"])
async def test_abandoned_call_is_cancelled_at_worker(redis_url: str, how: str) -> None:
    async with serving(redis_url) as (client, worker):
        worker.hold()
        stream = Stream(client.inference)
        await stream.send(call(1, "leaves"))
        await until(lambda: worker.jobs, "the job", timeout=SECONDS)
        if how == "cancelled":
            await stream.send(cancelling(1))
        else:
            stream.cut()
        await until(
            lambda: worker.cancelled == {worker.jobs[0].job_id}, "the cancellation", timeout=SECONDS
        )
        worker.resume()
        stream.cut()


async def test_call_has_its_own_deadline(redis_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The router's deadline is long before the client's here: a call that is late by the client's
    is ended without an answer.
    """
    monkeypatch.setattr(service, "_deadline_seconds", lambda client, default: client / 100)
    async with serving(redis_url) as (client, worker):
        worker.hold()
        stream = Stream(client.inference)
        await stream.send(
            call(1, "waits", timeout_seconds=100 * SECONDS), call(2, "late", timeout_seconds=50.0)
        )
        assert reason((await stream.answers(1))[2]) == "DEADLINE_PASSED"
        worker.resume()
        assert await vectors(stream, 1) == {1: vector("waits")}
        stream.cut()


async def test_call_that_is_cancelled_before_it_begins_leaves_nothing(redis_url: str) -> None:
    async with serving(redis_url) as (client, _):
        stream = Stream(client.inference)
        await stream.send(call(1, "never"), cancelling(1), cancelling(9), call(2, "text"))
        assert await vectors(stream, 1) == {2: vector("text")}
        await stream.send(call(1, "again"))
        assert await vectors(stream, 1) == {1: vector("again")}
        await stream.close()
        assert await stream.end() is grpc.StatusCode.OK


async def test_more_calls_than_may_be_in_progress_wait_for_room(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(multiplex, "_MAX_CALLS_PER_STREAM", 2)
    async with serving(redis_url) as (client, _):
        stream = Stream(client.inference)
        await stream.send(*(call(number, f"text {number}") for number in range(20)))
        assert await vectors(stream, 20) == {
            number: vector(f"text {number}") for number in range(20)
        }
        stream.cut()


@pytest.mark.parametrize(
    "unknown",
    [multiplex_pb2.MultiplexedCall(number=1), multiplex_pb2.MultiplexedCall(number=1, pull=b"")],
)
async def test_call_of_another_kind_fails_alone(
    redis_url: str, unknown: multiplex_pb2.MultiplexedCall
) -> None:
    async with serving(redis_url) as (client, _):
        stream = Stream(client.inference)
        await stream.send(unknown)
        assert reason((await stream.answers(1))[1]) == "INVALID_INPUT"
        await stream.send(call(2, "fine"))
        assert await vectors(stream, 1) == {2: vector("fine")}
        stream.cut()


@pytest.mark.parametrize("wrong", ["number", "traceparent"])
async def test_invalid_message_ends_stream(redis_url: str, wrong: str) -> None:
    async with router(redis_url) as client:
        stream = Stream(client.inference)
        calls = {
            "number": [call(1, "a"), call(1, "b")],
            "traceparent": [call(1, "a", traceparent="x" * 257)],
        }
        await stream.send(*calls[wrong])
        assert await stream.end() is grpc.StatusCode.INVALID_ARGUMENT


async def test_requests_in_progress_stop_the_reading(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(multiplex, "_MAX_BYTES_PER_STREAM", 10_000)
    async with serving(redis_url) as (client, worker):
        worker.hold()
        stream = Stream(client.inference)
        for number in range(10):
            await stream.send(call(number, f"{number}" * 4_000))

        async def jobs() -> int:
            return (await client.lane()).enqueued_jobs

        async def are_three() -> bool:
            return await jobs() == 3

        await until(are_three, "the first jobs", timeout=SECONDS)
        for _ in range(20):
            await asyncio.sleep(0.02)
            assert await jobs() == 3, "further calls are not read"
        worker.resume()
        assert len(await vectors(stream, 10)) == 10
        stream.cut()


async def test_stream_ends_at_its_age_when_its_calls_are_answered(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(multiplex, "MAX_STREAM_SECONDS", 3.0)
    async with serving(redis_url) as (client, worker):
        worker.hold()
        stream = Stream(client.inference)
        await stream.send(call(1, "text"))
        await until(lambda: worker.jobs, "the job", timeout=SECONDS)
        await asyncio.sleep(3.5)  # the age itself
        worker.resume()
        assert await vectors(stream, 1) == {1: vector("text")}
        assert await stream.end() is grpc.StatusCode.OK


async def test_drain_answers_requests_in_flight_and_refuses_the_rest(redis_url: str) -> None:
    async with (
        router(redis_url, "other") as other,
        FakeWorker(other.address, models=[card()]).working() as worker,
    ):
        async with router(redis_url, "draining", grace_seconds=SECONDS) as client:
            await client.sees("w1")
            worker.hold()
            stream = Stream(client.inference)
            await stream.send(call(1, "in flight"))
            await until(lambda: worker.jobs, "the job", timeout=SECONDS)

            async def ending() -> None:
                number = 2
                while True:  # until the drain has begun
                    await stream.send(call(number, "new", timeout_seconds=0.5))
                    if reason((await stream.answers(1))[number]) == "DRAINING":
                        break
                    number += 1
                worker.resume()
                assert await vectors(stream, 1) == {1: vector("in flight")}

            task = asyncio.create_task(ending())
        await task


async def test_token_that_is_revoked_ends_the_stream(server: RedisServer, tmp_path: Path) -> None:
    tokens = tmp_path / "tokens.yaml"
    rows = [
        f"- {{token: {name * 20}, subject: {name}, role: {role}}}\n"
        for name, role in (("a", "client"), ("b", "worker"))
    ]
    tokens.write_text("tokens:\n" + "".join(rows))
    settings = Settings(
        "r",
        "127.0.0.1:0",
        security=Security(tokens=tokens),
        redis_url=server.url,
        grace_seconds=1.0,
    )
    async with app.running(settings) as address:
        client = Client(address)
        stream = Stream(client.inference, ("authorization", f"Bearer {'b' * 20}"))
        assert await stream.end() is grpc.StatusCode.PERMISSION_DENIED
        stream = Stream(client.inference, ("authorization", f"Bearer {'a' * 20}"))
        await stream.send(call(1, encode_request("a", ""), timeout_seconds=1.0))
        assert (await stream.answers(1))[1].WhichOneof("outcome") == "failure"
        tokens.write_text("tokens:\n" + rows[1])

        async def asking() -> None:
            number = 2
            while True:
                await stream.send(call(number, encode_request("a", ""), timeout_seconds=1.0))
                number += 1
                await asyncio.sleep(0.1)

        task = asyncio.create_task(asking())
        assert await stream.end() is grpc.StatusCode.UNAUTHENTICATED
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await client.close()


async def test_memory_of_answers_is_released(redis_url: str) -> None:
    """The memory is released even if the client has disconnected."""
    async with serving(redis_url, in_flight_bytes=1 << 20) as (client, worker):
        for _ in range(5):  # each would take a third of it
            stream = Stream(client.inference)
            await stream.send(*(call(number, "x" * 10_000) for number in range(5)))
            await stream.answers(5)
            worker.hold()
            worker.jobs.clear()
            await stream.send(call(6, "y"))
            await until(lambda: worker.jobs, "the job", timeout=SECONDS)
            stream.cut()
            worker.resume()
        assert (await client.encode("z" * 50_000, timeout=SECONDS)).dense.data == vector(
            "z" * 50_000
        )


# The Python client's behaviour.


def count_streams(client: AsyncClient) -> int:
    transport: Any = client._transport
    return sum(
        len(group.streams)
        for groups in transport._streams._groups.values()
        for group in groups.values()
    )


async def test_concurrent_calls_share_a_stream(
    redis_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with serving(redis_url) as (client, worker):
        worker.hold()
        async with AsyncClient(client.address, tenant="blue", timeout=SECONDS) as asking:
            calls = [
                asyncio.create_task(asking.encode(MODEL, [f"text {number}"]))
                for number in range(30)
            ]
            await until(lambda: count_streams(asking) == 1, "the stream", timeout=SECONDS)
            worker.resume()
            for number, result in enumerate(await asyncio.gather(*calls)):
                assert result.dense.tobytes() == vector(f"text {number}")
            assert {job.tenant for job in worker.jobs} == {"blue"}
            assert len({job.request_id for job in worker.jobs}) == 30
            with pytest.raises(errors.InvalidInput) as caught:
                await asyncio.gather(
                    *(asking.encode(MODEL, [text], dimensions=5000) for text in ("a", "b"))
                )
            assert caught.value.field == "dimensions"
            assert caught.value.request_id


async def test_call_that_is_cancelled_is_cancelled_at_the_router(redis_url: str) -> None:
    async with serving(redis_url) as (client, worker):
        worker.hold()
        async with AsyncClient(client.address, timeout=SECONDS) as asking:
            calls = [
                asyncio.create_task(asking.encode(MODEL, [text]))
                for text in ("one", "two", "three")
            ]
            await until(lambda: worker.jobs, "a job", timeout=SECONDS)
            for each in calls:
                each.cancel()
            assert all(
                isinstance(one, asyncio.CancelledError)
                for one in await asyncio.gather(*calls, return_exceptions=True)
            )
            held = {job.job_id for job in worker.jobs}
            await until(lambda: worker.cancelled >= held, "the cancellation", timeout=SECONDS)
            worker.resume()


async def test_calls_of_stopped_router_fail_over(redis_url: str) -> None:
    async with (
        router(redis_url, "stays") as stays,
        FakeWorker(stays.address, models=[card()]).working() as worker,
    ):
        async with router(redis_url, "goes", grace_seconds=0.1) as goes:
            await goes.sees("w1")
            worker.hold()
            asking = AsyncClient(f"{goes.address},{stays.address}", timeout=SECONDS)
            asking._caller._addresses = RouterAddresses((goes.address, stays.address))
            calls = [
                asyncio.create_task(asking.encode(MODEL, [f"text {number}"])) for number in range(8)
            ]
            await until(lambda: worker.jobs, "a job", timeout=SECONDS)
        worker.resume()
        for number, result in enumerate(await asyncio.gather(*calls)):
            assert result.dense.tobytes() == vector(f"text {number}")
        await asking.close()


async def test_streams_are_replaced(redis_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoal.transport.multiplex.RENEW_STREAM_SECONDS", 0.0)
    async with (
        serving(redis_url) as (client, _),
        AsyncClient(client.address, timeout=SECONDS) as asking,
    ):
        for _ in range(3):
            results = await asyncio.gather(
                *(asking.encode(MODEL, [f"text {number}"]) for number in range(5))
            )
            assert [result.dense.tobytes() for result in results] == [
                vector(f"text {number}") for number in range(5)
            ]
        await until(lambda: count_streams(asking) <= 5, "old streams to be let go of")
