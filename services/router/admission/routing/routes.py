"""Routing: chooses the pool for a request. Pure: the pools' file, the catalog, the workers and the
backlog in, a lane out.

Called by `controller.py` before anything else is decided about a request. A model's pools are an
order of preference: the first that would begin in good time gets the request, whether it has the
model, must load it, or must be started first. While one pool has the model and is in time, a
stricter limit (IN_TIME_COLD) holds for pools that must load it, so that only requests with time to
spare bring a model back to a better pool, and urgent ones go where it is resident.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from shoal.v1 import models_pb2, worker_pb2

from libs.catalog.overrides import Catalog
from libs.catalog.pools import NAME, WORDS, Pools
from libs.errors import InvalidInput, ModelUnreachable, NoCapacity
from libs.fleet import COMING, FleetSnapshot, WorkerModelRecord, WorkerRecord
from libs.fleet.claims import load_seconds
from libs.queue import LaneKey

IN_TIME: Final = 0.5
"""Share of what is left until the deadline that a request may wait before it begins."""
IN_TIME_COLD: Final = 0.1
"""The same where the wait is for a load although another of the model's pools has it and is in
time.
"""
ADAPTER_SECONDS: Final = 0.5
"""Loading an adapter into a model that is resident."""

_COPIES: Final = (*COMING, models_pb2.MODEL_STATE_RESIDENT)
"""States of a copy that is resident or on its way."""

_PASSING: Final = (NoCapacity.reason, ModelUnreachable.reason)
"""Reasons for which one worker could not load an adapter, and another may."""

Backlog = Mapping[tuple[str, str], int]
"""Tokens that wait or are leased, by pool and model, those of all adapters together."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a request names; an empty field: not named."""

    model: str
    adapter: str = ""
    pool: str = ""


@dataclass(frozen=True, slots=True)
class Routes:
    """The routing configuration: pools.yaml and the cards of the catalog; `default_pool` counts
    without the former.
    """

    pools: Pools = field(default_factory=Pools)
    catalog: Catalog = field(default_factory=Catalog)
    default_pool: str = "cpu"

    @property
    def default(self) -> str:
        return self.pools.default if self.pools.is_configured else self.default_pool

    def of_model(self, model: str, snapshot: FleetSnapshot) -> tuple[str, ...]:
        """The model's pools, best first. Empty: any pool that has it, since neither cards nor files
        name one.
        """
        card = snapshot.card(model)
        named = self.pools.of_model(model, self.catalog, card.pools if card is not None else ())
        return named or ((self.default,) if self.pools.is_configured else ())


def choose_lane(
    wanted: Wanted,
    routes: Routes,
    snapshot: FleetSnapshot,
    backlog: Backlog,
    seconds: float,
    without: Collection[str] = (),
) -> LaneKey:
    """The lane for a request whose deadline is in `seconds`. `without`: pools that have failed it
    already.

    A pool that it names is taken as it is; `refuse_pool` says whether there is such a pool. Pools
    that cannot serve the model are passed over while another one may; the caller refuses the
    request if it gets one of them nevertheless.
    """
    if wanted.pool:
        return LaneKey(wanted.pool, wanted.model, wanted.adapter)
    named = routes.of_model(wanted.model, snapshot)
    pool = (
        _best(named, wanted, routes, snapshot, backlog, seconds, without)
        if named
        else _anywhere(wanted, routes, snapshot, without)
    )
    return LaneKey(pool, wanted.model, wanted.adapter)


def why_broken(lane: LaneKey, snapshot: FleetSnapshot) -> worker_pb2.Failure | None:
    """Why the pool cannot serve the lane's model or adapter, or None while it may.

    An adapter is broken once one worker with the model could not load it; if it only could not be
    fetched, or there was no room (NoCapacity, ModelUnreachable), all of them must have failed.
    """
    if snapshot.failures.get(lane.model):
        failure = snapshot.verdict(lane.model, lane.pool)
        if failure is not None:
            return failure
    if not lane.adapter:
        return None
    records = [
        worker.models[lane.model]
        for worker in snapshot.resident_on(lane.model)
        if worker.pool == lane.pool
    ]
    if any(lane.adapter in record.adapters for record in records):
        return None
    failures = [
        record.failed_adapters[lane.adapter]
        for record in records
        if lane.adapter in record.failed_adapters
    ]
    passing = failures[0] if failures and len(failures) == len(records) else None
    return next((failure for failure in failures if failure.reason not in _PASSING), passing)


def has_other_pool(
    wanted: Wanted, routes: Routes, snapshot: FleetSnapshot, without: Collection[str]
) -> bool:
    """Whether a request that all of `without` failed may be served by another of its model's pools:
    one that is there, or that would be started."""
    named = () if wanted.pool else routes.of_model(wanted.model, snapshot)
    there = snapshot.pools()
    return any(
        why_broken(LaneKey(pool, wanted.model, wanted.adapter), snapshot) is None
        for pool in named
        if pool not in without and (pool in there or math.isfinite(_start_seconds(pool, routes)))
    )


def refuse_pool(pool: str, routes: Routes, snapshot: FleetSnapshot) -> None:
    """Raises InvalidInput for a pool that a request names and that cannot be; NoCapacity for one
    that is not here now, where no file says which pools there are: it may be a mistake, or its
    workers may be on their way."""
    if not pool:
        return
    if not re.fullmatch(NAME, pool):
        raise InvalidInput(f"pool is {pool[:80]!r}, which is not {WORDS}", field="pool")
    if routes.pools.is_configured and pool not in routes.pools.by_name:
        raise InvalidInput(f"there is no pool {pool!r}; there are {routes.pools}", field="pool")
    if not routes.pools.is_configured and pool != routes.default and pool not in snapshot.pools():
        there = ", ".join(sorted(snapshot.pools())) or "none"
        raise NoCapacity(
            f"there is no worker in pool {pool}; pools with workers: {there}", field="pool"
        )


def _anywhere(
    wanted: Wanted, routes: Routes, snapshot: FleetSnapshot, without: Collection[str]
) -> str:
    """The pool where most workers hold the model, with the adapter if any does; else the default
    pool, unless only others have workers."""
    holders = [
        worker for worker in snapshot.resident_on(wanted.model) if worker.pool not in without
    ]
    able = [worker for worker in holders if wanted.adapter in worker.models[wanted.model].adapters]
    at = [worker.pool for worker in able or holders]
    if at:
        return max(sorted(set(at)), key=at.count)
    pools = snapshot.pools() - set(without)
    return routes.default if routes.default in pools or not pools else min(pools)


@dataclass(frozen=True, slots=True)
class _Candidate:
    """A pool as a candidate for a request: whether it holds the model, and seconds until it would
    begin.
    """

    pool: str
    holds: bool
    wait: float


def _best(
    named: tuple[str, ...],
    wanted: Wanted,
    routes: Routes,
    snapshot: FleetSnapshot,
    backlog: Backlog,
    seconds: float,
    without: Collection[str],
) -> str:
    able = [
        pool
        for pool in named
        if pool not in without
        and why_broken(LaneKey(pool, wanted.model, wanted.adapter), snapshot) is None
    ]
    if len(able) < 2:
        return (able or named)[0]
    staying: dict[str, list[WorkerRecord]] = {pool: [] for pool in able}
    for worker in snapshot.workers.values():
        if worker.pool in staying and not worker.draining and worker.preempted_in_seconds is None:
            staying[worker.pool].append(worker)
    load = load_seconds(wanted.model, snapshot)
    candidates = [
        _candidate(pool, wanted, routes, workers, backlog, load)
        for pool, workers in staying.items()
    ]
    held_in_time = any(
        candidate.holds and candidate.wait <= seconds * IN_TIME for candidate in candidates
    )
    for candidate in candidates:
        share = IN_TIME_COLD if held_in_time and not candidate.holds else IN_TIME
        if candidate.wait <= seconds * share:
            return candidate.pool
    return min(
        candidates, key=lambda candidate: candidate.wait
    ).pool  # of equals the first, which is the better


def _candidate(
    pool: str,
    wanted: Wanted,
    routes: Routes,
    workers: Sequence[WorkerRecord],
    backlog: Backlog,
    load: float,
) -> _Candidate:
    """`workers`: those of the pool that stay. `load`: seconds that loading the model takes."""
    records = [
        record
        for worker in workers
        if (record := worker.models.get(wanted.model)) is not None and not record.leaving
    ]
    copies = [record for record in records if record.state in _COPIES]
    resident = [copy for copy in copies if copy.state == models_pb2.MODEL_STATE_RESIDENT]
    wait = _queue_seconds(copies, backlog.get((pool, wanted.model), 0))
    if not workers:
        wait += load + _start_seconds(pool, routes)
    elif not resident:
        wait += load
    elif wanted.adapter and not any(wanted.adapter in copy.adapters for copy in resident):
        wait += ADAPTER_SECONDS
    return _Candidate(pool, bool(resident), wait)


def _queue_seconds(copies: Sequence[WorkerModelRecord], tokens: int) -> float:
    """Seconds of work for the copies in the backlog; 0 as long as no speed was measured."""
    speeds = [copy.tokens_per_second for copy in copies if copy.tokens_per_second > 0]
    return tokens / (sum(speeds) / len(speeds) * len(copies)) if speeds else 0.0


def _start_seconds(pool: str, routes: Routes) -> float:
    """Seconds until a pool without workers has one; infinite if no file says that one would be
    started.
    """
    spec = routes.pools.by_name.get(pool)
    return (
        spec.cold_start_seconds + spec.node_seconds
        if spec is not None and spec.max_workers
        else math.inf
    )
