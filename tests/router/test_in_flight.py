"""Memory of a router for requests in flight; nothing else grows with names that clients invent."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager, suppress
from typing import cast

import grpc
import pytest
from redis.asyncio import Redis
from shoal.v1 import inference_pb2 as pb
from shoal.v1 import mesh_pb2, tensor_pb2, worker_pb2

from libs.errors import InvalidInput, QueueFull
from services.router import app
from services.router.admission.rules import MAX_UNKNOWN, MAX_UNKNOWN_OF_TENANT
from services.router.in_flight import (
    COPIES,
    EMPTY_REQUEST_BYTES,
    PART_BYTES,
    AnswersUnread,
    DividedAnswers,
    InFlightMemory,
    Reservation,
    Rpc,
)
from services.router.lanes.codec import count_parts
from services.router.operators.mesh import MAX_WATCHERS
from services.router.state.outstanding import Outstanding
from tests.router.parts import (
    MODEL,
    Client,
    FakeWorker,
    Refusal,
    card,
    encode_request,
    refused,
    router,
    until,
)

EMPTY = EMPTY_REQUEST_BYTES


class FakeRpc:
    """A call that ends when the test ends it."""

    def __init__(self) -> None:
        self._callbacks: list[Callable[[Rpc], None]] = []

    def add_done_callback(self, callback: Callable[[Rpc], None]) -> None:
        self._callbacks.append(callback)

    def end(self) -> None:
        for callback in self._callbacks:
            callback(cast(Rpc, self))


def reserve(in_flight: InFlightMemory, size: int, tenant: str = "t") -> tuple[FakeRpc, object]:
    rpc = FakeRpc()
    return rpc, in_flight.reserve(size, tenant, cast(Rpc, rpc))


def test_reserved_memory_is_released_with_requests() -> None:
    in_flight, rpc = InFlightMemory(limit_bytes=10**9), FakeRpc()
    reservation = in_flight.reserve(1000, "t", cast(Rpc, rpc))
    assert in_flight.held_bytes == COPIES * 1000 + EMPTY
    reservation.hold_answer(500)
    reservation.hold_answer(500)
    assert in_flight.held_bytes == COPIES * 2000 + EMPTY
    reservation.hold_response(900)
    assert in_flight.held_bytes == 900 + EMPTY, "only the answer is left"
    rpc.end()
    assert in_flight.held_bytes == 0
    reservation.hold_answer(500)
    assert in_flight.held_bytes == 0, "a late answer is not kept"


def test_items_increase_reserved_memory() -> None:
    in_flight = InFlightMemory(limit_bytes=10**9)
    in_flight.reserve(1000, "t", cast(Rpc, FakeRpc()), 100)
    assert in_flight.held_bytes == COPIES * 1000 + PART_BYTES * 100 + EMPTY
    entities = [pb.Entity(start=0, end=1)] * 3
    request = pb.ExtractRequest(
        items=[pb.Item(text="a", entities=entities)] * 2, relations=pb.RelationsTask()
    )
    assert count_parts(request) == 8


def test_only_a_sole_request_may_exceed_memory_limit() -> None:
    in_flight = InFlightMemory(limit_bytes=100_000)
    large, _ = reserve(in_flight, 10**6)
    with pytest.raises(QueueFull) as refusal:
        reserve(in_flight, 1, "u")
    assert (refusal.value.retry_after or 0.0) > 0
    large.end()
    reserve(in_flight, 1, "u")


def test_one_tenant_cannot_keep_all_others_out() -> None:
    in_flight = InFlightMemory(limit_bytes=10 * EMPTY)
    for _ in range(5):
        reserve(in_flight, 0, "greedy")
    with pytest.raises(QueueFull, match="of this tenant"):
        reserve(in_flight, 0, "greedy")
    for _ in range(5):
        reserve(in_flight, 0, "other")


def test_unread_answers_of_a_tenant_have_a_limit() -> None:
    in_flight = InFlightMemory(limit_bytes=100_000)

    def begin(tenant: str) -> tuple[FakeRpc, Reservation]:
        rpc = FakeRpc()
        return rpc, in_flight.reserve(0, tenant, cast(Rpc, rpc))

    rpc, streams = begin("greedy")
    others = [begin(tenant)[1] for tenant in ("second", "third")]
    streams.hold_streamed(30_000)
    with pytest.raises(AnswersUnread, match="have not read"):
        streams.hold_streamed(20_001)
    with pytest.raises(AnswersUnread, match="have not read"):
        streams.hold_response(20_001)
    with pytest.raises(AnswersUnread, match="have not read"):
        begin("greedy")  # its answer may be too large to wait with the others
    streams.release_streamed(1)
    streams.hold_streamed(20_001)
    others[0].hold_response(60_000)  # a tenant's only one, however large
    assert in_flight.unread_bytes > 100_000
    others[1].hold_response(1)
    with pytest.raises(AnswersUnread, match="those of all tenants"):
        others[1].hold_response(1)
    rpc.end()
    assert in_flight.unread_bytes == 60_001
    others[1].hold_response(1)


def test_small_unread_answer_does_not_keep_its_tenant_out() -> None:
    in_flight = InFlightMemory(limit_bytes=4 << 20)
    waiting = in_flight.reserve(0, "t", cast(Rpc, FakeRpc()))
    waiting.hold_response(1 << 20)
    reserve(in_flight, 0)
    waiting.hold_streamed(1)
    with pytest.raises(AnswersUnread, match="have not read"):
        reserve(in_flight, 0)


def test_answers_with_chunks_are_refused_before_they_are_held() -> None:
    held: list[int] = []
    answers = DividedAnswers(held.append, 1000, is_streamed=True)
    answers.add(600)
    answers.add(400)
    with pytest.raises(InvalidInput, match=r"larger chunking\.max_tokens") as caught:
        answers.add(1)
    assert (held, caught.value.field) == ([600, 400], "items")


async def test_request_with_more_chunks_than_one_answer_holds_fails_at_the_first_job_beyond(
    redis_url: str,
) -> None:
    """Four jobs are answered with 2 MiB each, and the client reads 4 MiB."""
    chunked = encode_request(*["word " * 3000] * 4)
    chunked.chunking.SetInParent()
    async with router(redis_url, in_flight_bytes=1 << 30) as client, working(client) as worker:
        worker.answer = lambda job: worker_pb2.JobResult(
            encode=pb.EncodeResponse(
                dense=tensor_pb2.Tensor(
                    data_type=tensor_pb2.DATA_TYPE_FLOAT32, shape=[1, 1 << 19], data=bytes(2 << 20)
                ),
                chunks=pb.Chunks(offsets=[0, 1], starts=[0], ends=[1], tokens=[1]),
            )
        )
        refusal = await refused(client.inference.Encode(chunked, timeout=120.0))
    assert (refusal.reason, refusal.field) == ("INVALID_INPUT", "items")
    received = int(refusal.message.split(" bytes")[0].split()[-1].replace(",", ""))
    assert 4 << 20 < received < 7 << 20, "the fourth answer is not awaited"


def working(client: Client) -> AbstractAsyncContextManager[FakeWorker]:
    return FakeWorker(client.address, models=[card()]).working()


async def test_full_router_refuses_with_retry_time_and_recovers(redis_url: str) -> None:
    text = "word " * 20_000
    async with router(redis_url, in_flight_bytes=1 << 21) as client, working(client) as worker:
        worker.hold()
        first = [asyncio.create_task(client.encode(text)) for _ in range(2)]

        async def are_held() -> bool:
            return (await client.lane()).enqueued_jobs == 2

        await until(are_held, "both to be admitted")
        refusal = await refused(client.encode(text))
        assert (refusal.code, refusal.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "QUEUE_FULL")
        assert refusal.retry_seconds > 0
        worker.resume()
        await asyncio.gather(*first)
        await client.encode(text)


SLOW_CLIENT = """
import sys, threading, grpc
from shoal.v1 import inference_pb2 as pb, inference_pb2_grpc
channel = grpc.insecure_channel(sys.argv[1], options=[("grpc.max_receive_message_length", -1)])
stub = inference_pb2_grpc.InferenceServiceStub(channel)
request = pb.EncodeRequest(model=sys.argv[2], items=[pb.Item(text="text")])
metadata = (("x-shoal-tenant", "slow"),)
calls = [stub.Encode.future(request, timeout=600.0, metadata=metadata) for _ in range(4)]
for call in calls:
    refused = call.exception()
    print(len(call.result().dense.data) if refused is None else refused.code().name, flush=True)
"""
ANSWER_BYTES = 24 << 20


def large_answer(job: worker_pb2.Job) -> worker_pb2.JobResult:
    """The card of the slow tenant's model."""
    size = ANSWER_BYTES if job.tenant == "slow" else 16
    dense = tensor_pb2.Tensor(
        data_type=tensor_pb2.DATA_TYPE_FLOAT32, shape=[1, size // 4], data=bytes(size)
    )
    return worker_pb2.JobResult(encode=pb.EncodeResponse(dense=dense, model_revision="r1"))


async def test_answers_that_a_frozen_client_does_not_read_take_its_share_and_no_more(
    redis_url: str,
) -> None:
    """One of four answers fits; the others may be requested again."""
    async with (
        router(redis_url, in_flight_bytes=64 << 20) as client,
        # One job a batch: all answers together may be more than one message of a worker may have.
        FakeWorker(client.address, models=[card()], budget_tokens=1).working() as worker,
    ):
        worker.answer = large_answer
        worker.hold()
        command = (sys.executable, "-c", SLOW_CLIENT, client.address, MODEL)
        slow = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
        assert slow.stdout is not None
        try:

            async def have_come() -> bool:
                return (await client.lane()).enqueued_jobs == 4

            await until(have_come, "the slow client's requests", 120.0)
            slow.send_signal(signal.SIGSTOP)
            worker.resume()

            async def are_done() -> bool:
                return (await client.lane()).done_jobs == 4

            await until(are_done, "the slow client's answers", 120.0)
            await client.encode("text")  # another tenant's
            slow.send_signal(signal.SIGCONT)
            lines = {(await slow.stdout.readline()).decode().strip() for _ in range(4)}
            assert lines == {str(ANSWER_BYTES), "RESOURCE_EXHAUSTED"}
        finally:
            with suppress(ProcessLookupError):  # it has ended by itself
                slow.kill()
            await slow.wait()


def ask_for(client: Client, model: str, tenant: str) -> asyncio.Task[Refusal]:
    """Send a request for a model that no worker has."""

    async def ask() -> Refusal:
        request = encode_request("text", model=model)
        return await refused(
            client.inference.Encode(request, timeout=600.0, metadata=(("x-shoal-tenant", tenant),))
        )

    return asyncio.create_task(ask())


async def wait_for_refusals(calls: Sequence[asyncio.Task[Refusal]], waiting: int) -> list[Refusal]:
    """Once all calls but `waiting` were refused; those are then given up."""
    await until(
        lambda: sum(call.done() for call in calls) == len(calls) - waiting,
        "the others to be refused",
        120.0,
    )
    await asyncio.sleep(0)
    ended = [await call for call in calls if call.done()]
    for call in calls:
        call.cancel()
    return ended


async def test_invented_models_open_few_lanes_and_leave_none(
    redis_url: str, redis: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    outstanding = Outstanding()
    monkeypatch.setattr(app, "Outstanding", lambda: outstanding)
    async with router(redis_url) as client, working(client):
        await client.sees("w1")
        for again in "ab":
            calls = [
                ask_for(client, f"made/up-{again}-{number}", f"t{number % 16}")
                for number in range(600)
            ]
            refusals = await wait_for_refusals(calls, MAX_UNKNOWN)
            assert {(refusal.reason, refusal.retry_seconds > 0) for refusal in refusals} == {
                ("QUEUE_FULL", True)
            }
            await until(lambda: not outstanding.unknown(), "the router to hear of the rest")
        await client.encode("a model that is there is served meanwhile")

        async def is_tidy() -> bool:
            return await redis.zcard("v1:{0}:lanes") <= MAX_UNKNOWN + 1

        await until(is_tidy, "idle lanes to be forgotten", 120.0)


async def test_tenant_opens_bounded_number_of_unknown_lanes(redis_url: str) -> None:
    async with router(redis_url) as client:
        calls = [ask_for(client, f"made/up-{number}", "t") for number in range(100)]
        refusals = await wait_for_refusals(calls, MAX_UNKNOWN_OF_TENANT)
        assert {refusal.reason for refusal in refusals} == {"QUEUE_FULL"}


async def test_number_of_mesh_watchers_is_bounded(redis_url: str) -> None:
    async with router(redis_url) as client:
        streams = [
            client.mesh.WatchMesh(mesh_pb2.WatchMeshRequest(interval_seconds=60))
            for _ in range(MAX_WATCHERS)
        ]
        for stream in streams:
            await stream.read()
        refusal = await refused(
            client.mesh.WatchMesh(mesh_pb2.WatchMeshRequest(interval_seconds=60)).read()
        )
        assert (refusal.reason, refusal.retry_seconds) == ("QUEUE_FULL", 10.0)
        streams[0].cancel()

        async def watches() -> bool:
            stream = client.mesh.WatchMesh(mesh_pb2.WatchMeshRequest(interval_seconds=60))
            try:
                await stream.read()
            except grpc.aio.AioRpcError:
                return False
            stream.cancel()
            return True

        await until(watches, "a place that has become free")
        for stream in streams[1:]:
            stream.cancel()
