"""The plan: which worker should load which model, and which copies to evict. Pure: no clock, no
Redis.

`control.py` makes a plan from every snapshot of the mesh and sends its orders. The rules
(docs/placement.md):

1. Models with copies only on workers that leave are loaded first, then models with work and no
  copy, the one with most waiting work first.
2. A model gets another copy if that would start before its present copies finish their work; copies
  at most double with each plan.
3. A load goes to the worker with the best score: affinity, less the busy share of the worker's time
  and the cost of evictions there.
4. The worker chooses the victims when it loads; the plan predicts them by the same rules
  (libs/eviction). It orders evictions only of surplus copies, and only if their memory is needed,
  so that it converges under a constant load.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal

from shoal.v1 import models_pb2

from libs.eviction import DEFAULT, POLICIES, Candidate, Challenger, Policy, choose_victims
from libs.fleet import LOADING_STATES, FleetSnapshot, WorkerModelRecord, WorkerRecord
from libs.fleet.affinity import AFFINITY, HORIZON_SECONDS
from libs.queue import LaneGauges, LaneKey
from libs.work_estimate import (
    assumed_load_seconds,
    assumed_speed,
    average_speed,
    busy_copies,
    work_seconds,
)
from services.scheduler.planning.pool_workers import (
    BUSY_COST,
    IDLE_COST,
    MAX_CONCURRENT_LOADS,
    Floats,
    PoolWorkers,
)

UTILIZATION: Final = 0.7
"""The target utilisation of a copy: a model needs its offered load divided by this, in copies."""
KEPT_SECONDS: Final = 60.0
LOADS_KEPT: Final = 10.0
"""A loaded copy stays for KEPT_SECONDS, and this multiple of its load time, before a plan evicts
it, or expects its eviction for anything but waiting work.
"""
SURPLUS_IDLE_SECONDS: Final = 180.0
"""A surplus copy may be evicted after this time without use."""
RECENT_SECONDS: Final = 600.0
"""A model used within this time moves when its only worker is preempted, if another one has free
memory.
"""
HEARTBEATS_MS: Final = 6_000
"""Three heartbeats. After this time an order without visible effect no longer counts, nor does a
silent worker.
"""

_TRIED: Final = 16
"""Maximum candidate workers per model that are checked for victims one by one."""
RESIDENT: Final = models_pb2.MODEL_STATE_RESIDENT

PoolModel = tuple[str, str]
"""A pool and a model."""


@dataclass(frozen=True, slots=True)
class Order:
    """An order to a worker."""

    kind: Literal["load", "evict"]
    model: str
    pool: str
    worker_id: str
    epoch: str
    known: tuple[str, ...] = ()
    """Workers that hold the model or will. Their claims on its lane do not prevent the load."""


@dataclass(frozen=True, slots=True)
class SentOrder:
    """A sent order."""

    order: Order
    plan: int
    """The number of its plan."""
    sent_ms: int
    """Unix time by Redis' clock."""


@dataclass(frozen=True, slots=True)
class PlanInput:
    """All inputs of a plan."""

    fleet: FleetSnapshot
    """Its `now_ms` is the time of the plan."""
    gauges: Mapping[LaneKey, LaneGauges]
    rates: Mapping[LaneKey, float] = field(default_factory=dict)
    """Arrivals in tokens per second, by lane."""
    waiting_since_ms: Mapping[PoolModel, int] = field(default_factory=dict)
    """Since when a model's work has been seen waiting, Unix time by Redis' clock."""
    sent: Sequence[SentOrder] = ()
    """Recent orders, which heartbeats may not show yet."""
    draw: int = 0
    """Breaks ties between equally good workers."""
    policy: Policy = POLICIES[DEFAULT]


@dataclass(frozen=True, slots=True)
class PlacementPlan:
    """The result of planning."""

    orders: tuple[Order, ...]
    """Evictions precede the load that needs them."""
    notes: Mapping[str, str]
    """Why models are moved or held back, by model."""
    is_waiting: bool
    """A model would be loaded now if fewer loads were in progress."""


def plan(state: PlanInput) -> PlacementPlan:
    """Plan for this state. Deterministic: the same input gives the same plan."""
    return _Planner(state).plan()


@dataclass(slots=True)
class _Demand:
    """The demand for a model in a pool: tokens in all its lanes, and arrivals in tokens per
    second.
    """

    queued: int = 0
    leased: int = 0
    rate: float = 0.0

    @property
    def tokens(self) -> int:
        return self.queued + self.leased


@dataclass(slots=True)
class _ModelCopies:
    """A model in a pool, updated as the plan is made."""

    resident: dict[str, WorkerModelRecord] = field(default_factory=dict)
    """Copies by worker id."""
    rows: list[int] = field(default_factory=list)
    """The rows of `resident`, before the plan."""
    incoming: list[str] = field(default_factory=list)
    """Workers that will hold it."""
    near: dict[str, float] = field(default_factory=dict)
    """Affinities of workers that have it in host memory."""
    going: dict[str, WorkerModelRecord] = field(default_factory=dict)
    """Copies on workers that are about to leave."""

    @property
    def copies(self) -> int:
        return len(self.resident) + len(self.incoming)

    @property
    def known(self) -> tuple[str, ...]:
        return tuple(sorted((*self.resident, *self.incoming)))


@dataclass(frozen=True, slots=True)
class _Estimate:
    """Estimates of a model in a pool, before the plan."""

    size: int
    """Bytes; 1: unknown."""
    load_seconds: float
    speed: float
    """Tokens per second of one copy, above 0."""
    is_measured: bool
    """Whether a copy has measured the speed; otherwise it is assumed."""
    waiting_seconds: float
    """Time for which its copies have work."""


class _Planner:
    """One plan in progress."""

    def __init__(self, state: PlanInput) -> None:
        self._state = state
        self._fleet = state.fleet
        self._orders: list[Order] = []
        self._notes: dict[str, str] = {}
        self._is_waiting = False
        self._demands = _demands(state)
        self._estimates: dict[PoolModel, _Estimate] = {}
        self._evicted = {
            (sent.order.worker_id, sent.order.model) for sent in self._pending("evict")
        }
        self._pools = _make_pools(state.fleet)
        self._sites = self._find_sites()
        self._pool_speeds: dict[str, float] = {}
        self._count_loads()
        self._count_work()

    def plan(self) -> PlacementPlan:
        ranked = sorted(self._demands, key=lambda at: (-self._value(at), at))
        served = [at for at in ranked if self._sites[at].copies]
        others = [at for at in ranked if not self._sites[at].copies]
        for at in others:
            if self._sites[at].going:
                self._place(at, "its only workers are about to leave")
        for at in others:
            if self._demands[at].queued and not self._sites[at].going:
                self._place(at, f"{self._demands[at].queued:,} tokens wait and no worker has it")
        for at in served:
            self._multiply(at)
        self._move_recent()
        return PlacementPlan(tuple(self._orders), self._notes, self._is_waiting)

    # The state before the plan

    def _find_sites(self) -> dict[PoolModel, _ModelCopies]:
        """Find the copies of every model in every pool. Also sums in `_pools` the bytes that may be
        evicted.
        """
        by_pool: dict[str, dict[str, _ModelCopies]] = defaultdict(lambda: defaultdict(_ModelCopies))
        working: dict[str, set[str]] = defaultdict(set)
        for (pool, model), demand in self._demands.items():
            if demand.tokens:
                working[pool].add(model)
        for worker in self._fleet.workers.values():
            sites = by_pool[worker.pool]
            if _is_going(worker, self._fleet.now_ms):
                for record in worker.held:
                    if record.state == RESIDENT and not record.leaving:
                        sites[record.model].going[worker.worker_id] = record
            else:
                self._read_worker(worker, sites, working[worker.pool])
        found = {
            (pool, model): site for pool, sites in by_pool.items() for model, site in sites.items()
        }
        return defaultdict(_ModelCopies, found)

    def _read_worker(
        self, worker: WorkerRecord, sites: dict[str, _ModelCopies], working: set[str]
    ) -> None:
        """Read one worker's copies. The plan's only loop over all copies in the mesh, so it is kept
        fast: a million records per second.
        """
        pool_workers, worker_id = self._pools[worker.pool], worker.worker_id
        elapsed = self._elapsed(worker)
        row, leaving, movable, idle, old = pool_workers.rows[worker_id], 0, 0, 0, 0
        evicted = (
            {model for holder, model in self._evicted if holder == worker_id}
            if self._evicted
            else ()
        )
        for record in worker.held:
            model = record.model
            site = sites[model]
            if record.state == RESIDENT:
                size = record.bytes
                if record.leaving or model in evicted:
                    leaving += size
                    continue
                site.resident[worker_id] = record
                site.rows.append(row)
                if not record.pinned:
                    movable += size
                    if not record.held_jobs and model not in working:
                        idle += size
                        if _is_old(record, elapsed):
                            old += size
            elif record.state in LOADING_STATES:
                site.incoming.append(worker_id)
            else:
                site.near[worker_id] = AFFINITY[record.state]
        pool_workers.free[row] += leaving
        pool_workers.movable[row], pool_workers.idle[row], pool_workers.old[row] = (
            movable,
            idle,
            old,
        )

    def _elapsed(self, worker: WorkerRecord) -> float:
        """Return the seconds since the worker's record was reported: ages in it have grown."""
        return max(0.0, (self._fleet.now_ms - worker.heartbeat_ms) / 1000)

    def _pending(self, kind: Literal["load", "evict"]) -> list[SentOrder]:
        """Return sent orders without a visible effect in heartbeats."""
        found = []
        for sent in self._state.sent:
            order = sent.order
            worker = self._fleet.workers.get(order.worker_id)
            is_late = self._fleet.now_ms - sent.sent_ms >= HEARTBEATS_MS
            if order.kind != kind or worker is None or worker.epoch != order.epoch or is_late:
                continue
            is_obeyed = worker.plan >= sent.plan and worker.heartbeat_ms > sent.sent_ms
            is_there = worker.state(order.model) in (*LOADING_STATES, RESIDENT)
            if not is_obeyed and is_there == (kind == "evict"):
                found.append(sent)
        return found

    def _count_loads(self) -> None:
        """Reserve memory and time for loads in progress or ordered."""
        for (pool, model), site in self._sites.items():
            for worker_id in site.incoming:
                pool_workers = self._pools[pool]
                row = pool_workers.rows[worker_id]
                record = pool_workers.workers[row].models[model]
                # The worker counts a load's bytes as used as soon as it knows them.
                known = self._cached_estimate((pool, model))
                pool_workers.expect(row, 0 if record.bytes else known.size, known.load_seconds)
        for sent in self._pending("load"):
            at, worker_id = (sent.order.pool, sent.order.model), sent.order.worker_id
            if at[0] in self._pools and worker_id in self._pools[at[0]].rows:
                self._sites[at].incoming.append(worker_id)
                self._pools[at[0]].expect(
                    self._pools[at[0]].rows[worker_id],
                    self._cached_estimate(at).size,
                    self._cached_estimate(at).load_seconds,
                )

    def _count_work(self) -> None:
        """Add the time that workers need for waiting and expected work."""
        for at, demand in self._demands.items():
            site = self._sites[at]
            if site.resident:
                tokens = demand.tokens + demand.rate * HORIZON_SECONDS
                self._pools[at[0]].seconds[site.rows] += work_seconds(
                    tokens, self._cached_estimate(at).speed, len(site.resident)
                )

    # Estimates of a model

    def _cached_estimate(self, at: PoolModel) -> _Estimate:
        found = self._estimates.get(at)
        if found is None:
            found = self._estimates[at] = self._estimate(at)
        return found

    def _estimate(self, at: PoolModel) -> _Estimate:
        site = self._sites[at]
        held = [*site.resident.values(), *site.going.values()]
        size = max([record.bytes for record in held], default=0) or self._stored_bytes(at)
        load_seconds = max([record.load_seconds for record in held], default=0.0)
        measured = average_speed(record.tokens_per_second for record in held)
        speed = measured or self._assumed_speed(at[0], size)
        demand = self._demands.get(at)
        waiting = work_seconds(demand.tokens if demand is not None else 0, speed, site.copies)
        return _Estimate(
            size or 1,
            load_seconds or assumed_load_seconds(size),
            speed,
            measured > 0,
            waiting,
        )

    def _stored_bytes(self, at: PoolModel) -> int:
        """Return the model's bytes by its card, or by a worker that has it on disk; 0: unknown."""
        pool, model = at
        card = self._fleet.card(model)
        if card is not None and card.bytes:
            return card.bytes
        workers = self._pools[pool].workers if pool in self._pools else []
        records = (worker.models[model] for worker in workers if model in worker.models)
        return next((record.bytes for record in records if record.bytes), 0)

    def _assumed_speed(self, pool: str, size: int) -> float:
        """Return the speed of a model without a measured one; its peers are the pool's copies."""
        if pool not in self._pool_speeds:
            self._pool_speeds[pool] = average_speed(
                record.tokens_per_second
                for (other, _), site in self._sites.items()
                if other == pool
                for record in site.resident.values()
            )
        workers = self._pools[pool].workers if pool in self._pools else ()
        device = workers[0].device if workers else "cpu"
        return assumed_speed(device, size, [self._pool_speeds[pool]])

    def _value(self, at: PoolModel) -> float:
        """Return the model's priority: seconds of waiting and expected work, plus the time that
        work has waited.
        """
        demand = self._demands[at]
        tokens = demand.queued + demand.rate * HORIZON_SECONDS
        return work_seconds(tokens, self._cached_estimate(at).speed) + self._waited_seconds(at)

    def _waited_seconds(self, at: PoolModel) -> float:
        return (
            max(0, self._fleet.now_ms - self._state.waiting_since_ms.get(at, self._fleet.now_ms))
            / 1000
        )

    # Decisions

    def _place(self, at: PoolModel, why: str) -> None:
        """Load the model's first copy: for it, any eviction that the rules allow may be
        expected.
        """
        pool, model = at
        pool_workers = self._pools.get(pool)
        if pool_workers is None:
            self._notes[model] = f"held back: pool {pool} has no worker that takes models"
            return
        if (
            model in self._fleet.failures
            and (verdict := self._fleet.verdict(model, pool)) is not None
        ):
            self._notes[model] = f"given up in pool {pool}: {verdict.message or verdict.reason}"
            return
        waiting = max(self._cached_estimate(at).waiting_seconds, self._waited_seconds(at), 1e-3)
        challenger = Challenger(model, self._cached_estimate(at).size, waiting)
        if not self._load(
            at,
            pool_workers,
            challenger,
            [(pool_workers.movable, BUSY_COST), (pool_workers.idle, IDLE_COST)],
            why,
        ):
            self._hold_back(at, pool_workers)

    def _multiply(self, at: PoolModel) -> None:
        """Load more copies while the present ones would need longer for their work than a load
        takes.
        """
        pool, model = at
        pool_workers, demand, known, copies = (
            self._pools.get(pool),
            self._demands[at],
            self._cached_estimate(at),
            self._sites[at].copies,
        )
        if pool_workers is None or not known.is_measured or not demand.queued:
            return
        for number in range(copies, 2 * copies):
            wait = work_seconds(demand.tokens, known.speed, number)
            if wait <= known.load_seconds:
                return
            copy = "copy" if number == 1 else "copies"
            why = (
                f"its {number} {copy} would need {wait:.1f} s for the waiting work,"
                f" a load takes {known.load_seconds:.1f} s"
            )
            # Idle models yield only as to a model without waiting work: its present copies serve
            # it.
            challenger = Challenger(model, known.size)
            if not self._load(
                at,
                pool_workers,
                challenger,
                [(pool_workers.old, IDLE_COST)],
                why,
                wait - known.load_seconds,
            ):
                return

    def _move_recent(self) -> None:
        """Move recently used models from workers that will all be preempted, if others have free
        memory.
        """
        for at, site in list(self._sites.items()):
            pool_workers = self._pools.get(at[0])
            if pool_workers is None or not site.going or site.copies or at in self._demands:
                continue
            noticed = [
                (self._fleet.workers[id_], one)
                for id_, one in site.going.items()
                if self._fleet.workers[id_].preempted_in_seconds is not None
            ]
            if any(
                _idle_seconds(record, self._elapsed(worker)) <= RECENT_SECONDS
                for worker, record in noticed
            ):
                self._load(
                    at,
                    pool_workers,
                    Challenger(at[1], self._cached_estimate(at).size),
                    [],
                    "its only workers will be preempted",
                )

    def _load(
        self,
        at: PoolModel,
        pool_workers: PoolWorkers,
        challenger: Challenger,
        evictable: Sequence[tuple[Floats, float]],
        why: str,
        within_seconds: float = math.inf,
    ) -> bool:
        """Order one more copy, if a worker has memory for it or can free enough. False: none can
        now.
        """
        pool, model = at
        site = self._sites[at]
        if pool_workers.is_closed:
            return False
        rows = pool_workers.best(
            model,
            challenger.bytes,
            near={pool_workers.rows[worker_id]: near for worker_id, near in site.near.items()},
            banned=self._banned(at, pool_workers),
            evictable=evictable,
            draw=self._state.draw,
            within_seconds=within_seconds,
        )
        for row in rows[:_TRIED]:
            victims = self._victims(pool_workers, row, challenger)
            if victims is None:
                continue
            worker = pool_workers.workers[row]
            for victim in victims:
                self._give_up(pool_workers, row, victim)
            self._orders.append(
                Order("load", model, pool, worker.worker_id, worker.epoch, site.known)
            )
            self._notes[model] = f"loads on {worker.worker_id}: {why}"
            pool_workers.expect(row, challenger.bytes, self._cached_estimate(at).load_seconds)
            site.incoming.append(worker.worker_id)
            return True
        return False

    def _banned(self, at: PoolModel, pool_workers: PoolWorkers) -> set[int]:
        """Return the rows of workers that hold the model already, or will, or recently evicted it
        or failed to load it, or lack its files.
        """
        excluded = [*self._sites[at].known, *self._fleet.failures.get(at[1], ())]
        excluded += [worker_id for worker_id, model in self._evicted if model == at[1]]
        return {
            pool_workers.rows[worker_id] for worker_id in excluded if worker_id in pool_workers.rows
        } | self._without_files(at, pool_workers)

    def _without_files(self, at: PoolModel, pool_workers: PoolWorkers) -> set[int]:
        """Return the rows of workers that can load only models on their disk, and lack the model,
        while another worker has it.

        If no worker that has it can load it, these are tried all the same, so that callers receive
        the reason instead of waiting.
        """
        if not pool_workers.local:
            return set()
        model, failed = at[1], self._fleet.failures.get(at[1], {})
        if not any(
            model in worker.models and worker.worker_id not in failed
            for worker in pool_workers.workers
        ):
            return set()
        return {row for row in pool_workers.local if model not in pool_workers.workers[row].models}

    def _victims(
        self, pool_workers: PoolWorkers, row: int, challenger: Challenger
    ) -> list[WorkerModelRecord] | None:
        """Return the expected victims: only surplus copies if they suffice. None: the rules do not
        allow evicting enough now.
        """
        needed = challenger.bytes - int(pool_workers.free[row])
        if needed <= 0:
            return []
        worker = pool_workers.workers[row]
        elapsed = self._elapsed(worker)
        held = {
            record.model: record
            for record in worker.held
            if worker.worker_id in self._sites[worker.pool, record.model].resident
            and (challenger.waiting_seconds > 0 or _is_old(record, elapsed))
        }
        surplus = {
            model: record
            for model, record in held.items()
            if self._is_surplus((worker.pool, model), record, elapsed)
        }
        for group in (surplus, held):
            candidates = [
                self._candidate((worker.pool, model), record, elapsed)
                for model, record in group.items()
            ]
            chosen = choose_victims(candidates, needed, self._state.policy, challenger)
            if chosen is not None:
                return [group[one.name] for one in chosen]
        return None

    def _candidate(self, at: PoolModel, record: WorkerModelRecord, elapsed: float) -> Candidate:
        return Candidate(
            name=record.model,
            bytes=record.bytes,
            load_seconds=record.load_seconds,
            idle_seconds=_idle_seconds(record, elapsed),
            pinned=record.pinned,
            leaving=record.leaving,
            is_busy=record.held_jobs > 0,
            waiting_seconds=self._cached_estimate(at).waiting_seconds,
            resident_seconds=record.resident_seconds + elapsed,
            is_last_copy=len(self._sites[at].resident) <= 1,
        )

    def _is_surplus(self, at: PoolModel, record: WorkerModelRecord, elapsed: float) -> bool:
        """Return whether the model has more copies than its arrivals need, and this one was unused
        for long.
        """
        if (
            record.pinned
            or record.held_jobs
            or _idle_seconds(record, elapsed) < SURPLUS_IDLE_SECONDS
            or not _is_old(record, elapsed)
        ):
            return False
        known, demand = self._cached_estimate(at), self._demands.get(at)
        busy = busy_copies(demand.rate, known.speed) if demand is not None else 0.0
        return known.waiting_seconds <= 0 and len(self._sites[at].resident) > max(
            1, math.ceil(busy / UTILIZATION)
        )

    def _give_up(self, pool_workers: PoolWorkers, row: int, record: WorkerModelRecord) -> None:
        """Count a victim's memory as free; order the eviction of a surplus copy."""
        worker = pool_workers.workers[row]
        at, elapsed = (worker.pool, record.model), self._elapsed(worker)
        if self._is_surplus(at, record, elapsed):
            self._orders.append(
                Order("evict", record.model, worker.pool, worker.worker_id, worker.epoch)
            )
            self._notes[record.model] = (
                f"leaves {worker.worker_id}: a surplus copy, idle for"
                f" {_idle_seconds(record, elapsed):.0f} s"
            )
        del self._sites[at].resident[worker.worker_id]
        pool_workers.free[row] += record.bytes
        pool_workers.movable[row] -= record.bytes
        if not record.held_jobs and self._cached_estimate(at).waiting_seconds <= 0:
            pool_workers.idle[row] -= record.bytes
            pool_workers.old[row] -= record.bytes if _is_old(record, elapsed) else 0

    def _hold_back(self, at: PoolModel, pool_workers: PoolWorkers) -> None:
        pool, model = at
        if pool_workers.is_closed:
            self._is_waiting = True
            self._notes[model] = (
                f"held back: every worker of pool {pool} has"
                f" {MAX_CONCURRENT_LOADS} loads in progress"
            )
            return
        size = self._cached_estimate(at).size
        most = pool_workers.free + pool_workers.movable
        most[list(self._banned(at, pool_workers))] = -math.inf
        could = most >= size
        if not any(most > -math.inf):
            note = f"every worker of pool {pool} recently failed to load it"
        elif could.any():
            self._is_waiting = self._is_waiting or bool((pool_workers.loads[could] > 0).any())
            note = "loads are in progress, or the resident models have more work waiting"
        else:
            note = (
                f"it needs {size:,} bytes, and no worker of pool {pool} could free more than"
                f" {int(most.max()):,}"
            )
        self._notes[model] = f"held back: {note}"


def _make_pools(fleet: FleetSnapshot) -> dict[str, PoolWorkers]:
    """Return the workers of all pools that may be given models."""
    pools: dict[str, list[WorkerRecord]] = defaultdict(list)
    for worker in fleet.workers.values():
        if not _is_going(worker, fleet.now_ms):
            pools[worker.pool].append(worker)
    return {pool: PoolWorkers(workers) for pool, workers in pools.items()}


def _is_going(worker: WorkerRecord, now_ms: int) -> bool:
    """Return whether the worker drains, will be preempted, or seems to be dead."""
    return worker.is_going or worker.silent_ms(now_ms) >= HEARTBEATS_MS


def _is_old(record: WorkerModelRecord, elapsed: float) -> bool:
    """Return whether the copy was loaded long enough ago to be evicted. `elapsed`: seconds since
    the record was reported.
    """
    resident = record.resident_seconds + elapsed
    return resident >= max(KEPT_SECONDS, LOADS_KEPT * record.load_seconds)


def _idle_seconds(record: WorkerModelRecord, elapsed: float) -> float:
    return 0.0 if record.held_jobs else record.idle_seconds + elapsed


def _demands(state: PlanInput) -> dict[PoolModel, _Demand]:
    """Return the demands of all lanes with work or arrivals; lanes of adapters count for their
    model.
    """
    demands: dict[PoolModel, _Demand] = defaultdict(_Demand)
    for lane, gauge in state.gauges.items():
        rate = state.rates.get(lane, 0.0)
        if gauge.queued_tokens or gauge.leased_tokens or rate * HORIZON_SECONDS >= 1:
            demand = demands[lane.pool, lane.model]
            demand.queued += gauge.queued_tokens
            demand.leased += gauge.leased_tokens
            demand.rate += rate
    return demands
