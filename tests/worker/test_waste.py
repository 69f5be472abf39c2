"""Counts of device time and wasted time: each forward pass once, divided by tokens."""

from __future__ import annotations

from pathlib import Path

import pytest
from shoal.v1 import worker_pb2

from services.worker.jobs.held import HeldJob, Lease
from services.worker.jobs.waste import Waste
from services.worker.memory.resident import Resident
from tests.worker.fakes import SLOW, FakeLanes, FakeModel, FakeRouter, encode_job, routers, until
from tests.worker.running import MODEL, worker


def held() -> HeldJob:
    resident = Resident("org/fake", FakeModel(), load_seconds=0.0, loaded_at=0.0, last_used=0.0)
    job = encode_job("job", "text")
    return HeldJob(
        id(job),
        job,
        Lease(worker_pb2.Lane(), "1", 15.0),
        resident,
        received_at=0.0,
        queue_seconds=0.0,
    )


def test_job_cancelled_between_passes_wastes_all_of_them() -> None:
    waste, gone, kept = Waste(), held(), held()
    waste.computed([gone, kept, gone], [10, 60, 30], 2.0)
    assert (waste.device_seconds, waste.wasted_seconds) == (2.0, 0.0)
    gone.unwanted = True
    waste.dropped(gone)
    assert waste.wasted_seconds == pytest.approx(0.8)
    waste.dropped(gone)
    assert waste.wasted_seconds == pytest.approx(0.8)
    assert kept.device_seconds == pytest.approx(1.2)


def test_job_cancelled_during_a_pass_wastes_its_share() -> None:
    waste, gone, kept = Waste(), held(), held()
    waste.computed([gone], [10], 1.0)
    gone.unwanted = True
    waste.dropped(gone)
    waste.computed([gone, kept], [10, 30], 1.0)
    assert waste.device_seconds == 2.0
    assert waste.wasted_seconds == pytest.approx(1.25)
    waste.refused(0.5)
    assert waste.wasted_seconds == pytest.approx(1.75)


class RefusingRouter(FakeRouter):
    """Receives answers and accepts none."""

    async def Complete(
        self, request: worker_pb2.CompleteRequest, context: object
    ) -> worker_pb2.CompleteResponse:
        await super().Complete(request, context)
        return worker_pb2.CompleteResponse(accepted=0)


async def test_heartbeats_report_cancelled_work_and_refused_answers(tmp_path: Path) -> None:
    lanes = FakeLanes()
    async with routers(lanes) as running, worker(tmp_path, running) as bay:
        lanes.put(MODEL, encode_job("good", "a"))
        await until(lambda: "good" in lanes.answers)
        await until(lambda: lanes.heartbeats[-1].device_seconds > 0)
        assert lanes.heartbeats[-1].wasted_seconds == 0
        before = lanes.heartbeats[-1].device_seconds
        lanes.put(MODEL, encode_job("slow", SLOW))
        await until(lambda: len(bay.model.batches) == 2)
        batch = next(name for name, jobs in lanes.leased.items() if "slow" in jobs)
        reported = lanes.next_response = worker_pb2.HeartbeatResponse(
            cancelled=[worker_pb2.CancelledJobs(batch_id=batch, job_ids=["slow"])]
        )
        await until(lambda: lanes.next_response is not reported)
        beats_before = len(lanes.heartbeats)
        await until(
            lambda: len(lanes.heartbeats) > beats_before
        )  # the next is sent once the worker has received it
        await until(lambda: any(one.batch_id == batch and one.release for one in lanes.completes))
        bay.model.gate.set()
        await until(lambda: lanes.heartbeats[-1].wasted_seconds > 0)
        last = lanes.heartbeats[-1]
        assert last.wasted_seconds == pytest.approx(last.device_seconds - before)
        assert "slow" not in lanes.answers


async def test_refused_answers_are_waste(tmp_path: Path) -> None:
    lanes = FakeLanes()
    router = RefusingRouter(lanes)
    await router.start()
    try:
        async with worker(tmp_path, [router]):
            lanes.put(MODEL, encode_job("a", "a"), encode_job("b", "bb"))
            await until(lambda: {"a", "b"} <= lanes.answers.keys())
            # The answers may be refused one by one.
            await until(
                lambda: (
                    lanes.heartbeats[-1].device_seconds > 0
                    and lanes.heartbeats[-1].wasted_seconds
                    == pytest.approx(lanes.heartbeats[-1].device_seconds)
                ),
                "all device time to be waste",
            )
    finally:
        await router.stop()
