"""A stopping worker sends no pulls and returns late batches immediately."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from shoal.v1 import worker_pb2

from services.worker.jobs.pulling import puller
from services.worker.mesh.link import Link
from tests.worker.fakes import HANG_SECONDS, SLOW, FakeLanes, FakeRouter, encode_job, until
from tests.worker.running import MODEL, RunningWorker, worker


class EndedLanes(FakeLanes):
    """Lanes with pulls that end empty while `is_ended`."""

    is_ended = False

    def lease(self, request: worker_pb2.PullRequest) -> worker_pb2.PullResponse | None:
        return worker_pb2.PullResponse() if self.is_ended else super().lease(request)


class CountingRouter(FakeRouter):
    """Counts waiting pulls. `ends_pulls`: ends those of a draining worker, as routers do from wire
    version 1 on. Batches are sent while `sends_batches` is set.
    """

    def __init__(self, lanes: EndedLanes, *, ends_pulls: bool) -> None:
        super().__init__(lanes)
        self.waiting = 0
        self.sends_batches = asyncio.Event()
        self.sends_batches.set()
        self._own_lanes = lanes
        self._ends_pulls = ends_pulls

    async def Pull(
        self, request: worker_pb2.PullRequest, context: object
    ) -> worker_pb2.PullResponse:
        self.waiting += 1
        try:
            response = await super().Pull(request, context)
            if response.batch_id:
                await self.sends_batches.wait()
            return response
        finally:
            self.waiting -= 1

    async def Heartbeat(
        self, request: worker_pb2.HeartbeatRequest, context: object
    ) -> worker_pb2.HeartbeatResponse:
        if request.draining and self._ends_pulls:
            self._own_lanes.is_ended = True
            self.lanes.rung.set()
        return await super().Heartbeat(request, context)


@asynccontextmanager
async def resting(
    root: Path, *, ends_pulls: bool
) -> AsyncIterator[tuple[RunningWorker, EndedLanes, CountingRouter]]:
    """Run a worker that holds its model and only waits."""
    lanes = EndedLanes()
    router = CountingRouter(lanes, ends_pulls=ends_pulls)
    await router.start()
    try:
        async with worker(root, [router], heartbeat_seconds=5.0) as bay:
            lanes.put(MODEL, encode_job("first", "a"))
            await until(lambda: "first" in lanes.answers and router.waiting == 2)
            await until(lambda: any(one.model == MODEL for one in lanes.heartbeats[-1].models))
            yield bay, lanes, router
    finally:
        await router.stop()


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[worker_pb2.PullRequest]:
    """Record pulls as they are sent: a router sees some of them only after the worker began to
    stop.
    """
    pulls: list[worker_pb2.PullRequest] = []
    pull = Link.pull

    async def counted(link: Link, request: worker_pb2.PullRequest) -> worker_pb2.PullResponse:
        pulls.append(request)
        return await pull(link, request)

    monkeypatch.setattr(Link, "pull", counted)
    return pulls


@pytest.mark.parametrize("ends_pulls", [True, False])
async def test_no_pull_is_sent_once_the_worker_stops(
    tmp_path: Path, sent: list[worker_pb2.PullRequest], ends_pulls: bool
) -> None:
    async with resting(tmp_path, ends_pulls=ends_pulls) as (bay, lanes, router):
        before = len(sent)
        assert before
        bay.stop.set()
        assert bay.done is not None
        await bay.done
        assert len(sent) == before
        await until(lambda: router.waiting == 0, "the router to end the pulls")
        assert lanes.heartbeats[-1].leaving


async def test_batch_received_after_the_stop_is_returned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(puller, "_LAST_PULLS_SECONDS", HANG_SECONDS)
    async with resting(tmp_path, ends_pulls=False) as (bay, lanes, router):
        router.sends_batches.clear()
        lanes.put(MODEL, encode_job("late", SLOW))
        await until(lambda: any("late" in jobs for jobs in lanes.leased.values()))
        bay.stop.set()  # from now on the worker briefly waits for its pulls
        router.sends_batches.set()
        await until(lambda: lanes.handed_back == ["late"])
        assert bay.done is not None
        await bay.done
        assert len(bay.model.batches) == 1
        assert "late" not in lanes.answers
        assert [request.release for request in lanes.completes if not request.jobs] == [True]


async def test_pull_planned_before_the_stop_is_not_sent(
    tmp_path: Path, sent: list[worker_pb2.PullRequest]
) -> None:
    async with resting(tmp_path, ends_pulls=True) as (bay, lanes, _):
        lanes.put(MODEL, encode_job("slow", SLOW))
        await until(lambda: any("slow" in jobs for jobs in lanes.leased.values()))
        await until(lambda: len(bay.model.batches) == 2)
        bay.stop.set()
        await until(lambda: lanes.heartbeats[-1].draining)
        before = len(sent)
        bay.model.gate.set()  # the end of a forward pass wakes the puller
        assert bay.done is not None
        await bay.done
        assert "slow" in lanes.answers
        assert len(sent) == before
