"""Fair order of making answers: one queue per caller, in slices, on a worker with a single
finishing thread.
"""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from operator import attrgetter
from pathlib import Path

import pytest
from shoal.v1 import worker_pb2

from services.worker.jobs.answers import finisher
from services.worker.jobs.held import HeldJob, Lease
from services.worker.jobs.pulling.preparing import (
    MAX_AWAY,
    SMALL_BYTES,
    GiveWay,
    Preparation,
    Preparers,
)
from services.worker.memory.resident import Resident
from tests.support.waiting import wait_until
from tests.worker.fakes import (
    HANG_SECONDS,
    LASTING,
    STUCK,
    FakeLanes,
    FakeModel,
    encode_job,
    routers,
    until,
    vector,
    vectors,
)
from tests.worker.running import MODEL, RunningWorker, worker


def job(name: str, tenant: str, text: str, seconds: float = 600.0) -> worker_pb2.Job:
    made = encode_job(name, text, seconds=seconds)
    made.tenant = tenant
    return made


@asynccontextmanager
async def busy(
    root: Path, text: str, monkeypatch: pytest.MonkeyPatch, *, seconds: float = 600.0
) -> AsyncIterator[tuple[FakeLanes, RunningWorker]]:
    """Occupy the finishing thread with an answer that does not end by itself. No answer is small
    enough for the device thread.
    """
    monkeypatch.setattr(finisher, "SMALL_OUTPUT_BYTES", 0)
    lanes = FakeLanes()
    async with (
        routers(lanes) as running,
        worker(root, running, threads=2, grace_seconds=0.0) as bay,
    ):
        lanes.put(MODEL, job("heavy", "heavy", text, seconds))
        await until(lambda: bool(bay.models) and bay.model.lasting == 1)
        yield lanes, bay


async def test_light_tenant_is_answered_while_another_answer_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with busy(tmp_path, LASTING, monkeypatch) as (lanes, bay):
        lanes.put(MODEL, job("light", "light", "a"))
        await until(lambda: "light" in lanes.answers)
        assert vectors(lanes.answer_of("light")) == [vector("a")]
        assert bay.model.lasting == 1
        assert "heavy" not in lanes.answers


async def test_light_tenant_is_answered_while_another_answer_does_not_yield(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with busy(tmp_path, STUCK, monkeypatch) as (lanes, bay):
        lanes.put(MODEL, job("light", "light", "a"))
        await until(lambda: "light" in lanes.answers)
        assert bay.model.lasting == 1
        bay.model.gate.set()
        await until(lambda: "heavy" in lanes.answers)
        assert vectors(lanes.answer_of("heavy")) == [vector(STUCK)]


async def test_answer_of_a_cancelled_job_is_abandoned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with busy(tmp_path, LASTING, monkeypatch) as (lanes, bay):
        (batch,) = (batch for batch, jobs in lanes.leased.items() if "heavy" in jobs)
        cancelled = worker_pb2.CancelledJobs(batch_id=batch, job_ids=["heavy"])
        lanes.next_response = worker_pb2.HeartbeatResponse(cancelled=[cancelled])
        await until(lambda: not bay.model.lasting)
        assert not lanes.answers


async def test_answer_of_an_expired_job_is_abandoned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with busy(tmp_path, LASTING, monkeypatch, seconds=120.0) as (lanes, bay):
        lanes.advance_clock(300.0)
        await until(lambda: "heavy" in lanes.answers)
        assert (
            "the deadline passed before the job was finished"
            in lanes.answer_of("heavy").failure.message
        )
        assert not bay.model.lasting


class Bench:
    """Finishes a job in the number of slices in its name, on one thread. The first job waits for
    `begin`.
    """

    def __init__(self, threads: ThreadPoolExecutor) -> None:
        self.now = 0.0
        self.done: list[str] = []
        self.portions: list[list[str]] = []
        self.begin, self.begun = threading.Event(), threading.Event()
        size = attrgetter("finish_bytes")
        self.queue = Preparation(
            Preparers(threads, 1),
            self._finish,
            clock=lambda: self.now,
            serves_others=lambda _: False,
            size=size,
        )
        self._resident = Resident("org/fake", FakeModel(), 0.0, 0.0, 0.0)

    def held(self, name: str, tenant: str, finish_bytes: int) -> HeldJob:
        lease = Lease(worker_pb2.Lane(model="org/fake"), "1", 15.0)
        held = HeldJob(
            len(name),
            job(name, tenant, "a"),
            lease,
            self._resident,
            received_at=0.0,
            queue_seconds=0.0,
        )
        held.finish_bytes = finish_bytes
        return held

    def _finish(self, jobs: list[HeldJob], give_way: GiveWay) -> None:
        self.begun.set()
        assert self.begin.wait(HANG_SECONDS)
        self.portions.append([held.job.job_id for held in jobs])
        for held in jobs:
            for _ in range(int(held.job.job_id.partition(" ")[2])):
                self.now += 0.01
                give_way()
            self.done.append(held.job.job_id)


def test_jobs_with_large_outputs_are_finished_separately() -> None:
    with ThreadPoolExecutor(1 + MAX_AWAY) as threads:
        bench = Bench(threads)
        bench.queue.add([bench.held("first 100", "a", SMALL_BYTES + 1)])
        assert bench.begun.wait(HANG_SECONDS)
        bench.queue.add([bench.held("heavy 100", "a", SMALL_BYTES), bench.held("light 1", "b", 1)])
        bench.begin.set()
        wait_until(lambda: len(bench.done) == 3, what="all answers")
        assert bench.portions == [["first 100"], ["light 1"], ["heavy 100"]]
        assert bench.done == ["light 1", "first 100", "heavy 100"]


def test_small_answers_of_one_batch_are_delivered_together() -> None:
    with ThreadPoolExecutor(1 + MAX_AWAY) as threads:
        bench = Bench(threads)
        bench.begin.set()
        bench.queue.add([bench.held("one 1", "a", 100), bench.held("two 1", "b", 100)])
        wait_until(lambda: len(bench.done) == 2, what="both answers")
        assert bench.portions == [["one 1", "two 1"]]
