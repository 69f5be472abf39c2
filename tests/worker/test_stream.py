"""The worker's stream to a router: used if supported, replaced in time, and never the reason for a
failed call.
"""

from __future__ import annotations

import asyncio
import socket
import time
from pathlib import Path

import grpc
import grpc.aio
import pytest
from shoal.transport import multiplex
from shoal.transport.trust import TokenFile, Trust
from shoal.v1 import multiplex_pb2, worker_pb2

from libs.errors import NoCapacity
from libs.serving import Security
from services.worker.mesh.link import Link, WorkerIdentity
from tests.worker.fakes import HANG_SECONDS, FakeLanes, FakeRouter, encode_job, routers, until
from tests.worker.running import MODEL, worker
from tests.worker.test_link import REFUSED, SECRET, guarded, write_tokens


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
    monkeypatch.setattr(multiplex, "RENEW_STREAM_SECONDS", 0.2)
    lanes = FakeLanes()
    async with routers(lanes) as running, worker(tmp_path, running):
        sent = 0
        async with asyncio.timeout(60):
            while running[0].streams < 3:
                await answered(lanes, f"job {sent}")
                sent += 1
                await asyncio.sleep(0.05)
        assert all(len(lanes.answers[f"job {number}"]) == 1 for number in range(sent))


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
    async with Link(WorkerIdentity("w1", "e", "cpu"), [router.address]) as calls:
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
        Link(WorkerIdentity("w1", "e", "cpu"), [one.address for one in running]) as calls,
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


async def test_refusal_of_a_stream_is_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The error and the log name the credential to renew."""
    tokens, mine = tmp_path / "tokens.yaml", tmp_path / "token"
    write_tokens(tokens, SECRET, role="client")
    mine.write_text(SECRET)
    async with (
        guarded(FakeLanes(), Security(tokens=tokens)) as router,
        Link(
            WorkerIdentity("w1", "e", "cpu"), [router.address], Trust(token=TokenFile(mine))
        ) as calls,
    ):
        for _ in range(5):
            with pytest.raises(NoCapacity, match="PERMISSION_DENIED role client may not call"):
                await calls.pull(pull())
    assert len([one for one in caplog.records if REFUSED in one.message]) == 1, "one in a minute"


async def test_calls_behind_a_large_one_use_another_stream() -> None:
    lanes = FakeLanes()
    async with (
        routers(lanes) as running,
        Link(WorkerIdentity("w1", "e", "cpu"), [running[0].address]) as calls,
    ):
        lanes.put(MODEL, encode_job("a", "a"))
        batch = await calls.pull(pull())
        assert running[0].streams == 1
        failure = worker_pb2.Failure(message="x" * (40 << 20))
        large = worker_pb2.CompletedJob(
            job_id="a", result=worker_pb2.JobResult(failure=failure).SerializeToString()
        )
        request = worker_pb2.CompleteRequest(
            worker_id="w1", lane=batch.lane, batch_id=batch.batch_id, jobs=[large], release=True
        )
        completing = asyncio.create_task(calls.complete(request, float("inf")))
        await asyncio.sleep(0)
        pulling = asyncio.create_task(calls.pull(pull("e-2")))
        assert await completing == 1
        assert lanes.answer_of("a").failure.message == failure.message
        await until(lambda: len(lanes.pulls) == 2)
        assert running[0].streams == 2
        pulling.cancel()


def pull(batch_id: str = "e-1") -> worker_pb2.PullRequest:
    lanes = [worker_pb2.Lane(pool="cpu", model=MODEL)]
    return worker_pb2.PullRequest(
        worker_id="w1",
        epoch="e",
        pool="cpu",
        lanes=lanes,
        budget_tokens=9,
        budget_jobs=9,
        wait_seconds=60,
        batch_id=batch_id,
    )


class FakeCall:
    """A call of gRPC with answers that arrive at a socket."""

    def __init__(self, answers: socket.socket) -> None:
        self._answers, self.written = answers, asyncio.Event()

    async def initial_metadata(self) -> str:
        return "accepted"

    async def write(self, message: multiplex_pb2.MultiplexRequest) -> None:
        self.written.set()

    async def read(self) -> multiplex_pb2.MultiplexResponse:
        data = await asyncio.get_running_loop().sock_recv(self._answers, 1 << 10)
        return multiplex_pb2.MultiplexResponse.FromString(data)

    def cancel(self) -> None:
        pass


@pytest.mark.parametrize("has_arrived", [True, False])
async def test_answer_that_a_busy_process_has_not_read_yet_is_in_time(
    has_arrived: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The event loop is blocked beyond the timeout of the call."""
    monkeypatch.setattr(multiplex, "_LATE_SECONDS", 0.05)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.setblocking(False)
        made = FakeCall(ours)
        stream = multiplex.MultiplexedStream(made)
        calling = asyncio.create_task(stream.call("pull", b"body", 0.1))
        await made.written.wait()
        if has_arrived:
            answer = multiplex_pb2.MultiplexedAnswer(number=1, response=b"answer")
            theirs.send(multiplex_pb2.MultiplexResponse(answers=[answer]).SerializeToString())
        time.sleep(0.3)  # noqa: ASYNC251  # This is the load.
        if has_arrived:
            assert await calling == b"answer"
        else:
            with pytest.raises(grpc.aio.AioRpcError, match="no answer within the timeout"):
                await calling
        await stream.close()
