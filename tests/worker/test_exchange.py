"""The worker's stream to a router: used if supported, replaced in time, and never the reason for a
failed call.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
from shoal.v1 import worker_pb2

from libs.errors import NoCapacity
from services.worker.mesh import exchange
from services.worker.mesh.link import Identity, Link
from tests.worker.fakes import HANG_SECONDS, FakeLanes, FakeRouter, encode_job, routers, until
from tests.worker.running import MODEL, worker


async def answered(lanes: FakeLanes, *names: str) -> None:
    for name in names:
        lanes.put(MODEL, encode_job(name, "a"))
    await until(lambda: all(name in lanes.answers for name in names))


async def test_worker_pulls_and_answers_on_one_stream(tmp_path: Path) -> None:
    lanes = FakeLanes()
    async with routers(lanes) as running, worker(tmp_path, running):
        await answered(lanes, "a", "b", "c")
        assert running[0].streams == 1


async def test_old_stream_is_replaced_and_closes_after_its_last_reply(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exchange, "RENEW_SECONDS", 0.2)
    lanes = FakeLanes()
    async with routers(lanes) as running, worker(tmp_path, running):
        for number in range(6):
            await asyncio.sleep(0.1)
            await answered(lanes, f"job {number}")
        assert running[0].streams >= 3
        assert all(len(lanes.answers[f"job {number}"]) == 1 for number in range(6))


async def test_cancelled_call_is_cancelled_at_the_router() -> None:
    ended = asyncio.Event()

    class Waiting(FakeRouter):
        async def Pull(
            self, request: worker_pb2.PullRequest, context: object
        ) -> worker_pb2.PullResponse:
            try:
                return await super().Pull(request, context)
            except asyncio.CancelledError:
                ended.set()
                raise

    router = Waiting(FakeLanes())
    await router.start()
    async with Link(Identity("w1", "e", "cpu"), [router.address]) as calls:
        pulling = asyncio.create_task(calls.pull(pull()))
        await until(lambda: bool(router.lanes.pulls))
        pulling.cancel()
        async with asyncio.timeout(HANG_SECONDS):
            await ended.wait()
        assert router.streams == 1
    await router.stop()


async def test_broken_stream_fails_its_calls_over_to_the_next_router() -> None:
    lanes = FakeLanes()
    async with (
        routers(lanes, 2) as running,
        Link(Identity("w1", "e", "cpu"), [one.address for one in running]) as calls,
    ):
        first = asyncio.create_task(calls.pull(pull()))
        await until(lambda: bool(lanes.pulls))
        serving = next(one for one in running if one.streams)
        await serving.stop()
        await until(lambda: len(lanes.pulls) == 2)
        assert lanes.pulls[1].asked_again
        lanes.put(MODEL, encode_job("a", "a"))
        assert (await first).batch_id == "e-1"
        for one in running:
            await one.stop()
        with pytest.raises(NoCapacity):
            await calls.pull(pull())


class FakeStream:
    """A grpc.aio stream to a router that is closed during a write, before or after the router's
    status is received, as happens to a few in a thousand real ones.
    """

    def __init__(self, *statuses: tuple[grpc.StatusCode, str]) -> None:
        self._statuses = iter(statuses)
        self._status: tuple[grpc.StatusCode, str] | None = None
        self._callbacks: list[Callable[[FakeStream], None]] = []
        self._written = asyncio.Event()
        self.is_cancelled = False

    def add_done_callback(self, callback: Callable[[FakeStream], None]) -> None:
        self._callbacks.append(callback)

    def receive(self) -> None:
        self._status = next(self._statuses)
        for callback in self._callbacks:
            callback(self)

    async def write(self, request: worker_pb2.ExchangeRequest) -> None:
        for _ in range(2):
            self.receive()
        self._written.set()
        raise self._error()

    async def read(self) -> worker_pb2.ExchangeResponse:
        await self._written.wait()
        raise self._error()

    def _error(self) -> grpc.aio.AioRpcError:
        assert self._status is not None
        return grpc.aio.AioRpcError(
            self._status[0], grpc.aio.Metadata(), grpc.aio.Metadata(), self._status[1]
        )

    async def code(self) -> grpc.StatusCode:
        return self._error().code()

    async def details(self) -> str | None:
        return self._error().details()

    def cancel(self) -> None:
        self.is_cancelled = True


OF_THE_ROUTER = (grpc.StatusCode.PERMISSION_DENIED, "this needs the role worker")
NO_CHANNEL: Any = object()
OF_A_WRITE = (grpc.StatusCode.INTERNAL, "Internal error from Core")


@pytest.mark.parametrize("statuses", [(OF_THE_ROUTER, OF_A_WRITE), (OF_A_WRITE, OF_THE_ROUTER)])
async def test_write_to_a_closed_stream_does_not_hide_the_routers_status(
    statuses: Any,
) -> None:
    stream: Any = FakeStream(*statuses)
    calls = exchange.Exchange(NO_CHANNEL, stream, ())
    with pytest.raises(grpc.aio.AioRpcError) as reported:
        await calls.call("pull", pull(), HANG_SECONDS)
    assert (reported.value.code(), reported.value.details()) == OF_THE_ROUTER
    with pytest.raises(grpc.aio.AioRpcError) as again:
        await calls.call("pull", pull(), HANG_SECONDS)
    assert again.value.code() is grpc.StatusCode.PERMISSION_DENIED
    calls.close()
    assert stream.is_cancelled


async def test_refusal_of_a_stream_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    """The error and the log name the credential to renew."""

    class Refusing(FakeRouter):
        async def Exchange(
            self, request_iterator: object, context: Any
        ) -> AsyncIterator[worker_pb2.ExchangeResponse]:
            await context.abort(*OF_THE_ROUTER)
            yield worker_pb2.ExchangeResponse()

    router = Refusing(FakeLanes())
    await router.start()
    async with Link(Identity("w1", "e", "cpu"), [router.address]) as calls:
        for _ in range(5):
            with pytest.raises(NoCapacity, match="PERMISSION_DENIED this needs the role worker"):
                await calls.pull(pull())
    await router.stop()
    refused = [
        record
        for record in caplog.records
        if "refuses this worker's token or certificate" in record.message
    ]
    assert len(refused) == 1, "one in a minute"


async def test_large_call_is_unary(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[int] = []
    original: Any = exchange.Exchange.call

    async def call(self: Any, kind: Any, request: Any, *rest: Any) -> Any:
        sent.append(request.ByteSize())
        return await original(self, kind, request, *rest)

    monkeypatch.setattr(exchange.Exchange, "call", call)
    lanes = FakeLanes()
    async with (
        routers(lanes) as running,
        Link(Identity("w1", "e", "cpu"), [running[0].address]) as calls,
    ):
        lanes.put(MODEL, encode_job("a", "a"))
        batch = await calls.pull(pull())
        large = worker_pb2.CompletedJob(
            job_id="a", result=worker_pb2.JobResult(failure=failure()).SerializeToString()
        )
        request = worker_pb2.CompleteRequest(
            worker_id="w1", lane=batch.lane, batch_id=batch.batch_id, jobs=[large], release=True
        )
        assert request.ByteSize() > exchange.MAX_EXCHANGED_BYTES
        assert await calls.complete(request, float("inf")) == 1
        assert len(sent) == 1, "the pull"


def failure() -> worker_pb2.Failure:
    return worker_pb2.Failure(reason="INTERNAL", message="x" * (exchange.MAX_EXCHANGED_BYTES + 1))


def pull() -> worker_pb2.PullRequest:
    lanes = [worker_pb2.Lane(pool="cpu", model=MODEL)]
    return worker_pb2.PullRequest(
        worker_id="w1",
        epoch="e",
        pool="cpu",
        lanes=lanes,
        budget_tokens=9,
        budget_jobs=9,
        wait_seconds=60,
        batch_id="e-1",
    )
