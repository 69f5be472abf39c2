"""Times of a job's spans."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from services.worker.jobs import spans


def test_moment_is_right_though_its_thread_was_suspended_between_two_clocks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    passed = 100.0
    reads = 0

    def time_ns() -> int:
        nonlocal passed, reads
        reads += 1
        read = int((1_700_000_000 + passed) * 1e9)
        if reads == 1:
            passed += 2.0
        return read

    clocks = SimpleNamespace(monotonic=lambda: passed, time_ns=time_ns)
    monkeypatch.setattr(spans, "time", clocks)
    assert spans._unix_ns(99.5) == int(1_700_000_099.5 * 1e9)
    assert reads == 2
