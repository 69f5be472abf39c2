"""Answers on their way to a router: the contents of a call, and the call that ends a lease."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any, cast

from shoal.v1 import worker_pb2

from services.worker.jobs.answers import delivery
from services.worker.jobs.answers.delivery import Delivery
from services.worker.jobs.held import HeldJob, Lease
from services.worker.jobs.waste import Waste
from services.worker.memory.resident import Resident
from tests.worker.fakes import FakeModel, encode_job, until


class FakeLink:
    """Records calls to a router, which end once `gate` is set."""

    def __init__(self) -> None:
        self.identity = SimpleNamespace(worker_id="w1")
        self.clock = SimpleNamespace(local=lambda unix: unix)
        self.calls: list[worker_pb2.CompleteRequest] = []
        self.gate = asyncio.Event()

    async def complete(
        self, request: worker_pb2.CompleteRequest, until: float, traceparent: str
    ) -> int:
        self.calls.append(request)
        await self.gate.wait()
        return len(request.jobs)

    def jobs(self) -> list[tuple[list[str], bool]]:
        """Return the jobs of each call, and whether it ended the lease."""
        return [([job.job_id for job in call.jobs], call.release) for call in self.calls]


def make_lease(*names: str) -> Lease:
    lease = Lease(worker_pb2.Lane(model="org/fake"), "batch", 15.0)
    resident = Resident("org/fake", FakeModel(), 0.0, 0.0, 0.0)
    for number, name in enumerate(names):
        job = encode_job(name, "text")
        lease.jobs[number] = HeldJob(
            number, job, lease, resident, received_at=0.0, queue_seconds=0.0
        )
    return lease


@asynccontextmanager
async def delivering() -> AsyncIterator[tuple[Delivery, FakeLink, list[Resident]]]:
    link, released = FakeLink(), list[Resident]()
    async with asyncio.TaskGroup() as tasks:
        yield Delivery(cast(Any, link), tasks, released.append, waste=Waste()), link, released


async def test_answers_that_finish_during_a_call_share_the_next_one() -> None:
    lease = make_lease("a", "b", "c")
    first, *others = lease.jobs.values()
    async with delivering() as (answers, link, released):
        answers.open(lease)
        assert answers.lease_seconds == 15.0
        answers.deliver([(first, b"1")])
        await until(lambda: len(link.calls) == 1, "the first call")
        for held in others:
            answers.deliver([(held, b"2")])
        assert answers.held_batches() != []
        link.gate.set()
        await answers.settled()
    assert link.jobs() == [(["a"], False), (["b", "c"], True)]
    assert (answers.held_batches(), len(released)) == ([], 3)


async def test_cancelled_job_gets_no_answer_and_the_lease_ends() -> None:
    lease = make_lease("a", "b")
    first, second = lease.jobs.values()
    async with delivering() as (answers, link, released):
        link.gate.set()
        answers.open(lease)
        answers.cancel(worker_pb2.CancelledJobs(batch_id="batch", job_ids=["a"]))
        answers.deliver([(first, b"late"), (second, b"2")])
        await answers.settled()
    assert link.jobs() == [(["b"], True)]
    assert (first.unwanted, second.unwanted, len(released)) == (True, False, 2)


async def test_lost_lease_drops_all_jobs() -> None:
    lease = make_lease("a", "b")
    async with delivering() as (answers, link, released):
        link.gate.set()
        answers.open(lease)
        answers.cancel(worker_pb2.CancelledJobs(batch_id="other", lost=True))
        assert len(lease.jobs) == 2
        answers.cancel(worker_pb2.CancelledJobs(batch_id="batch", lost=True))
        await answers.settled()
    assert (link.jobs(), len(released)) == ([([], True)], 2)


async def test_lease_with_an_unreadable_job_is_left_to_expire() -> None:
    lease = make_lease("a")
    lease.unreadable = 1
    async with delivering() as (answers, link, _):
        link.gate.set()
        answers.open(lease)
        answers.deliver([(held, b"1") for held in lease.jobs.values()])
        await answers.settled()
    assert link.jobs() == [(["a"], False)]


async def test_large_answers_are_divided_over_calls_or_refused(monkeypatch: Any) -> None:
    monkeypatch.setattr(delivery, "_MAX_CALL_BYTES", 100)
    monkeypatch.setattr(delivery, "MAX_RESULT_BYTES", 1 << 20)
    lease = make_lease("a", "b", "c")
    a, b, c = lease.jobs.values()
    async with delivering() as (answers, link, _):
        link.gate.set()
        answers.open(lease)
        answers.deliver([(a, bytes(60)), (b, bytes(60)), (c, bytes((1 << 20) + 1))])
        await answers.settled()
    assert link.jobs() == [(["a"], False), (["b"], False), (["c"], True)]
    refused = worker_pb2.JobResult.FromString(link.calls[-1].jobs[0].result)
    assert refused.failure.reason == "INVALID_INPUT"
    assert "limit 1 MiB" in refused.failure.message
