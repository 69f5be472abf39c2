"""When admission reads a request's position in its lane."""

from __future__ import annotations

from dataclasses import replace

from services.router.admission.rules import (
    may_be_late,
)
from services.router.state.throughput import Throughput


def test_queue_position_is_read_for_more_than_a_batch_or_after_backlog() -> None:
    slow = Throughput(1.0, batch_tokens=2048)
    assert not may_be_late(60.0, slow, 2048), "its speed may have been measured in a bad moment"
    assert may_be_late(60.0, slow, 2049)
    assert may_be_late(60.0, replace(slow, drain=1.0), 2048)
    assert not may_be_late(60.0, replace(slow, rate=1e6), 2049)
    assert not may_be_late(60.0, Throughput(), 10**9), "nothing was measured"
