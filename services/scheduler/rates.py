"""What the demand for workers is computed from: how fast work arrives and is done, and how long a new worker takes to come.

Each of the three is a small state, fed with every look by `demand.py`. Pure: the clock is the look's `at`, in seconds.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from itertools import islice
from types import MappingProxyType
from typing import Final

from libs.queue import LaneGauges, LaneKey

FAST_SECONDS: Final = 10.0
SLOW_SECONDS: Final = 90.0
"""Time constants of the two averages of arrivals."""
_LEAST_SECONDS: Final = 10.0
"""What a scheduler that has just started divides its first arrivals by at least: a moment says little about a rate."""
_NOTHING: Final = 1e-6

SEED_BYTES_PER_SECOND: Final[Mapping[str, float]] = MappingProxyType({"cpu": 5e11, "cuda": 5e13})
"""Tokens a second times bytes of weights of one worker, until a worker of the pool has measured the model: MiniLM does 6,000
tokens/s on one core of a CPU (docs/benchmarks.md); an L4 has a hundred times its arithmetic."""
_SEED_BYTES: Final = 400_000_000
_LEAST_BYTES: Final = 50_000_000
LOADED_SECONDS: Final = 10.0
LIGHT_SECONDS: Final = 600.0
"""How fast a lower speed is believed: of a model with work waiting, whose batches are full, and of one without, whose batches are
small and so slower than the worker could be."""

_KEPT_STARTS: Final = 9
_ENOUGH_STARTS: Final = 3
OVERDUE_FACTOR: Final = 3.0
"""A worker that has not come after so many cold starts is not counted on; if it does come, its start counts as that long."""
_LEAST_OVERDUE_SECONDS: Final = 30.0
"""So that starts can be measured where they are configured to take no time."""
YOUNG_SECONDS: Final = 120.0
"""For how long a missing spot worker is waited for before its fallback pool stands in."""


@dataclass(frozen=True, slots=True)
class Rate:
    """Tokens a second that arrive in a lane: over the last seconds, and over the last minute or two."""

    fast: float = 0.0
    slow: float = 0.0

    def __add__(self, other: Rate) -> Rate:
        return Rate(self.fast + other.fast, self.slow + other.slow)


@dataclass(slots=True)
class _Lane:
    """One lane's averages, not yet corrected for the time before the first look, and its counter at the last look."""

    counted_tokens: int
    fast: float = 0.0
    slow: float = 0.0
    last_at: float | None = None


class Arrivals:
    """Two exponential averages for each lane, from the growth of its counter `enqueued_tokens`."""

    def __init__(self) -> None:
        # The state: lanes with arrivals to remember or a counter to compare with; when the first and the last look were.
        self._lanes: dict[LaneKey, _Lane] = {}
        self._began: float | None = None
        self._at = 0.0

    def update(self, gauges: Mapping[LaneKey, LaneGauges], at: float) -> None:
        """A new look. One that is not younger than the last is ignored."""
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

    def rate(self, lane: LaneKey) -> Rate:
        """The lane's averages over the time that this process has been looking."""
        state = self._lanes.get(lane)
        if state is None or self._began is None:
            return Rate()
        # Before the first look nothing is known, which is not the same as that nothing arrived.
        age = max(self._at - self._began, _LEAST_SECONDS)
        return Rate(state.fast / -math.expm1(-age / FAST_SECONDS), state.slow / -math.expm1(-age / SLOW_SECONDS))

    def last_at(self, lane: LaneKey) -> float | None:
        """When the last arrival was seen; None if none was since this process started."""
        state = self._lanes.get(lane)
        return state.last_at if state is not None else None


def _growth(state: _Lane, tokens: int) -> int:
    """Tokens that came since the last look; a counter that fell was forgotten by Redis and began again at 0."""
    grown = tokens - state.counted_tokens if tokens >= state.counted_tokens else tokens
    state.counted_tokens = tokens
    return grown


class Speeds:
    """Tokens a second that one worker of a pool does of a model with full batches."""

    def __init__(self) -> None:
        # The state: by pool and model, kept when the pool has no worker any more.
        self._known: dict[tuple[str, str], float] = {}

    def measured(self, pool: str, model: str, tokens_per_second: float, *, is_loaded: bool, seconds: float) -> None:
        """What the pool's workers report on average, `seconds` after the last report. `is_loaded`: work waits for the model."""
        known = self._known.get((pool, model))
        if known is not None and tokens_per_second < known:
            kept = math.exp(-max(seconds, 0.0) / (LOADED_SECONDS if is_loaded else LIGHT_SECONDS))
            tokens_per_second += (known - tokens_per_second) * kept
        self._known[pool, model] = tokens_per_second

    def of(self, pool: str, model: str, device: str, weight_bytes: int) -> float:
        """Above 0: as measured, else guessed from the device and the size (0: unknown)."""
        return self._known.get((pool, model)) or SEED_BYTES_PER_SECOND[device] / max(weight_bytes or _SEED_BYTES, _LEAST_BYTES)


class ColdStarts:
    """How long one pool takes from wanting another worker until that worker's first heartbeat, and who is still to come.

    What it says feeds back: workers are kept for as long as a start takes. So no single start may move it far: the median of the
    last ones counts, and each as at most OVERDUE_FACTOR times what the earlier ones took.
    """

    def __init__(self) -> None:
        # The state: since when each missing worker is wanted, oldest first; the last starts; workers seen at the last look.
        self._wanted: deque[float] = deque()
        self._starts: deque[float] = deque(maxlen=_KEPT_STARTS)
        self._workers: frozenset[str] = frozenset()

    def came(self, workers: Collection[str], at: float, configured: float) -> None:
        """The pool's live workers at a new look, each named by its process. Each new one is the one that was wanted first of those
        that are counted on: others may never come, because of a quota for instance."""
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
        """So many workers are wanted and not there, since now at the latest. 0 ends every start that is under way."""
        while len(self._wanted) > max(missing, 0):
            self._wanted.pop()
        self._wanted.extend(at for _ in range(missing - len(self._wanted)))

    def seconds(self, configured: float) -> float:
        """The median of the last starts; until a few were measured, what the pool is configured to take."""
        if len(self._starts) < _ENOUGH_STARTS:
            return configured
        return sorted(self._starts)[len(self._starts) // 2]

    def starting(self, at: float, cold_start_seconds: float) -> int:
        """Workers to count on: wanted for not too long."""
        return self._younger(at, _overdue_seconds(cold_start_seconds))

    def young(self, at: float) -> int:
        """Workers wanted for less than YOUNG_SECONDS."""
        return self._younger(at, YOUNG_SECONDS)

    def first_ready_seconds(self, at: float, cold_start_seconds: float) -> float:
        """Until the first of those to count on should be there; a cold start if there is none."""
        overdue = len(self._wanted) - self.starting(at, cold_start_seconds)
        wanted = next(islice(self._wanted, overdue, None), at)
        return max(0.0, cold_start_seconds - (at - wanted))

    def _younger(self, at: float, seconds: float) -> int:
        return sum(at - wanted < seconds for wanted in self._wanted)


def _overdue_seconds(cold_start_seconds: float) -> float:
    return max(OVERDUE_FACTOR * cold_start_seconds, _LEAST_OVERDUE_SECONDS)
