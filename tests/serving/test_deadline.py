"""The deadline of a call on a monotonic clock."""

from __future__ import annotations

from libs.serving.calls.deadline import Deadline


def test_remaining_time_falls_with_the_clock_and_ends_at_zero() -> None:
    deadline = Deadline.after(2.0, now=10.0)
    assert [deadline.remaining(now) for now in (10.0, 11.5, 12.0, 13.0)] == [2.0, 0.5, 0.0, 0.0]
