"""Autoscaling: compute how many workers a pool should have, by the formula of docs/scaling.md with
hysteresis. Pure.

1. `compute_need` computes the need at one moment.
2. `Track` turns a series of needs into a number that rises at once and falls late.
3. `Demand` keeps one for every pool, updated by `control.py` with every snapshot of the mesh.

Every scheduler does this, leader or not, and all give the same answers: from the data in Redis, and
for history from the numbers that the leader published last.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Final, Literal

from libs.catalog.pools import Pools, PoolSpec
from libs.fleet import LOADING_STATES, FleetSnapshot, LeaderRecord, WorkerRecord
from libs.queue import LaneGauges, LaneKey
from libs.work_estimate import average_speed, busy_copies, work_seconds
from services.scheduler.rates import ArrivalRate, ColdStarts, LaneArrivals, Speeds
from services.scheduler.view import MeshSnapshot

PANIC_RATIO: Final = 2.0
"""The fast average of arrivals counts if it is at least this multiple of the slow one (Knative's
panic ratio).
"""
LEASED_SHARE: Final = 0.5
"""Leased work is half done, on average."""
SLACK: Final = 0.1
HOLD_SECONDS: Final = 300.0
HOLD_STARTS: Final = 5.0
"""Scale-down needs this time, and this number of cold starts, without a need for more."""
FIND_SECONDS: Final = 10.0
"""Time after its start in which a scheduler sees every worker that is present."""
MISSED_HEARTBEATS_MS: Final = 6_000
"""A worker that has been silent for this time (three heartbeats) counts as lost, before the
registry forgets it.
"""
LOAD_FAILURES: Final = 3
"""A model that this number of workers failed to load, and none holds, causes no demand for
workers.
"""
HOT_SECONDS: Final = 10.0
HOT_LOADS: Final = 10.0
"""A model belongs to the working set if it was used within HOT_SECONDS, or within this multiple of
its load time.
"""
FORGET_SECONDS: Final = 3600.0
"""Time for which unused pools and callers' options are remembered."""
MAX_OPTIONS: Final = 256
_EPSILON: Final = 1e-9

Reason = Literal[
    "idle", "steady", "drain", "enough", "minimum", "pinned", "memory", "fallback", "maximum"
]
"""The term that decided the need, in order: none, arrivals, backlog, backlog that present workers
finish before new ones could help, a minimum (`min_workers` or a caller's minWarm), a pinned model,
the memory of the working set, another pool's shortage, `max_workers`.
"""


@dataclass(frozen=True, slots=True)
class ModelWork:
    """One model's work in one pool."""

    model: str
    queued_tokens: int
    leased_tokens: int
    rate: ArrivalRate
    """Arrivals in tokens per second."""
    tokens_per_second: float
    """One worker's throughput."""

    @property
    def offered_load(self) -> float:
        """Return the number of workers that the arrivals keep busy."""
        is_panic = self.rate.fast >= PANIC_RATIO * self.rate.slow
        arrivals = max(self.rate.slow, self.rate.fast if is_panic else 0.0)
        return busy_copies(arrivals, self.tokens_per_second)

    @property
    def backlog_seconds(self) -> float:
        """Return the seconds that one worker would need for the backlog."""
        tokens = self.queued_tokens + LEASED_SHARE * self.leased_tokens
        return work_seconds(tokens, self.tokens_per_second)


@dataclass(frozen=True, slots=True)
class PoolInput:
    """A pool at one moment, without work that it cannot serve. Times in seconds."""

    pool: str
    at: float
    cold_start_seconds: float
    """Time from the request for another worker to its first heartbeat."""
    first_ready_seconds: float
    """Time until the first starting worker should be present; a whole cold start if none is
    starting.
    """
    models: tuple[ModelWork, ...] = ()
    ready: int = 0
    starting: int = 0
    preempting: int = 0
    unhealthy: int = 0
    is_loading: bool = False
    is_pinned: bool = False
    hot_bytes: int = 0
    """The working set: one copy of each model in use."""
    usable_bytes: int = 0
    """Memory for models on one worker's device; 0: unknown."""
    last_arrival: float | None = None

    @property
    def live(self) -> int:
        """Return the present workers, including those about to be lost."""
        return self.ready + self.preempting + self.unhealthy

    @property
    def queued_tokens(self) -> int:
        return sum(work.queued_tokens for work in self.models)

    @property
    def leased_tokens(self) -> int:
        return sum(work.leased_tokens for work in self.models)

    @property
    def offered_load(self) -> float:
        return sum(work.offered_load for work in self.models)

    @property
    def backlog_seconds(self) -> float:
        return sum(work.backlog_seconds for work in self.models)


@dataclass(frozen=True, slots=True)
class DemandOptions:
    """Settings that a caller of the scaler may override; None: the pool's setting."""

    min_warm: int | None = None
    drain_seconds: float | None = None
    target_utilization: float | None = None


@dataclass(frozen=True, slots=True)
class Goals:
    """The operator's scaling goals for a pool; fields as in PoolSpec."""

    min_workers: int = 0
    max_workers: int = 10
    drain_seconds: float = 30.0
    target_utilization: float = 0.75
    keep_warm_seconds: float | None = None

    @staticmethod
    def combine(spec: PoolSpec, options: DemandOptions) -> Goals:
        """Combine the pool's goals with the caller's overrides."""
        return Goals(
            spec.min_workers if options.min_warm is None else options.min_warm,
            spec.max_workers,
            options.drain_seconds or spec.drain_seconds,
            options.target_utilization or spec.target_utilization,
            spec.keep_warm_seconds,
        )


@dataclass(frozen=True, slots=True)
class Need:
    """Workers needed at one moment, and why."""

    workers: float
    """May be a fraction."""
    reason: Reason
    lost: int = 0
    """The part of `workers` that replaces workers that count as lost."""


@dataclass(frozen=True, slots=True)
class PoolDemand:
    """The scaler's answer for a pool, and its inputs."""

    pool: str
    desired: int
    """The number of workers the pool should have."""
    active: bool
    """False: the pool is unneeded, and may be scaled to zero."""
    need: Need
    input: PoolInput

    @property
    def live(self) -> int:
        return self.input.live

    @property
    def waits_for_first(self) -> bool:
        """Return whether work waits and the pool has no worker at all."""
        return self.input.live == 0 and self.input.queued_tokens > 0


def compute_need(pool: PoolInput, goals: Goals, wanted_elsewhere: float = 0.0) -> Need:
    """Compute the formula of docs/scaling.md for one moment.

    A pool that was idle for longer than it is kept warm needs nothing, though the averages of its
    arrivals never quite reach 0.

    Args:
        wanted_elsewhere: The shortage of the pool for which this one is a fallback.
    """
    need = _work_need(pool, goals) if is_active(pool, goals) else Need(0.0, "idle")
    floors: tuple[tuple[float, Reason], ...] = (
        (goals.min_workers, "minimum"),
        (1.0 if pool.is_pinned else 0.0, "pinned"),
        (float(_memory_workers(pool)), "memory"),
    )
    for workers, reason in floors:
        if workers > need.workers:
            need = Need(workers, reason)
    if wanted_elsewhere > 0:
        need = Need(need.workers + wanted_elsewhere, "fallback")
    lost = pool.preempting + pool.unhealthy
    need = replace(need, workers=need.workers + lost, lost=lost)
    return need if need.workers <= goals.max_workers else Need(goals.max_workers, "maximum", lost)


def _work_need(pool: PoolInput, goals: Goals) -> Need:
    offered, backlog, ready = pool.offered_load, pool.backlog_seconds, pool.ready
    cold_start = pool.cold_start_seconds
    backlog_then = max(0.0, backlog + (offered - ready) * min(cold_start, pool.first_ready_seconds))
    steady = offered / goals.target_utilization
    drain = offered + backlog_then / goals.drain_seconds
    need = (
        Need(drain, "drain") if drain > steady else Need(steady, "steady" if steady > 0 else "idle")
    )
    if ready > offered and backlog / (ready - offered) <= cold_start:
        # The present workers finish before one that is started now could help.
        enough = max(float(ready + pool.starting), steady)
        need = Need(enough, "enough") if enough < need.workers else need
    return need


def _memory_workers(pool: PoolInput) -> int:
    return math.ceil(pool.hot_bytes / pool.usable_bytes) if pool.usable_bytes else 0


def is_active(pool: PoolInput, goals: Goals) -> bool:
    """Return whether the pool may not be scaled to zero."""
    if (
        pool.queued_tokens
        or pool.leased_tokens
        or pool.is_loading
        or goals.min_workers
        or pool.is_pinned
    ):
        return True
    warm_seconds = (
        pool.cold_start_seconds if goals.keep_warm_seconds is None else goals.keep_warm_seconds
    )
    return pool.last_arrival is not None and pool.at - pool.last_arrival < warm_seconds


class Track:
    """Hysteresis: the answer rises with the need at once, and falls only to the highest need of the
    last minutes.
    """

    def __init__(self) -> None:
        # The state: the last answer, and a monotonic queue of needs, rounded up: the oldest is the
        # highest.
        self._current = 0
        self._highest: deque[tuple[float, int]] = deque()

    def copy(self) -> Track:
        made = Track()
        made._current, made._highest = self._current, self._highest.copy()
        return made

    def decide(self, need: float, at: float, hold_seconds: float) -> int:
        """Return the workers to request at `at`, given the current need."""
        whole = math.ceil(need - _EPSILON)
        while self._highest and self._highest[-1][1] <= whole:
            self._highest.pop()
        self._highest.append((at, whole))
        while self._highest[0][0] < at - hold_seconds:
            self._highest.popleft()
        if whole > self._current:
            self._current = whole
        elif need <= self._current - 1 + SLACK:
            self._current = min(self._current, self._highest[0][1])
        return self._current

    def follow(self, need: float, published: int, at: float, hold_seconds: float) -> int:
        """Decide for a scheduler that does not lead: the leader's number `published`, or its own
        need if that is higher.
        """
        self.decide(max(need, published), at, hold_seconds)
        self._current = max(math.ceil(need - _EPSILON), published)
        return self._current

    def forget_above(self, workers: int) -> int:
        """Cap the remembered answers and needs at `workers`, and return the new answer."""
        if self._highest and self._highest[0][1] > workers:
            self._highest = deque((at, min(whole, workers)) for at, whole in self._highest)
        self._current = min(self._current, workers)
        return self._current


@dataclass(slots=True)
class _Pool:
    """The state kept of a pool, and its last input."""

    input: PoolInput
    tracks: dict[DemandOptions, Track] = field(default_factory=dict)
    requested_at: dict[DemandOptions, float] = field(default_factory=dict)
    starts: ColdStarts = field(default_factory=ColdStarts)
    held: int = 0
    """Workers that the scheduler found when it started."""
    was_published: bool = False
    """Another, leading scheduler has published the number before."""
    published_start: float = 0.0
    """The leader's estimate of a cold start, in seconds; 0: none published."""
    named_at: float = 0.0
    last_arrival: float | None = None
    wanted_elsewhere: float = 0.0


class Demand:
    """The demand of every pool as of the last snapshot."""

    def __init__(self, pools: Pools) -> None:
        self.specs = pools
        """May be replaced; takes effect at the next snapshot."""
        # The state: the times of the first and last snapshot; the state of each pool; arrivals and
        # speeds of all; the answers, and those to callers without options, replaced as a whole
        # because another thread reads them.
        self.at: float | None = None
        """The time of the last snapshot; None before the first."""
        self.demands: Mapping[str, PoolDemand] = {}
        """Demands by pool."""
        self._began = 0.0
        self._pools: dict[str, _Pool] = {}
        self._arrivals = LaneArrivals()
        self._speeds = Speeds()
        self._answers: dict[tuple[str, DemandOptions], PoolDemand] = {}
        self._leader: LeaderRecord | None = None  # another scheduler that leads

    def knows(self, pool: str) -> bool:
        """Return whether the pool is configured; without a configuration, whether a worker or a
        lane named it in the last hour (assumed of any pool before the first snapshot).
        """
        if self.specs.is_configured or self.at is None:
            return pool in self.specs.by_name or not self.specs.is_configured
        return pool in self._pools

    def update(self, snapshot: MeshSnapshot) -> Mapping[str, PoolDemand]:
        """Recompute the demand of every pool and return it. A snapshot that is not newer than the
        last one changes nothing.
        """
        if self.at is not None and snapshot.at <= self.at:
            return self.demands
        elapsed = snapshot.at - self.at if self.at is not None else 0.0
        self._began = self._began if self.at is not None else snapshot.at
        self.at = snapshot.at
        self._leader = None if snapshot.leads else snapshot.fleet.leader
        self._arrivals.update(snapshot.gauges, snapshot.at)
        reading = _Reading(snapshot.fleet, snapshot.gauges)
        for name in self._names(reading, snapshot.at):
            self._pools[name].input = self._input(name, reading, elapsed)
        self._answers = {}
        # Fallback pools last: their need depends on the shortage of the others.
        for name, pool in sorted(
            self._pools.items(), key=lambda entry: bool(self.specs.spec(entry[0]).fallback_for)
        ):
            pool.wanted_elsewhere = self._wanted_elsewhere(name)
            for options in self._options(pool):
                self._answers[name, options] = self._decide(name, options)
            pool.starts.want(
                self._answers[name, DemandOptions()].desired - pool.input.live, snapshot.at
            )
        self.demands = {name: self._answers[name, DemandOptions()] for name in sorted(self._pools)}
        return self.demands

    def demand_for(self, pool: str, options: DemandOptions = DemandOptions()) -> PoolDemand | None:
        """Return the pool's answer to a caller with these options; None for an unknown pool, and
        before the first snapshot.
        """
        remembered = self._pools.get(pool)
        if remembered is None or self.at is None:
            return None
        if options not in remembered.tracks:
            if len(remembered.tracks) > MAX_OPTIONS:
                self._drop(
                    pool, min(remembered.requested_at, key=remembered.requested_at.__getitem__)
                )
            remembered.tracks[options] = remembered.tracks[DemandOptions()].copy()
            self._answers[pool, options] = self._decide(pool, options)
        if options != DemandOptions():
            remembered.requested_at[options] = self.at
        return self._answers[pool, options]

    def _names(self, reading: _Reading, at: float) -> Iterable[str]:
        named = (
            {*self.specs.by_name}
            if self.specs.is_configured
            else {self.specs.default, *reading.pools}
        )
        for name in named:
            pool = self._pools.get(name)
            if pool is None:
                pool = self._pools[name] = _Pool(
                    PoolInput(name, at, 0.0, 0.0), {DemandOptions(): Track()}
                )
            pool.named_at = at
        for name in [
            name for name, pool in self._pools.items() if pool.named_at < at - FORGET_SECONDS
        ]:
            del self._pools[name]
        return list(self._pools)

    def _options(self, pool: _Pool) -> list[DemandOptions]:
        at = self.at or 0.0
        for options in [
            options
            for options, requested_at in pool.requested_at.items()
            if requested_at < at - FORGET_SECONDS
        ]:
            del pool.requested_at[options], pool.tracks[options]
        return list(pool.tracks)

    def _drop(self, pool: str, options: DemandOptions) -> None:
        del self._pools[pool].requested_at[options], self._pools[pool].tracks[options]
        self._answers.pop((pool, options), None)

    def _decide(self, name: str, options: DemandOptions) -> PoolDemand:
        pool, spec = self._pools[name], self.specs.spec(name)
        seen, goals = pool.input, Goals.combine(spec, options)
        hold_seconds = max(HOLD_SECONDS, HOLD_STARTS * seen.cold_start_seconds)
        need = compute_need(seen, goals, pool.wanted_elsewhere)
        # A scheduler that has just started does not know the earlier answers. It keeps the workers
        # that it finds (later ones it has requested itself), unless a leader has published its
        # number.
        published = self._leader.desired.get(name) if self._leader is not None else None
        age = seen.at - self._began
        pool.was_published = pool.was_published or published is not None
        if age >= hold_seconds or pool.was_published:
            pool.held = 0
        elif age <= FIND_SECONDS:
            pool.held = max(pool.held, seen.live)
        active = is_active(seen, goals) or pool.wanted_elsewhere > 0 or pool.held > 0
        track = pool.tracks[options]
        if published is None or options != DemandOptions():
            kept = track.decide(need.workers, seen.at, hold_seconds)
        else:
            kept = track.follow(need.workers, published, seen.at, hold_seconds)
        desired = max(kept, pool.held, int(active))
        if not active:
            # An unneeded pool may keep workers, but starts none. When they are removed (KEDA
            # removes all at once), none counts as missing, and the pool starts over with the next
            # work.
            desired = track.forget_above(seen.live)
        return PoolDemand(name, min(desired, spec.max_workers), active, need, seen)

    def _input(self, name: str, reading: _Reading, elapsed: float) -> PoolInput:
        spec, pool, at = self.specs.spec(name), self._pools[name], self.at or 0.0
        seen = reading.seen[name]
        workers = seen.workers
        configured = spec.cold_start_seconds + spec.node_seconds
        pool.starts.record_workers(
            [f"{worker.worker_id} {worker.epoch}" for worker in workers], at, configured
        )
        published_start = (
            self._leader.cold_starts.get(name, 0.0) if self._leader is not None else 0.0
        )
        pool.published_start = published_start or pool.published_start
        cold_start = published_start or pool.starts.seconds(pool.published_start or configured)
        health = [_health(worker, reading.fleet.now_ms) for worker in workers]
        usable = spec.memory_bytes or _mean([worker.memory_bytes for worker in workers])
        models = [
            self._work(spec, model, lanes, reading, elapsed)
            for model, lanes in reading.served_lanes(name)
        ]
        arrivals = {
            model: self._last_arrival(lanes, reading.fleet.now_ms)
            for model, lanes in reading.served_lanes(name)
        }
        pool.last_arrival = max(
            [moment for moment in (pool.last_arrival, *arrivals.values()) if moment is not None],
            default=None,
        )
        hot = [work.model for work in models if self._is_hot(work, arrivals[work.model], reading)]
        sizes = [reading.model_bytes(model) for model in hot]
        return PoolInput(
            pool=name,
            at=at,
            cold_start_seconds=cold_start,
            first_ready_seconds=pool.starts.first_ready_seconds(at, cold_start),
            models=tuple(models),
            ready=health.count("ready"),
            starting=pool.starts.starting(at, cold_start),
            preempting=health.count("preempting"),
            unhealthy=health.count("unhealthy"),
            is_loading=seen.is_loading,
            is_pinned=seen.is_pinned,
            hot_bytes=sum(size for size in sizes if size <= usable),
            usable_bytes=usable,
            last_arrival=pool.last_arrival,
        )

    def _work(
        self, spec: PoolSpec, model: str, lanes: list[LaneGauges], reading: _Reading, elapsed: float
    ) -> ModelWork:
        queued = sum(lane.queued_tokens for lane in lanes)
        measured = reading.speed(spec.name, model)
        if measured > 0:
            self._speeds.measured(spec.name, model, measured, is_loaded=queued > 0, seconds=elapsed)
        rate = sum((self._arrivals.rate(lane.lane) for lane in lanes), ArrivalRate())
        speed = self._speeds.estimate(
            spec.name, model, reading.device(spec), reading.model_bytes(model)
        )
        return ModelWork(model, queued, sum(lane.leased_tokens for lane in lanes), rate, speed)

    def _last_arrival(self, lanes: list[LaneGauges], now_ms: int) -> float | None:
        """Return the last arrival by Redis, the same for every scheduler; if unknown there, the
        last that this scheduler saw.
        """
        at = self.at or 0.0
        moments = [
            at - (now_ms - lane.used_ms) / 1000
            if lane.used_ms
            else self._arrivals.last_at(lane.lane)
            for lane in lanes
        ]
        return max([moment for moment in moments if moment is not None], default=None)

    def _is_hot(self, work: ModelWork, last_arrival: float | None, reading: _Reading) -> bool:
        if work.queued_tokens or work.leased_tokens:
            return True
        keep_seconds = max(HOT_SECONDS, HOT_LOADS * reading.load_seconds.get(work.model, 0.0))
        return last_arrival is not None and (self.at or 0.0) - last_arrival < keep_seconds

    def _wanted_elsewhere(self, name: str) -> float:
        """Return the shortage of the pool for which this one is a fallback: workers that it needs
        and will not have soon.
        """
        primary = self.specs.spec(name).fallback_for
        pool = self._pools.get(primary)
        if pool is None:
            return 0.0
        need = compute_need(pool.input, Goals.combine(self.specs.spec(primary), DemandOptions()))
        return max(
            0.0, need.workers - need.lost - pool.input.ready - pool.starts.young(pool.input.at)
        )


@dataclass(slots=True)
class _Seen:
    """A pool's workers, and their reports on models, aggregated."""

    workers: list[WorkerRecord] = field(default_factory=list)
    speeds: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    held: set[str] = field(default_factory=set)
    is_loading: bool = False
    is_pinned: bool = False


class _Reading:
    """A snapshot, indexed by pool and model in one pass over its workers and one over its lanes."""

    def __init__(self, fleet: FleetSnapshot, gauges: Mapping[LaneKey, LaneGauges]) -> None:
        self.fleet = fleet
        self.seen: dict[str, _Seen] = defaultdict(_Seen)
        self.load_seconds: dict[str, float] = {}
        self._bytes: dict[str, int] = {}
        self._lanes: dict[str, dict[str, list[LaneGauges]]] = defaultdict(lambda: defaultdict(list))
        for worker in fleet.workers.values():
            if not worker.draining or worker.preempted_in_seconds is not None:
                self._read(worker, self.seen[worker.pool])
        for models in fleet.lists():
            for name, model in models.items():
                self._bytes[name] = max(model.bytes, self._bytes.get(name, 0))
        for lane, gauge in gauges.items():
            self._lanes[lane.pool][lane.model].append(gauge)

    def _read(self, worker: WorkerRecord, seen: _Seen) -> None:
        seen.workers.append(worker)
        for model in worker.held:  # of thousands of workers
            name = model.model
            seen.held.add(name)
            seen.is_loading = seen.is_loading or model.state in LOADING_STATES
            seen.is_pinned = seen.is_pinned or model.pinned
            if model.tokens_per_second > 0:
                seen.speeds[name].append(model.tokens_per_second)
            if model.bytes > self._bytes.get(name, 0):
                self._bytes[name] = model.bytes
            if model.load_seconds > self.load_seconds.get(name, 0.0):
                self.load_seconds[name] = model.load_seconds

    @property
    def pools(self) -> set[str]:
        """Return the pools that a worker or a lane names."""
        return {*self.seen, *self._lanes}

    def served_lanes(self, pool: str) -> list[tuple[str, list[LaneGauges]]]:
        """Return the pool's lanes by model, without models that it cannot serve: more workers would
        not help them.
        """
        found = self._lanes.get(pool, {})
        return [
            (model, lanes)
            for model, lanes in sorted(found.items())
            if not self._is_broken(pool, model)
        ]

    def _is_broken(self, pool: str, model: str) -> bool:
        failures = self.fleet.failures.get(model)
        if not failures:
            return False
        is_given_up = len(failures) >= LOAD_FAILURES and model not in self.seen[pool].held
        return is_given_up or self.fleet.verdict(model, pool) is not None

    def speed(self, pool: str, model: str) -> float:
        """Return the average speed that the pool's workers report, in tokens per second; 0: none
        reported.
        """
        return average_speed(self.seen[pool].speeds.get(model, ()))

    def model_bytes(self, model: str) -> int:
        """Return the model's bytes on a device, by the largest copy, else by its card; 0:
        unknown.
        """
        card = self.fleet.card(model)
        return self._bytes.get(model) or (card.bytes if card is not None else 0)

    def device(self, spec: PoolSpec) -> str:
        """Return `cpu` or `cuda`, as the pool's workers report, else as configured."""
        workers = self.seen[spec.name].workers
        if workers:
            return "cpu" if workers[0].device == "cpu" else "cuda"
        return spec.device


def _health(worker: WorkerRecord, now_ms: int) -> Literal["ready", "preempting", "unhealthy"]:
    if worker.preempted_in_seconds is not None:
        return "preempting"
    return "unhealthy" if worker.silent_ms(now_ms) > MISSED_HEARTBEATS_MS else "ready"


def _mean(numbers: list[int]) -> int:
    return sum(numbers) // len(numbers) if numbers else 0
