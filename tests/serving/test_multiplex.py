"""Streams of clients that do not read, ask for large answers, or send invalid deadlines."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import grpc
import pytest
from shoal.v1 import inference_pb2 as pb
from shoal.v1 import inference_pb2_grpc
from shoal.v1.multiplex_pb2 import MultiplexedCall

from libs.errors import ModelNotFound
from libs.serving import Service, StreamCall, serving
from libs.serving.calls import multiplex
from tests.router.parts import Stream, until

SECONDS = 120.0
KIB = 1 << 10
SILENT = (("grpc.http2.lookahead_bytes", 1), ("grpc.http2.bdp_probe", 0))
"""A client of these options receives at most 64 KiB that it does not read."""


class Calls:
    """Answers calls of Encode after `go`, with as many bytes as the call says."""

    def __init__(self) -> None:
        self.go = asyncio.Event()
        self.started: list[int] = []
        self.cancelled: list[int] = []

    async def encode(self, request: pb.EncodeRequest, _: object) -> pb.EncodeResponse:
        self.started.append(request.dimensions)
        try:
            await self.go.wait()
        except asyncio.CancelledError:
            self.cancelled.append(request.dimensions)
            raise
        if request.instruction:
            raise ModelNotFound("x" * request.dimensions)
        return pb.EncodeResponse(dense={"data": bytes(request.dimensions)})


def call(number: int, size: int, **more: Any) -> MultiplexedCall:
    return failing(number, size, "", **more)


def failing(number: int, size: int, instruction: str = "fail", **more: Any) -> MultiplexedCall:
    request = pb.EncodeRequest(dimensions=size, instruction=instruction)
    fields: dict[str, Any] = {
        "number": number,
        "timeout_seconds": SECONDS,
        "encode": request.SerializeToString(),
    }
    return MultiplexedCall(**fields | more)


Opening = Callable[..., Stream]


@asynccontextmanager
async def opened(calls: Calls) -> AsyncIterator[Opening]:
    """Yield what opens a stream, each on a connection with the given options."""
    add = inference_pb2_grpc.add_InferenceServiceServicer_to_server
    servicer: Any = inference_pb2_grpc.InferenceServiceServicer
    service = Service(
        "shoal.v1.InferenceService",
        partial(add, servicer()),
        method_bytes={"Multiplex": multiplex.MAX_STREAM_MESSAGE_BYTES},
        stream_calls={"encode": StreamCall("Encode", pb.EncodeRequest, calls.encode)},
    )
    channels: list[grpc.aio.Channel] = []
    async with serving("127.0.0.1:0", [service], grace_seconds=0.1) as server:

        def open_stream(*options: tuple[str, int]) -> Stream:
            # Its own connection: streams of one share its window.
            own = ("grpc.use_local_subchannel_pool", 1)
            channels.append(grpc.aio.insecure_channel(server.address, [own, *options]))
            return Stream(inference_pb2_grpc.InferenceServiceStub(channels[-1]))

        try:
            yield open_stream
        finally:
            for channel in channels:
                await channel.close()


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return the calls in progress and unwritten answers of a stream at the start of each call."""
    found: list[int] = []
    start = multiplex._Stream._start

    def counted(self: multiplex._Stream, *arguments: Any) -> None:
        start(self, *arguments)
        found.append(len(self._calls) + self._unwritten)

    monkeypatch.setattr(multiplex._Stream, "_start", counted)
    return found


async def settled(started: list[int]) -> int:
    """Return the number of calls once no more are read."""
    quiet = 0
    async with asyncio.timeout(SECONDS):
        while quiet < 20:
            before = len(started)
            await asyncio.sleep(0.05)
            quiet = quiet + 1 if started and len(started) == before else 0
    return len(started)


async def send_all(stream: Stream, calls: list[MultiplexedCall], together: int) -> None:
    for first in range(0, len(calls), together):
        await stream.send(*calls[first : first + together])


async def test_client_that_does_not_read_stops_its_own_stream(held: list[int]) -> None:
    calls = Calls()
    calls.go.set()
    async with opened(calls) as open_stream:
        silent = open_stream(*SILENT)
        count = 20_000  # of a kind that the stream does not carry: each fails at once
        unknown = [MultiplexedCall(number=number) for number in range(count)]
        sending = asyncio.create_task(send_all(silent, unknown, 500))
        assert await settled(held) < count / 2
        other = open_stream()
        await other.send(call(1, 10))
        assert (await other.answers(1))[1].WhichOneof("outcome") == "response"
        answers = await silent.answers(count)
        await sending
        assert len(answers) == count
        assert {one.failure.code for one in answers.values()} == {3}
        assert len(held) == count + 1
        assert max(held) <= multiplex._MAX_CALLS_PER_STREAM


@pytest.mark.parametrize("made", [call, failing])
async def test_size_of_unread_answers_stops_the_reading(
    held: list[int], monkeypatch: pytest.MonkeyPatch, made: Callable[..., MultiplexedCall]
) -> None:
    """An answer that is larger than the maximum is written all the same."""
    monkeypatch.setattr(multiplex, "_MAX_BYTES_PER_STREAM", 50 * KIB)
    calls = Calls()
    calls.go.set()
    async with opened(calls) as open_stream:
        silent = open_stream(*SILENT)
        count = 200  # A failure has 2 KiB, of which the connection holds 64.
        large = [made(number, 100 * KIB) for number in range(count)]
        sending = asyncio.create_task(send_all(silent, large, 1))
        assert await settled(held) < 120
        assert len(await silent.answers(count)) == count
        await sending


async def test_message_has_no_more_than_a_client_reads() -> None:
    """Each of these answers is below gRPC's default of 4 MiB, but not all of them together."""
    calls = Calls()
    async with opened(calls) as open_stream:
        stream = open_stream()
        sizes = [900 * KIB, 4000 * KIB, 2000 * KIB, 10, 900 * KIB]
        await stream.send(*(call(number, size) for number, size in enumerate(sizes)))
        await until(lambda: len(calls.started) == len(sizes), "the calls", timeout=SECONDS)
        calls.go.set()
        answers = await stream.answers(len(sizes))
        for number, size in enumerate(sizes):
            response = pb.EncodeResponse.FromString(answers[number].response)
            assert len(response.dense.data) == size
        await stream.close()
        assert await stream.end() is grpc.StatusCode.OK


@pytest.mark.parametrize("seconds", [float("nan"), float("inf"), float("-inf")])
async def test_timeout_that_is_not_finite_ends_stream(seconds: float) -> None:
    async with opened(Calls()) as open_stream:
        stream = open_stream()
        await stream.send(call(1, 10, timeout_seconds=seconds))
        assert await stream.end() is grpc.StatusCode.INVALID_ARGUMENT


@pytest.mark.parametrize("seconds", [0.0, -1.0, -1e308])
async def test_call_after_its_timeout_is_not_answered(seconds: float) -> None:
    calls = Calls()
    async with opened(calls) as open_stream:
        stream = open_stream()
        await stream.send(call(1, 1, timeout_seconds=seconds), call(2, 2, timeout_seconds=1e308))
        await until(lambda: 2 in calls.started, "the other call", timeout=SECONDS)
        await until(lambda: calls.started.count(1) == calls.cancelled.count(1), "the end of call 1")
        await stream.close()
        calls.go.set()
        assert set(await stream.answers(1)) == {2}
        assert await stream.end() is grpc.StatusCode.OK


async def test_cancellations_are_not_behind_calls_that_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(multiplex, "_MAX_CALLS_PER_STREAM", 2)
    calls = Calls()

    def stopped(number: int) -> MultiplexedCall:
        return MultiplexedCall(number=number, cancelled=True)

    async def started(*numbers: int) -> None:
        await until(lambda: calls.started == list(numbers), f"calls {numbers}", timeout=SECONDS)

    async with opened(calls) as open_stream:
        stream = open_stream()
        await stream.send(call(1, 1), call(2, 2))
        await started(1, 2)
        await stream.send(call(3, 3), stopped(1))
        await started(1, 2, 3)
        await stream.send(call(4, 4))
        await stream.send(stopped(2), call(5, 5))
        await started(1, 2, 3, 4)
        await stream.send(stopped(3), stopped(4), call(6, 6))
        await started(1, 2, 3, 4, 5, 6)
        assert calls.cancelled == [1, 2, 3, 4]
        calls.go.set()
        assert set(await stream.answers(2)) == {5, 6}
        await stream.close()
        assert await stream.end() is grpc.StatusCode.OK
