"""Compare a worker's heartbeat with its stored one. Pure.

Every change is read by every router and scheduler, so heartbeats are stored only if they say more
than can be expected from the one before:

1. Ages and times of use that rise with the clock, and small differences of measurements, are no
  change.
2. Measurements that have moved, and whether models are in use, are stored every MEASURE_MS at most.
3. Everything else is stored at once.
"""

from __future__ import annotations

from operator import attrgetter
from typing import Final, Literal

from libs.fleet.snapshot import WorkerModelRecord, WorkerRecord

MEASURE_MS: Final = 10_000
SAME_MS: Final = 2_000
"""Times that differ by less are equal: heartbeats travel for different times."""
SAME_SHARE: Final = 0.1
"""Measurements that differ by at most this share are equal."""
FAR: Final = 1.5
"""A measurement that has changed by this factor is stored at once."""

Change = Literal["none", "measured", "changed"]

_MEASURED: Final = (
    "idle_seconds",
    "resident_seconds",
    "held_jobs",
    "tokens_per_second",
    "tokens_per_byte",
    "measured_batch_tokens",
)
_still = attrgetter(
    *(name for name in WorkerModelRecord.__dataclass_fields__ if name not in _MEASURED)
)
_COMPARED_APART: Final = ("heartbeat_ms", "models", "preempted_in_seconds", "silent_since_ms")
_worker_fields = attrgetter(
    *(
        name
        for name, field in WorkerRecord.__dataclass_fields__.items()
        if field.compare and name not in _COMPARED_APART
    )
)


def change(before: WorkerRecord, now: WorkerRecord) -> Change:
    """Return how the worker's next record differs from the stored one: not at all, in measurements
    that need not be stored yet, or in anything that is to be stored.
    """
    seconds = (now.heartbeat_ms - before.heartbeat_ms) / 1000
    if (
        _worker_fields(before) != _worker_fields(now)
        or not _is_same_end(before.preempted_in_seconds, now.preempted_in_seconds, seconds)
        or before.models.keys() != now.models.keys()
    ):
        return "changed"
    found: Change = "none"
    for model, record in now.models.items():
        earlier = before.models[model]
        if record is earlier:  # of the same list of models on disk
            continue
        if _still(earlier) != _still(record) or any(
            _is_far(one, other) for one, other in _measures(earlier, record)
        ):
            return "changed"
        if not _is_expected(earlier, record, seconds):
            found = "measured"
    if found == "measured" and now.heartbeat_ms - before.heartbeat_ms >= MEASURE_MS:
        return "changed"
    return found


def _measures(before: WorkerModelRecord, now: WorkerModelRecord) -> tuple[tuple[float, float], ...]:
    return (
        (before.tokens_per_second, now.tokens_per_second),
        (before.tokens_per_byte, now.tokens_per_byte),
    )


def _is_expected(before: WorkerModelRecord, now: WorkerModelRecord, seconds: float) -> bool:
    if bool(before.held_jobs) != bool(now.held_jobs):
        return False
    ages = [(before.resident_seconds, now.resident_seconds)]
    if not now.held_jobs:
        ages.append((before.idle_seconds, now.idle_seconds))
    measures = (
        *_measures(before, now),
        (before.measured_batch_tokens, now.measured_batch_tokens),
    )
    return all(
        abs(later - earlier - (seconds if earlier or later else 0)) * 1000 <= SAME_MS
        for earlier, later in ages
    ) and all(abs(later - earlier) <= SAME_SHARE * earlier for earlier, later in measures)


def _is_far(before: float, now: float) -> bool:
    return max(before, now) > FAR * min(before, now)


def _is_same_end(before: float | None, now: float | None, seconds: float) -> bool:
    if before is None or now is None:
        return before is now
    return abs(now - max(0.0, before - seconds)) * 1000 <= SAME_MS
