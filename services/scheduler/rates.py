"""Estimators for autoscaling: arrival rates, speeds of models, and cold start times of workers.

Each of the three is a small state that `demand.py` updates with every snapshot. Pure: the clock is
the snapshot's `at`, in seconds.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Final

from libs.queue import LaneGauges, LaneKey
from libs.work_estimate import assumed_speed

FAST_SECONDS: Final = 10.0
SLOW_SECONDS: Final = 90.0
"""Time constants of the two exponential averages of arrivals."""
_MIN_OBSERVED_SECONDS: Final = 10.0
"""Minimum observation time assumed for rates: the first moments after a scheduler's start say
little about them.
"""
_NOTHING: Final = 1e-6

LOADED_SECONDS: Final = 10.0
LIGHT_SECONDS: Final = 600.0
"""Time constants for adopting a lower measured speed: of a model with waiting work and full
batches, and of one without, because its small batches are slower than the worker could be.
"""

_KEPT_STARTS: Final = 9
_ENOUGH_STARTS: Final = 3
OVERDUE_FACTOR: Final = 3.0
"""A worker that has not started after this multiple of a cold start no longer counts; if it does
start, this multiple is recorded.
"""
_MIN_OVERDUE_SECONDS: Final = 30.0
"""The minimum, so that starts can be measured if they are configured to take no time."""
YOUNG_SECONDS: Final = 120.0
"""Time to wait for a missing spot worker before its fallback pool replaces it."""


@dataclass(frozen=True, slots=True)
class ArrivalRate:
    """The arrival rate of a lane in tokens per second: averaged over the last seconds, and over the
    last minute or two.
    """

    fast: float = 0.0
    slow: float = 0.0

    def __add__(self, other: ArrivalRate) -> ArrivalRate:
        return ArrivalRate(self.fast + other.fast, self.slow + other.slow)


@dataclass(slots=True)
class _Lane:
    """One lane's averages, before bias correction for the time before the first snapshot, and its
    counter at the last snapshot.
    """

    counted_tokens: int
    fast: float = 0.0
    slow: float = 0.0
    last_at: float | None = None


class LaneArrivals:
    """Two exponential averages for each lane, from the growth of its counter `enqueued_tokens`."""

    def __init__(self) -> None:
        # The state: lanes with averages above 0 or a counter to compare with; the times of the
        # first and the last snapshot.
        self._lanes: dict[LaneKey, _Lane] = {}
        self._began: float | None = None
        self._at = 0.0

    def update(self, gauges: Mapping[LaneKey, LaneGauges], at: float) -> None:
        """Add a new snapshot. One that is not newer than the last is ignored."""
        if self._began is None:
            self._began = self._at = at
            self._lanes = {lane: _Lane(gauge.enqueued_tokens) for lane, gauge in gauges.items()}
            return
        seconds = at - self._at
        if seconds <= 0:
            return
        self._at = at
        fast, slow = math.exp(-seconds / FAST_SECONDS), math.exp(-seconds / SLOW_SECONDS)
        for lane in gauges.keys() - self._lanes.keys():
            self._lanes[lane] = _Lane(0)
        for lane, state in list(self._lanes.items()):
            gauge = gauges.get(lane)
            tokens = _growth(state, gauge.enqueued_tokens if gauge is not None else 0)
            state.fast = state.fast * fast + (1 - fast) * tokens / seconds
            state.slow = state.slow * slow + (1 - slow) * tokens / seconds
            if tokens:
                state.last_at = at
            if gauge is None and state.slow < _NOTHING:
                del self._lanes[lane]

    def rate(self, lane: LaneKey) -> ArrivalRate:
        """Return the lane's averages over the observation time of this process."""
        state = self._lanes.get(lane)
        if state is None or self._began is None:
            return ArrivalRate()
        # Bias correction: arrivals before the first snapshot are unknown, not 0.
        age = max(self._at - self._began, _MIN_OBSERVED_SECONDS)
        return ArrivalRate(
            state.fast / -math.expm1(-age / FAST_SECONDS),
            state.slow / -math.expm1(-age / SLOW_SECONDS),
        )

    def last_at(self, lane: LaneKey) -> float | None:
        """Return when the last arrival was seen; None if none was since this process started."""
        state = self._lanes.get(lane)
        return state.last_at if state is not None else None


def _growth(state: _Lane, tokens: int) -> int:
    """Return the tokens that arrived since the last snapshot. A counter that fell was lost by Redis
    and restarted at 0.
    """
    grown = tokens - state.counted_tokens if tokens >= state.counted_tokens else tokens
    state.counted_tokens = tokens
    return grown


class Speeds:
    """The speed of one worker of a pool with full batches of a model, in tokens per second."""

    def __init__(self) -> None:
        # The state: by pool and model, kept when the pool has no worker any more.
        self._known: dict[tuple[str, str], float] = {}

    def measured(
        self, pool: str, model: str, tokens_per_second: float, *, is_loaded: bool, seconds: float
    ) -> None:
        """Add the average that the pool's workers report, `seconds` after the last one.
        `is_loaded`: work waits for the model.
        """
        known = self._known.get((pool, model))
        if known is not None and tokens_per_second < known:
            kept = math.exp(-max(seconds, 0.0) / (LOADED_SECONDS if is_loaded else LIGHT_SECONDS))
            tokens_per_second += (known - tokens_per_second) * kept
        self._known[pool, model] = tokens_per_second

    def estimate(self, pool: str, model: str, device: str, weight_bytes: int) -> float:
        """Return tokens per second, above 0: measured, else assumed for the device and the model's
        size (0: unknown).
        """
        return self._known.get((pool, model)) or assumed_speed(device, weight_bytes)


class ColdStarts:
    """The time of one pool from the request for another worker until that worker's first heartbeat,
    and the workers still starting.

    The estimate feeds back, because workers are kept for as long as a start takes. So no single
    start may move it far: it is the median of the last starts, and each counts as at most
    OVERDUE_FACTOR times the earlier estimate.
    """

    def __init__(self) -> None:
        # The state: since when each missing worker is wanted, oldest first; the last starts;
        # workers in the last snapshot.
        self._wanted: deque[float] = deque()
        self._starts: deque[float] = deque(maxlen=_KEPT_STARTS)
        self._workers: frozenset[str] = frozenset()

    def record_workers(self, workers: Collection[str], at: float, configured: float) -> None:
        """Record the pool's live workers in a new snapshot, each named by its process.

        Each new one is matched with the oldest wanted worker that is not overdue: overdue ones may
        never start, for instance because of a quota.
        """
        for _ in set(workers) - self._workers:
            if self._wanted:
                self._measure(at, self.seconds(configured))
        self._workers = frozenset(workers)

    def _measure(self, at: float, cold_start_seconds: float) -> None:
        overdue = len(self._wanted) - self.starting(at, cold_start_seconds)
        first = overdue if overdue < len(self._wanted) else 0
        seconds = at - self._wanted[first]
        del self._wanted[first]
        if seconds > 0:
            self._starts.append(min(seconds, _overdue_seconds(cold_start_seconds)))

    def want(self, missing: int, at: float) -> None:
        """Set how many workers are wanted and missing, since now at the latest. 0 cancels all
        starts in progress.
        """
        while len(self._wanted) > max(missing, 0):
            self._wanted.pop()
        self._wanted.extend(at for _ in range(missing - len(self._wanted)))

    def seconds(self, configured: float) -> float:
        """Return the median of the last starts; until three were measured, the configured time."""
        if len(self._starts) < _ENOUGH_STARTS:
            return configured
        return sorted(self._starts)[len(self._starts) // 2]

    def starting(self, at: float, cold_start_seconds: float) -> int:
        """Return the number of starting workers that are not overdue."""
        return self._younger(at, _overdue_seconds(cold_start_seconds))

    def young(self, at: float) -> int:
        """Return the number of workers wanted for less than YOUNG_SECONDS."""
        return self._younger(at, YOUNG_SECONDS)

    def first_ready_seconds(self, at: float, cold_start_seconds: float) -> float:
        """Return the time until the first starting worker should be present; a whole cold start
        without one.
        """
        overdue = len(self._wanted) - self.starting(at, cold_start_seconds)
        wanted = next(islice(self._wanted, overdue, None), at)
        return max(0.0, cold_start_seconds - (at - wanted))

    def _younger(self, at: float, seconds: float) -> int:
        return sum(at - wanted < seconds for wanted in self._wanted)


def _overdue_seconds(cold_start_seconds: float) -> float:
    return max(OVERDUE_FACTOR * cold_start_seconds, _MIN_OVERDUE_SECONDS)
