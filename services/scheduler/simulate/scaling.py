"""Simulate one pool under KEDA for days of rare requests: from zero to many and back to zero, event
by event. Pure and deterministic.

The decisions are the scheduler's: `Demand` receives snapshots as Redis would give them. KEDA's
operator (`keda.py`) and the HPA (`hpa.py`) poll and sync as in a cluster, and a push takes the pool
from zero. The rest is a model: a machine takes a fixed time to start, and a worker loads its one
model when work waits for it, and serves one request at a time.
"""

from __future__ import annotations

import heapq
import random
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final

from shoal.v1 import models_pb2

from libs.catalog.pools import Pools, PoolSpec
from libs.errors import InvalidInput
from libs.fleet import FleetSnapshot, WorkerModelRecord, WorkerRecord
from libs.queue import LaneGauges, LaneKey
from services.scheduler.demand import Demand, PoolDemand
from services.scheduler.simulate.hpa import Hpa
from services.scheduler.simulate.keda import POLLING_SECONDS, SYNC_SECONDS, Executor
from services.scheduler.view import MeshSnapshot

MODEL: Final = "org/model"
_MODEL_BYTES: Final = 100_000_000
_CARD: Final = models_pb2.ModelCard(bytes=_MODEL_BYTES)
_EPOCH_MS: Final = 1_700_000_000_000
_SHORT_TOKENS: Final = 200
_BURST_REQUESTS: Final = 200
_BURST_TOKENS: Final = 5_000
QUARTERS: Final = 4


@dataclass(frozen=True, slots=True)
class Cluster:
    """A pool's machines and how KEDA scales them. Times in seconds."""

    spec: PoolSpec = field(
        default_factory=lambda: PoolSpec("pool", max_workers=20, node_seconds=120.0)
    )
    start_seconds: float = 180.0
    """Time from a pod's creation to its worker's first heartbeat; it may differ from the time in
    `spec`.
    """
    load_seconds: float = 5.0
    cooldown_seconds: float = 600.0
    tokens_per_second: float = 5_000.0
    """Throughput of one worker."""

    def __post_init__(self) -> None:
        if (
            min(self.start_seconds, self.load_seconds, self.cooldown_seconds) < 0
            or self.tokens_per_second <= 0
        ):
            raise InvalidInput(
                "start, load and cooldown must be at least 0 s, tokens_per_second above 0"
            )


@dataclass(frozen=True, slots=True)
class Visit:
    """A user's visit with one or more requests."""

    at: float
    """Seconds after the beginning."""
    tokens: tuple[int, ...]
    """Tokens of each request."""

    @property
    def is_burst(self) -> bool:
        return len(self.tokens) > 1


@dataclass(frozen=True, slots=True)
class ScalingOutcome:
    """The result of a simulation. Waits are from a request's arrival to its answer, in seconds."""

    answered: int
    starts: int
    """Times that the pool left zero."""
    held_share: float
    """Share of the time in which at least one machine was held, from its pod's creation to its
    end.
    """
    machines: float
    """Machines held on average."""
    cold_start_seconds: tuple[float, ...]
    """The scheduler's estimate of a start, after each quarter of the time."""
    longest_cold_start_seconds: float
    most_for_short: int
    """Maximum workers while only short texts had arrived since the pool was at zero."""
    wait_p50: float
    wait_p99: float


def visits(count: int, gap_seconds: float, burst_share: float, seed: int) -> list[Visit]:
    """Draw independent visits, `gap_seconds` apart on average: one short text each, or a burst of
    200 requests of 5,000 tokens.
    """
    chance = random.Random(seed)  # noqa: S311 — nothing secret
    made, at = [], 0.0
    for _ in range(count):
        at += chance.expovariate(1 / gap_seconds)
        is_burst = chance.random() < burst_share
        made.append(Visit(at, (_BURST_TOKENS,) * _BURST_REQUESTS if is_burst else (_SHORT_TOKENS,)))
    return made


def simulate(cluster: Cluster, wanted: Sequence[Visit]) -> ScalingOutcome:
    """Simulate the visits to a pool that is at zero, until an hour after the last one."""
    return _Simulation(cluster, wanted).run()


@dataclass(slots=True, eq=False)
class _Pod:
    name: str
    joins: float
    resident: bool = False
    loading: bool = False
    busy: bool = False
    stopped: bool = False


class _Simulation:
    def __init__(self, cluster: Cluster, wanted: Sequence[Visit]) -> None:
        self._cluster = cluster
        self._visits = wanted
        self._pool = cluster.spec.name
        self._lane = LaneKey(self._pool, MODEL)
        self._demand = Demand(Pools(self._pool, MappingProxyType({self._pool: cluster.spec})))
        self._executor = Executor(0.0, cooldown_seconds=cluster.cooldown_seconds)
        self._hpa = Hpa(1, cluster.spec.max_workers)
        self._end = wanted[-1].at + 3600.0 if wanted else 0.0
        # Future events: (time, rising number, function).
        self._agenda: list[tuple[float, int, Callable[[], None]]] = []
        self._number = 0
        self._now = 0.0
        self._replicas = 0
        self._made = 0
        self._pods: list[_Pod] = []
        self._queue: deque[tuple[float, int]] = deque()
        self._leased_tokens = 0
        self._enqueued_tokens = 0
        self._waits: list[float] = []
        self._starts = 0
        self._held_seconds = 0.0
        self._machine_seconds = 0.0
        self._cold_starts: list[float] = []
        self._longest_cold_start = 0.0
        self._most_for_short = 0
        self._is_short = True

    def run(self) -> ScalingOutcome:
        for visit in self._visits:
            self._at(visit.at, lambda visit=visit: self._arrive(visit))  # type: ignore[misc]
        for quarter in range(1, QUARTERS + 1):
            self._at(self._end * quarter / QUARTERS, self._note)
        self._every(POLLING_SECONDS, self._poll)
        self._every(SYNC_SECONDS, self._sync)
        while self._agenda and self._agenda[0][0] <= self._end:
            self._step(*heapq.heappop(self._agenda))
        return self._outcome()

    def _step(self, when: float, _: int, act: Callable[[], None]) -> None:
        held = len(self._pods)
        self._machine_seconds += held * (when - self._now)
        self._held_seconds += (when - self._now) if held else 0.0
        self._now = when
        act()

    def _outcome(self) -> ScalingOutcome:
        waits = sorted(self._waits)
        return ScalingOutcome(
            answered=len(waits),
            starts=self._starts,
            held_share=self._held_seconds / max(self._end, 1e-9),
            machines=self._machine_seconds / max(self._end, 1e-9),
            cold_start_seconds=tuple(self._cold_starts),
            longest_cold_start_seconds=self._longest_cold_start,
            most_for_short=self._most_for_short,
            wait_p50=_quantile(waits, 0.5),
            wait_p99=_quantile(waits, 0.99),
        )

    def _at(self, when: float, act: Callable[[], None]) -> None:
        self._number += 1
        heapq.heappush(self._agenda, (when, self._number, act))

    def _every(self, seconds: float, act: Callable[[], None]) -> None:
        def again() -> None:
            act()
            self._at(self._now + seconds, again)

        self._at(seconds, again)

    # Requests

    def _arrive(self, visit: Visit) -> None:
        self._is_short = not visit.is_burst and (self._is_short or self._replicas == 0)
        self._queue.extend((self._now, tokens) for tokens in visit.tokens)
        self._enqueued_tokens += sum(visit.tokens)
        self._serve()
        if self._update_demand().active and self._replicas == 0:
            self._activate(is_active=True)  # a push

    def _serve(self) -> None:
        for pod in self._pods:
            if pod.joins > self._now or pod.stopped or not self._queue:
                continue
            if not pod.resident and not pod.loading:
                pod.loading = True
                self._at(self._now + self._cluster.load_seconds, lambda pod=pod: self._loaded(pod))  # type: ignore[misc]
            elif pod.resident and not pod.busy:
                self._take(pod)

    def _take(self, pod: _Pod) -> None:
        record_workers, tokens = self._queue.popleft()
        pod.busy = True
        self._leased_tokens += tokens
        self._at(
            self._now + tokens / self._cluster.tokens_per_second,
            lambda: self._answered(pod, record_workers, tokens),
        )

    def _loaded(self, pod: _Pod) -> None:
        pod.resident = True
        pod.loading = False
        self._serve()

    def _answered(self, pod: _Pod, record_workers: float, tokens: int) -> None:
        pod.busy = False
        self._leased_tokens -= tokens
        self._waits.append(self._now - record_workers)
        if pod.stopped:
            self._pods.remove(pod)
        self._serve()

    # The cluster

    def _poll(self) -> None:
        self._activate(self._update_demand().active)

    def _activate(self, is_active: bool) -> None:
        self._scale(self._executor.decide(self._now, self._replicas, is_active))

    def _sync(self) -> None:
        before = self._replicas
        after = self._hpa.decide(self._now, before, self._update_demand().desired * 1000, 1000)
        if after != before:
            self._scale(after)
            self._hpa.scaled(self._now, before, after)

    def _scale(self, replicas: int) -> None:
        self._starts += self._replicas == 0 and replicas > 0
        kept = [pod for pod in self._pods if not pod.stopped]
        while len(kept) < replicas:
            self._made += 1
            kept.append(_Pod(f"pod-{self._made}", self._now + self._cluster.start_seconds))
            self._pods.append(kept[-1])
            self._at(kept[-1].joins, self._joined)
        while len(kept) > replicas:
            self._stop(kept.pop())  # the youngest, as a ReplicaSet chooses
        self._replicas = replicas
        if self._is_short:
            self._most_for_short = max(self._most_for_short, replicas)

    def _stop(self, pod: _Pod) -> None:
        pod.stopped = True
        if not pod.busy:
            self._pods.remove(pod)

    def _joined(self) -> None:
        self._update_demand()
        self._serve()

    # The scheduler's view

    def _update_demand(self) -> PoolDemand:
        now_ms = _EPOCH_MS + round(self._now * 1000)
        workers = {
            pod.name: self._record(pod, now_ms) for pod in self._pods if pod.joins <= self._now
        }
        snapshot = MeshSnapshot(
            FleetSnapshot(workers, {MODEL: _CARD}, {}, now_ms), self._gauges(), self._now
        )
        decision = self._demand.update(snapshot)[self._pool]
        self._longest_cold_start = max(self._longest_cold_start, decision.input.cold_start_seconds)
        return decision

    def _gauges(self) -> Mapping[LaneKey, LaneGauges]:
        if not self._enqueued_tokens:
            return {}
        queued = sum(tokens for _, tokens in self._queue)
        gauges = LaneGauges(
            self._lane,
            len(self._queue),
            queued,
            self._leased_tokens,
            0,
            0,
            0,
            0,
            0,
            self._enqueued_tokens,
        )
        return {self._lane: gauges}

    def _record(self, pod: _Pod, now_ms: int) -> WorkerRecord:
        state = models_pb2.MODEL_STATE_LOADING if pod.loading else models_pb2.MODEL_STATE_COLD
        if pod.resident:
            state = models_pb2.MODEL_STATE_RESIDENT
        speed = self._cluster.tokens_per_second if pod.resident else 0.0
        held = WorkerModelRecord(
            MODEL,
            state,
            _MODEL_BYTES,
            self._cluster.load_seconds,
            speed,
            idle_seconds=0.0,
            pinned=False,
        )
        models = {MODEL: held}
        return WorkerRecord(
            pod.name, pod.name, self._pool, "cuda", 1 << 34, 0, 16_384, pod.stopped, now_ms, models
        )

    def _note(self) -> None:
        self._cold_starts.append(self._update_demand().input.cold_start_seconds)


def _quantile(waits: Sequence[float], share: float) -> float:
    return waits[min(len(waits) - 1, int(share * len(waits)))] if waits else 0.0
