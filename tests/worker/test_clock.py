"""Deadlines count by Redis' clock, whatever the worker's own says."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from shoal.v1 import worker_pb2

from services.worker.mesh.clock import MeshClock
from tests.worker.fakes import FakeLanes, encode_job, routers, until, vector, vectors
from tests.worker.running import MODEL, worker


class Hands:
    """Two clocks moved by hand: one that rises, and the machine's own."""

    def __init__(self) -> None:
        self.rising = 100.0
        self.own = 5000.0
        self.clock = MeshClock(lambda: self.rising, lambda: self.own)

    def call(self, told: float, seconds: float) -> None:
        """One that takes so long and brings the time `told`."""
        asked, self.rising = self.rising, self.rising + seconds
        self.own += seconds
        self.clock.synchronise(round(told * 1000), asked, self.rising)


def test_until_a_router_tells_the_time_the_machine_does() -> None:
    hands = Hands()
    assert hands.clock.now() == 5000
    hands.call(0, 10)
    assert hands.clock.now() == 5010


def test_quickest_answer_counts() -> None:
    hands = Hands()
    hands.call(9009.9, 10)  # a long poll, answered at its end
    assert hands.clock.now() == pytest.approx(9009.9)
    hands.call(9019.99, 10)
    assert hands.clock.now() == pytest.approx(9019.99)
    hands.call(9025.0, 10)  # answered in the middle and long under way: what is known is better
    assert hands.clock.now() == pytest.approx(9029.99)


def test_clock_that_was_set_anew_is_followed_at_once() -> None:
    hands = Hands()
    hands.call(9000, 0.01)
    hands.call(400, 0.01)
    assert hands.clock.now() == pytest.approx(400, abs=0.02)
    hands.call(12000, 0.01)
    assert hands.clock.now() == pytest.approx(12000, abs=0.02)


def test_moments_can_be_told_by_the_machines_own_clock() -> None:
    hands = Hands()
    hands.call(9000, 0.0)
    assert hands.clock.local(9007) == pytest.approx(5007)


class SkewedLanes(FakeLanes):
    """Routers whose time is so many seconds ahead of the worker's."""

    ahead_seconds = 0.0

    def lease(self, request: worker_pb2.PullRequest) -> worker_pb2.PullResponse | None:
        response = super().lease(request)
        if response is not None:
            response.now_unix_ms = int((time.time() + self.ahead_seconds) * 1000)
        return response


def skewed(lanes: SkewedLanes, job_id: str, *, seconds: float) -> worker_pb2.Job:
    """A job that was queued now and is worthless in `seconds`, by the routers' clock."""
    job = encode_job(job_id, "abc", seconds=seconds + lanes.ahead_seconds)
    job.queued_unix_ms += int(lanes.ahead_seconds * 1000)
    return job


@pytest.mark.parametrize("ahead_seconds", [600.0, -600.0])
async def test_worker_whose_clock_is_wrong_by_minutes_neither_drops_good_work_nor_does_dead_work(
    tmp_path: Path, ahead_seconds: float
) -> None:
    lanes = SkewedLanes()
    lanes.ahead_seconds = ahead_seconds
    async with routers(lanes) as running, worker(tmp_path, running) as bay:
        lanes.put(MODEL, skewed(lanes, "good", seconds=60), skewed(lanes, "dead", seconds=-5))
        await until(lambda: {"good", "dead"} <= lanes.answers.keys())
        good = lanes.answer("good")
        assert vectors(good) == [vector("abc")]
        assert good.encode.timings.queue_seconds < 60
        assert lanes.answer("dead").failure.reason == "DEADLINE_PASSED"
        assert bay.model.batches == [[3]]


async def test_answers_of_a_worker_whose_clock_is_ahead_are_not_given_up(tmp_path: Path) -> None:
    lanes = SkewedLanes()
    lanes.ahead_seconds = -600.0
    async with routers(lanes) as running, worker(tmp_path, running) as bay:
        running[0].refuse_completes = True
        lanes.put(MODEL, skewed(lanes, "good", seconds=60))
        await until(lambda: bool(bay.models) and bool(bay.model.batches))
        beats = len(lanes.heartbeats)
        await until(lambda: len(lanes.heartbeats) > beats + 2)  # while it tries
        running[0].refuse_completes = False
        await until(lambda: "good" in lanes.answers)
