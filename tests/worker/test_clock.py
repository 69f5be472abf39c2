"""Deadlines use Redis' clock, not the worker's."""

from __future__ import annotations

from pathlib import Path

import pytest
from shoal.v1 import worker_pb2

from services.worker.mesh.clock import MeshClock
from tests.worker.fakes import FakeLanes, encode_job, routers, until, vector, vectors
from tests.worker.running import MODEL, worker


class ManualClocks:
    """Two manual clocks: a monotonic one, and the machine's."""

    def __init__(self) -> None:
        self.rising = 100.0
        self.own = 5000.0
        self.clock = MeshClock(lambda: self.rising, lambda: self.own)

    def call(self, reported: float, seconds: float) -> None:
        """Simulate a call of this duration that returns the router time `reported`."""
        asked, self.rising = self.rising, self.rising + seconds
        self.own += seconds
        self.clock.synchronise(round(reported * 1000), asked, self.rising)


def test_machine_clock_is_used_until_a_router_sends_its_time() -> None:
    clocks = ManualClocks()
    assert clocks.clock.now() == 5000
    clocks.call(0, 10)
    assert clocks.clock.now() == 5010


def test_quickest_reply_determines_the_estimate() -> None:
    clocks = ManualClocks()
    clocks.call(9009.9, 10)  # a long poll, answered at its end
    assert clocks.clock.now() == pytest.approx(9009.9)
    clocks.call(9019.99, 10)
    assert clocks.clock.now() == pytest.approx(9019.99)
    clocks.call(9025.0, 10)  # a slow call: the known estimate is better
    assert clocks.clock.now() == pytest.approx(9029.99)


def test_reset_clock_is_followed_immediately() -> None:
    clocks = ManualClocks()
    clocks.call(9000, 0.01)
    clocks.call(400, 0.01)
    assert clocks.clock.now() == pytest.approx(400, abs=0.02)
    clocks.call(12000, 0.01)
    assert clocks.clock.now() == pytest.approx(12000, abs=0.02)


def test_times_convert_to_the_machine_clock() -> None:
    clocks = ManualClocks()
    clocks.call(9000, 0.0)
    assert clocks.clock.local(9007) == pytest.approx(5007)


def skewed(lanes: FakeLanes, job_id: str, *, seconds: float) -> worker_pb2.Job:
    """Make a job that was queued now and expires in `seconds`, by the routers' clock."""
    job = encode_job(job_id, "abc", seconds=seconds + lanes.ahead_seconds)
    job.queued_unix_ms += int(lanes.ahead_seconds * 1000)
    return job


@pytest.mark.parametrize("ahead_seconds", [600.0, -600.0])
async def test_worker_with_a_wrong_clock_applies_deadlines_correctly(
    tmp_path: Path, ahead_seconds: float
) -> None:
    lanes = FakeLanes(ahead_seconds=ahead_seconds)
    async with routers(lanes) as running, worker(tmp_path, running) as bay:
        lanes.put(MODEL, skewed(lanes, "good", seconds=60), skewed(lanes, "dead", seconds=-5))
        await until(lambda: {"good", "dead"} <= lanes.answers.keys())
        good = lanes.answer_of("good")
        assert vectors(good) == [vector("abc")]
        assert good.encode.timings.queue_seconds < 60
        assert lanes.answer_of("dead").failure.reason == "DEADLINE_PASSED"
        assert bay.model.batches == [[3]]


async def test_worker_with_a_fast_clock_keeps_retrying_answers(tmp_path: Path) -> None:
    lanes = FakeLanes(ahead_seconds=-600.0)
    async with routers(lanes) as running, worker(tmp_path, running) as bay:
        running[0].refuse_completes = True
        lanes.put(MODEL, skewed(lanes, "good", seconds=60))
        await until(lambda: bool(bay.models) and bool(bay.model.batches))
        beats = len(lanes.heartbeats)
        await until(lambda: len(lanes.heartbeats) > beats + 2)  # during the retries
        running[0].refuse_completes = False
        await until(lambda: "good" in lanes.answers)
