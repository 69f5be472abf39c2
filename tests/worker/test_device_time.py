"""When a device counts as stalled: not while nobody asks, and not while it computes."""

from __future__ import annotations

from services.worker.jobs.execution.device_time import DeviceTime


def stalled(time: DeviceTime) -> tuple[float, float]:
    """Starved and turnaround seconds."""
    return time.starved_seconds, time.turnaround_seconds


def test_time_before_a_job_was_queued_is_no_stall() -> None:
    time = DeviceTime()
    time.began(100.5, queued_at=100.0, cut_at=100.25)
    assert stalled(time) == (0.25, 0.25)
    time.ended(101.0)
    time.began(200.0, queued_at=200.0, cut_at=200.0)
    assert stalled(time) == (0.25, 0.25)


def test_job_that_was_queued_during_the_pass_before_starves_the_device_from_its_end() -> None:
    time = DeviceTime()
    time.began(100.0, queued_at=100.0, cut_at=None)
    time.ended(102.0)
    time.began(104.0, queued_at=101.0, cut_at=103.5)
    assert stalled(time) == (1.5, 0.5)


def test_batch_that_was_there_already_stalls_the_device_for_the_turnaround() -> None:
    time = DeviceTime()
    time.began(100.0, queued_at=100.0, cut_at=None)
    time.ended(102.0)
    time.began(102.25, queued_at=90.0, cut_at=None)
    assert stalled(time) == (0.0, 0.25)
    time.overtaken(0.125)
    assert stalled(time) == (0.0, 0.375)


def test_job_from_the_future_of_another_clock_is_no_stall() -> None:
    time = DeviceTime()
    time.began(100.0, queued_at=101.0, cut_at=100.0)
    assert stalled(time) == (0.0, 0.0)
