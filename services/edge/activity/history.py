"""The edge's last hour in steps of ten seconds, and its last requests. Pure: the clock is an
argument.

Latencies are counted in bins that grow by a factor of 1.2, so a percentile is accurate to 10 %. All
arrays are allocated at the start: `RequestHistory.array_bytes`, 132,480 bytes. Each of the
MAX_REQUESTS last requests takes at most about 1.5 KB.
"""

from __future__ import annotations

import math
from array import array
from collections import deque
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from services.edge.activity.cost import STAGES, Cost

STEP_SECONDS: Final = 10
STEPS: Final = 360
MAX_REQUESTS: Final = 200
_BINS: Final = 80
_FIRST_BIN_SECONDS: Final = 0.001
_GROWTH: Final = 1.2
"""The last bin begins at 1,800 s (0.001 s by 1.2^79), beyond the longest deadline."""
_BINS_PER_E: Final = 1 / math.log(_GROWTH)
_COLUMNS: Final = ("requests", "refused", "failed", "input_tokens", "output_tokens", "queued")
_NO_LATENCIES: Final = array("I", bytes(4 * _BINS))
_UNKNOWN: Final = -1
"""The queue length of a step without a snapshot of the mesh."""
CLIENT_LEFT: Final = 499


@dataclass(slots=True)
class Finished:
    """One request that was answered, refused or abandoned. It is not frozen, which would double the
    time of its construction.

    Attributes:
        at: The Unix time of its end.
        request_id: Its id in the logs.
        route: The path in the table of routes, without values.
        status: The HTTP status; 499 if the client disconnected.
        reason: Why it has no answer or a partial one; empty if it succeeded.
        seconds: The time from its first byte to its last.
        cost: The work and usage.
    """

    at: float
    request_id: str
    route: str
    status: int
    reason: str
    seconds: float
    cost: Cost

    @property
    def is_failed(self) -> bool:
        return self.status >= 500 or (self.status < 400 and bool(self.reason))

    @property
    def is_refused(self) -> bool:
        return 400 <= self.status < 500 and self.status != CLIENT_LEFT

    @property
    def is_answered(self) -> bool:
        return self.status < 400 and not self.reason


class RequestHistory:
    """Counts requests by step. If the clock `now` (Unix time) is set back, the newest step is
    used.
    """

    def __init__(self, now: float) -> None:
        self._begin = self._newest = int(now) // STEP_SECONDS
        # Python arrays count a single request faster than numpy arrays.
        self._latencies = array("I", bytes(4 * STEPS * _BINS))
        self._columns = {name: array("q", bytes(8 * STEPS)) for name in _COLUMNS}
        for row in range(STEPS):
            self._columns["queued"][row] = _UNKNOWN
        self._requests: deque[Finished] = deque(maxlen=MAX_REQUESTS)

    @property
    def array_bytes(self) -> int:
        """Return the bytes of the steps' arrays, which are constant."""
        return sum(len(one) * one.itemsize for one in (self._latencies, *self._columns.values()))

    def note_request(self, one: Finished) -> None:
        """Count a request and remember it without its text."""
        row = self._row(one.at)
        columns, cost = self._columns, one.cost
        columns["requests"][row] += 1
        columns["input_tokens"][row] += cost.input_tokens
        columns["output_tokens"][row] += cost.output_tokens
        if one.is_answered:
            self._latencies[row * _BINS + _latency_bin(one.seconds)] += 1
        else:
            columns["refused"][row] += one.is_refused
            columns["failed"][row] += one.is_failed
        self._requests.append(one)

    def note_queue(self, jobs: int, now: float) -> None:
        """Record the jobs waiting in the mesh's lanes; a step keeps the maximum."""
        row = self._row(now)
        self._columns["queued"][row] = max(jobs, self._columns["queued"][row])

    def content(self, now: float) -> dict[str, Any]:
        """Return the data that the console shows: columns of steps, oldest first, and requests,
        newest first.
        """
        self._row(now)
        first = max(self._begin, self._newest - STEPS + 1)
        rows = np.arange(first, self._newest + 1) % STEPS
        columns: dict[str, list[Any]] = {
            name: [None if value == _UNKNOWN else value for value in (column[row] for row in rows)]
            for name, column in self._columns.items()
        }
        latencies = np.array(self._latencies, np.uint32).reshape(STEPS, _BINS)[rows]
        columns |= {
            name: _percentiles(latencies, share) for name, share in (("p50", 0.50), ("p99", 0.99))
        }
        requests = [_request_content(one) for one in reversed(self._requests)]
        return {
            "step_seconds": STEP_SECONDS,
            "first": first * STEP_SECONDS,
            "now": now,
            "steps": columns,
            "requests": requests,
        }

    def _row(self, now: float) -> int:
        """Return the row of a time, after clearing the rows between it and the newest."""
        step = int(now) // STEP_SECONDS
        if step <= self._newest:
            return self._newest % STEPS
        for new in range(max(self._newest + 1, step - STEPS + 1), step + 1):
            row = new % STEPS
            self._latencies[row * _BINS : (row + 1) * _BINS] = _NO_LATENCIES
            for name, column in self._columns.items():
                column[row] = _UNKNOWN if name == "queued" else 0
        self._newest = step
        return step % STEPS


def _latency_bin(seconds: float) -> int:
    if seconds <= _FIRST_BIN_SECONDS:
        return 0
    return min(_BINS - 1, 1 + int(math.log(seconds / _FIRST_BIN_SECONDS) * _BINS_PER_E))


def _percentiles(latencies: np.ndarray, share: float) -> list[float | None]:
    """Return the middle of each row's bin at this percentile in milliseconds, or None without
    answered requests.
    """
    sums = latencies.cumsum(axis=1)
    totals = sums[:, -1]
    bins = (sums >= np.ceil(totals * share)[:, None]).argmax(axis=1)
    middles = (
        np.where(bins == 0, _FIRST_BIN_SECONDS, _FIRST_BIN_SECONDS * _GROWTH ** (bins - 0.5)) * 1000
    )
    return [
        round(float(one), 3) if total else None for one, total in zip(middles, totals, strict=True)
    ]


def _request_content(one: Finished) -> dict[str, Any]:
    cost = one.cost
    return {
        "at": round(one.at, 3),
        "id": one.request_id,
        "route": one.route,
        "verb": cost.verb,
        "model": cost.model,
        "status": one.status,
        "reason": one.reason,
        "ms": round(one.seconds * 1000, 2),
        "input_tokens": cost.input_tokens,
        "output_tokens": cost.output_tokens,
        "stages": {
            stage: round(seconds * 1000, 2)
            for stage, seconds in zip(STAGES, cost.seconds, strict=True)
            if seconds
        },
    }
