"""Device stalls count only while jobs are queued and the device does not compute."""

from __future__ import annotations

from services.worker.jobs.execution.device_time import DeviceTime


def stalled(time: DeviceTime) -> tuple[float, float]:
    """Return starved and turnaround seconds."""
    return time.starved_seconds, time.turnaround_seconds


def test_time_without_queued_jobs_is_not_a_stall() -> None:
    time = DeviceTime()
    time.began(100.5, queued_at=100.0, cut_at=100.25)
    assert stalled(time) == (0.25, 0.25)
    time.ended(101.0)
    time.began(200.0, queued_at=200.0, cut_at=200.0)
    assert stalled(time) == (0.25, 0.25)


def test_job_queued_during_a_pass_starves_the_device_from_its_end() -> None:
    time = DeviceTime()
    time.began(100.0, queued_at=100.0, cut_at=None)
    time.ended(102.0)
    time.began(104.0, queued_at=101.0, cut_at=103.5)
    assert stalled(time) == (1.5, 0.5)


def test_waiting_batch_counts_as_turnaround() -> None:
    time = DeviceTime()
    time.began(100.0, queued_at=100.0, cut_at=None)
    time.ended(102.0)
    time.began(102.25, queued_at=90.0, cut_at=None)
    assert stalled(time) == (0.0, 0.25)
    time.preempting_seconds(0.125)
    assert stalled(time) == (0.0, 0.375)


def test_queue_time_in_the_future_is_not_a_stall() -> None:
    time = DeviceTime()
    time.began(100.0, queued_at=101.0, cut_at=100.0)
    assert stalled(time) == (0.0, 0.0)
