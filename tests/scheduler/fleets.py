"""Fleets for plans: records by hand, and a simulated fleet that obeys plans as workers do."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from shoal.v1 import models_pb2, worker_pb2

from libs.eviction import Candidate, Challenger, choose_victims, cost_aware
from libs.fleet import FleetSnapshot, WorkerModelRecord, WorkerRecord
from libs.fleet.snapshot import SILENT_MS
from libs.queue import LaneGauges, LaneKey
from services.scheduler.planning.placement import (
    PlacementPlan,
    PlanInput,
    PoolModel,
    SentOrder,
    plan,
)

COLD, LOADING, DOWNLOADING, WARM, RESIDENT = (
    models_pb2.MODEL_STATE_COLD,
    models_pb2.MODEL_STATE_LOADING,
    models_pb2.MODEL_STATE_DOWNLOADING,
    models_pb2.MODEL_STATE_WARM,
    models_pb2.MODEL_STATE_RESIDENT,
)
BROKEN = worker_pb2.Failure(reason="MODEL_LOAD_FAILED", message="no such tensor")
NOW_MS = 1_000_000_000


def holds(
    model: str,
    state: models_pb2.ModelState = RESIDENT,
    size: int = 10,
    *,
    speed: float = 1000.0,
    load_seconds: float = 1.0,
    idle: float = 1000.0,
    since: float = 1000.0,
    pinned: bool = False,
    held_jobs: int = 0,
    leaving: bool = False,
) -> WorkerModelRecord:
    return WorkerModelRecord(
        model,
        state,
        size,
        load_seconds,
        speed,
        0.0 if held_jobs else idle,
        pinned,
        leaving=leaving,
        held_jobs=held_jobs,
        resident_seconds=since if state == RESIDENT else 0.0,
    )


def worker(
    name: str,
    *models: WorkerModelRecord,
    memory: int = 100,
    pool: str = "cpu",
    draining: bool = False,
    preempted_in: float | None = None,
    beat_ms: int = NOW_MS,
    plan: int = 0,
    local: bool = False,
) -> WorkerRecord:
    used = sum(one.bytes for one in models if one.state in (RESIDENT, LOADING))
    return WorkerRecord(
        name,
        "1",
        pool,
        "cpu",
        memory,
        used,
        8192,
        draining,
        beat_ms,
        {one.model: one for one in models},
        preempted_in_seconds=preempted_in,
        plan=plan,
        local_models_only=local,
        silent_since_ms=beat_ms if NOW_MS - beat_ms >= SILENT_MS else None,
    )


def state(
    *workers: WorkerRecord,
    queued: Mapping[str, int] | None = None,
    rates: Mapping[str, float] | None = None,
    failures: Mapping[str, Mapping[str, worker_pb2.Failure]] | None = None,
    sizes: Mapping[str, int] | None = None,
    sent: tuple[SentOrder, ...] = (),
    draw: int = 1,
) -> PlanInput:
    """Return the gauges of one pool, `cpu`. queued and rates: by model."""
    cards = {
        model: models_pb2.ModelCard(model=model, bytes=size)
        for model, size in (sizes or {}).items()
    }
    fleet = FleetSnapshot({one.worker_id: one for one in workers}, cards, failures or {}, NOW_MS)
    gauges = {
        lane.lane: lane
        for lane in (gauge(model, tokens) for model, tokens in (queued or {}).items())
    }
    for model in rates or {}:
        gauges.setdefault(LaneKey("cpu", model), gauge(model, 0))
    return PlanInput(
        fleet,
        gauges,
        {LaneKey("cpu", model): rate for model, rate in (rates or {}).items()},
        sent=sent,
        draw=draw,
    )


def gauge(model: str, tokens: int, adapter: str = "") -> LaneGauges:
    return LaneGauges(LaneKey("cpu", model, adapter), int(tokens > 0), tokens, 0, 1, 0, 0, 0, 0)


def loads(made: PlacementPlan) -> dict[str, list[str]]:
    """Return by model the workers ordered to load it."""
    found: dict[str, list[str]] = {}
    for order in made.orders:
        if order.kind == "load":
            found.setdefault(order.model, []).append(order.worker_id)
    return found


def evictions(made: PlacementPlan) -> set[tuple[str, str]]:
    return {(order.model, order.worker_id) for order in made.orders if order.kind == "evict"}


@dataclass
class Model:
    """A model of the simulated mesh: bytes, seconds of a load, tokens a second of a copy and of
    arrivals.
    """

    size: int
    load_seconds: float
    speed: float
    rate: float
    queued: float = 0.0
    done: float = 0.0


@dataclass
class Held:
    """A model on a simulated worker; times in seconds of the simulation."""

    ready_at: float | None
    """The time at which its load ends; None while it waits for memory."""
    asked_at: float
    used_at: float
    is_busy: bool = False


@dataclass
class World:
    """Workers with the given memory, which load what plans order and choose victims by
    libs/eviction. A step is half a second.
    """

    memory: dict[str, int]
    models: dict[str, Model]
    now: float = 0.0
    number: int = 0
    held: dict[str, dict[str, Held]] = field(default_factory=dict)
    sent: list[SentOrder] = field(default_factory=list)
    plans: list[PlacementPlan] = field(default_factory=list)
    waiting_since_ms: dict[PoolModel, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.held = {name: {} for name in self.memory}

    def step(self) -> PlacementPlan:
        self._serve()
        self.now += 0.5
        self.number += 1
        made = plan(self._input())
        for order in made.orders:
            self.sent.append(SentOrder(order, self.number, self._now_ms))
            if order.kind == "evict":
                self.held[order.worker_id].pop(order.model, None)
            else:
                self.held[order.worker_id].setdefault(order.model, Held(None, self.now, self.now))
        for name in self.memory:
            self._begin_loads(name)
            assert self.used(name) <= self.memory[name]
        self.plans.append(made)
        return made

    def copies(self, model: str) -> int:
        return sum(model in held for held in self.held.values())

    def used(self, name: str) -> int:
        return sum(
            self.models[model].size
            for model, held in self.held[name].items()
            if held.ready_at is not None
        )

    @property
    def _now_ms(self) -> int:
        return NOW_MS + round(self.now * 1000)

    def _serve(self) -> None:
        """Each worker's time goes evenly to those of its models that have work."""
        for model in self.models.values():
            model.queued += model.rate * 0.5
        for held in self.held.values():
            busy = [
                name
                for name, one in held.items()
                if self._is_ready(one) and self.models[name].queued >= 1
            ]
            for name, one in held.items():
                one.is_busy = name in busy
                if one.is_busy:
                    model = self.models[name]
                    done = min(model.queued, model.speed * 0.5 / len(busy))
                    model.queued -= done
                    model.done += done
                    one.used_at = self.now

    def _is_ready(self, one: Held) -> bool:
        return one.ready_at is not None and one.ready_at <= self.now

    def _begin_loads(self, name: str) -> None:
        held = self.held[name]
        for wanted, one in [entry for entry in held.items() if entry[1].ready_at is None]:
            model = self.models[wanted]
            waiting = (
                max(model.queued / model.speed, self.now - one.asked_at) if model.queued else 0.0
            )
            needed = model.size - (self.memory[name] - self.used(name))
            candidates = [
                self._candidate(other, held[other]) for other in held if self._is_ready(held[other])
            ]
            victims = choose_victims(
                candidates, needed, cost_aware, Challenger(wanted, model.size, waiting)
            )
            if victims is not None:
                for victim in victims:
                    del held[victim.name]
                one.ready_at = self.now + model.load_seconds

    def _candidate(self, name: str, one: Held) -> Candidate:
        model = self.models[name]
        return Candidate(
            name,
            model.size,
            model.load_seconds,
            self.now - one.used_at,
            is_busy=one.is_busy,
            waiting_seconds=model.queued / model.speed,
            resident_seconds=self.now - (one.ready_at or 0.0),
        )

    def _input(self) -> PlanInput:
        workers = {name: self._record(name) for name in self.memory}
        cards = {
            name: models_pb2.ModelCard(model=name, bytes=model.size)
            for name, model in self.models.items()
        }
        gauges = {
            (one := gauge(name, int(model.queued))).lane: one for name, model in self.models.items()
        }
        rates = {LaneKey("cpu", name): model.rate for name, model in self.models.items()}
        served = {name for held in self.held.values() for name in held}
        waiting = [
            ("cpu", name)
            for name, model in self.models.items()
            if model.queued >= 1 and name not in served
        ]
        self.waiting_since_ms = {
            site: self.waiting_since_ms.get(site, self._now_ms) for site in waiting
        }
        fleet = FleetSnapshot(workers, cards, {}, self._now_ms)
        return PlanInput(fleet, gauges, rates, self.waiting_since_ms, tuple(self.sent), self.number)

    def _record(self, name: str) -> WorkerRecord:
        records = []
        for model, one in self.held[name].items():
            known = self.models[model]
            if self._is_ready(one):
                record = holds(
                    model, RESIDENT, known.size, speed=known.speed, load_seconds=known.load_seconds
                )
                idle, since = self.now - one.used_at, self.now - (one.ready_at or 0.0)
                records.append(
                    replace(
                        record,
                        held_jobs=int(one.is_busy),
                        idle_seconds=idle,
                        resident_seconds=since,
                    )
                )
            else:
                records.append(
                    holds(model, LOADING, known.size if one.ready_at is not None else 0, speed=0.0)
                )
        return worker(
            name, *records, memory=self.memory[name], beat_ms=self._now_ms, plan=self.number - 1
        )
