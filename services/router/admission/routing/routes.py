"""Routing: chooses the pool for a request. Pure: the pools file, the catalog, the workers and the
backlog in, a lane out.

Called by `controller.py` before any other decision on a request.

1. A model's pools are an order of preference. The first that would begin early enough gets the
   request, whether it has the model, must load it, or must be started first.
2. While one pool has the model and is in time, a stricter limit (MAX_COLD_WAIT_SHARE) holds for
   pools that must load it. So only requests with time left bring a model back to a better pool, and
   urgent ones go where it is resident.
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
from libs.fleet import LOADING_STATES, FleetSnapshot, WorkerModelRecord
from libs.fleet.claims import load_seconds
from libs.queue import LaneKey
from libs.work_estimate import average_speed, work_seconds

MAX_WAIT_SHARE: Final = 0.5
"""Share of the time until the deadline that a request may wait before it begins."""
MAX_COLD_WAIT_SHARE: Final = 0.1
"""The share for a pool that must load the model while another pool has it and is in time."""
ADAPTER_LOAD_SECONDS: Final = 0.5
"""Time to load an adapter into a resident model."""

_COPIES: Final = (*LOADING_STATES, models_pb2.MODEL_STATE_RESIDENT)
"""States of a copy that is resident or being loaded."""

_PASSING: Final = (NoCapacity.reason, ModelUnreachable.reason)
"""Failures of one worker to load an adapter after which another worker may still succeed."""

Backlog = Mapping[tuple[str, str], int]
"""Waiting and leased tokens by pool and model, all adapters together."""


@dataclass(frozen=True, slots=True)
class Target:
    """The model, adapter and pool that a request names; empty fields are not named."""

    model: str
    adapter: str = ""
    pool: str = ""


@dataclass(frozen=True, slots=True)
class Routes:
    """The routing configuration: pools.yaml and the catalog's cards. `default_pool` counts without
    pools.yaml.
    """

    pools: Pools = field(default_factory=Pools)
    catalog: Catalog = field(default_factory=Catalog)
    default_pool: str = "cpu"

    @property
    def default(self) -> str:
        return self.pools.default if self.pools.is_configured else self.default_pool

    def model_pools(self, model: str, snapshot: FleetSnapshot) -> tuple[str, ...]:
        """Return the model's pools, best first. Empty if neither cards nor files name one: then any
        pool that has the model.
        """
        card = snapshot.card(model)
        named = self.pools.names_for(model, self.catalog, card.pools if card is not None else ())
        return named or ((self.default,) if self.pools.is_configured else ())


def choose_lane(
    target: Target,
    routes: Routes,
    snapshot: FleetSnapshot,
    backlog: Backlog,
    seconds: float,
    without: Collection[str] = (),
) -> LaneKey:
    """Choose the lane for a request with a deadline in `seconds`.

    1. A pool that the request names is used as it is; `refuse_pool` checks that it exists.
    2. Pools that cannot serve the model are skipped while another one may. If none may, the caller
      refuses the request.

    Args:
        without: Pools that have failed the request already.
    """
    if target.pool:
        return LaneKey(target.pool, target.model, target.adapter)
    named = routes.model_pools(target.model, snapshot)
    pool = (
        _best(named, target, routes, snapshot, backlog, seconds, without)
        if named
        else _anywhere(target, routes, snapshot, without)
    )
    return LaneKey(pool, target.model, target.adapter)


def why_broken(lane: LaneKey, snapshot: FleetSnapshot) -> worker_pb2.Failure | None:
    """Return why the pool cannot serve the lane's model or adapter, or None while it may.

    An adapter is broken once one worker with the model could not load it. If it could not be
    fetched, or memory was short (NoCapacity, ModelUnreachable), all of them must have failed.
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
    target: Target, routes: Routes, snapshot: FleetSnapshot, without: Collection[str]
) -> bool:
    """Return whether another of the model's pools may serve a request that `without` have failed:
    one with workers, or one that would be started.
    """
    named = () if target.pool else routes.model_pools(target.model, snapshot)
    there = snapshot.pools()
    return any(
        why_broken(LaneKey(pool, target.model, target.adapter), snapshot) is None
        for pool in named
        if pool not in without and (pool in there or math.isfinite(_start_seconds(pool, routes)))
    )


def refuse_pool(pool: str, routes: Routes, snapshot: FleetSnapshot) -> None:
    """Refuse a pool that a request names and that cannot serve it.

    Raises InvalidInput for an invalid name or, with a pools file, an unknown pool. Without a file
    raises NoCapacity for a pool without workers: the name may be wrong, or its workers may be
    starting.
    """
    if not pool:
        return
    if not re.fullmatch(NAME, pool):
        raise InvalidInput(f"pool is {pool[:80]!r}, which is not {WORDS}", field="pool")
    if routes.pools.is_configured and pool not in routes.pools.by_name:
        raise InvalidInput(f"pool {pool!r} does not exist; pools: {routes.pools}", field="pool")
    if not routes.pools.is_configured and pool != routes.default and pool not in snapshot.pools():
        there = ", ".join(sorted(snapshot.pools())) or "none"
        raise NoCapacity(f"pool {pool} has no worker; pools with workers: {there}", field="pool")


def _anywhere(
    target: Target, routes: Routes, snapshot: FleetSnapshot, without: Collection[str]
) -> str:
    """Return the pool where most workers hold the model, with the adapter if any has it; else the
    default pool, unless only others have workers.
    """
    holders = [
        worker for worker in snapshot.resident_on(target.model) if worker.pool not in without
    ]
    able = [worker for worker in holders if target.adapter in worker.models[target.model].adapters]
    at = [worker.pool for worker in able or holders]
    if at:
        return max(sorted(set(at)), key=at.count)
    pools = snapshot.pools() - set(without)
    return routes.default if routes.default in pools or not pools else min(pools)


@dataclass(frozen=True, slots=True)
class _Candidate:
    """A pool that may get a request: whether it holds the model, and seconds until it would
    begin.
    """

    pool: str
    holds: bool
    wait: float


def _best(
    named: tuple[str, ...],
    target: Target,
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
        and why_broken(LaneKey(pool, target.model, target.adapter), snapshot) is None
    ]
    if len(able) < 2:
        return (able or named)[0]
    load = load_seconds(target.model, snapshot)
    candidates = [_candidate(pool, target, routes, snapshot, backlog, load) for pool in able]
    held_in_time = any(
        candidate.holds and candidate.wait <= seconds * MAX_WAIT_SHARE for candidate in candidates
    )
    for candidate in candidates:
        share = MAX_COLD_WAIT_SHARE if held_in_time and not candidate.holds else MAX_WAIT_SHARE
        if candidate.wait <= seconds * share:
            return candidate.pool
    # Of equals the first, which the model prefers.
    return min(candidates, key=lambda candidate: candidate.wait).pool


def _candidate(
    pool: str,
    target: Target,
    routes: Routes,
    snapshot: FleetSnapshot,
    backlog: Backlog,
    load: float,
) -> _Candidate:
    """Args:
    load: Seconds to load the model.
    """
    records = [
        worker.models[target.model]
        for worker in snapshot.holders(target.model)
        if worker.pool == pool and not worker.is_going
    ]
    copies = [record for record in records if record.state in _COPIES and not record.leaving]
    resident = [copy for copy in copies if copy.state == models_pb2.MODEL_STATE_RESIDENT]
    wait = _queue_seconds(copies, backlog.get((pool, target.model), 0))
    if not copies and not snapshot.has_staying(pool):
        wait += load + _start_seconds(pool, routes)
    elif not resident:
        wait += load
    elif target.adapter and not any(target.adapter in copy.adapters for copy in resident):
        wait += ADAPTER_LOAD_SECONDS
    return _Candidate(pool, bool(resident), wait)


def _queue_seconds(copies: Sequence[WorkerModelRecord], tokens: int) -> float:
    """Return the seconds of work in the backlog for each copy; 0 until a speed was measured."""
    speed = average_speed(copy.tokens_per_second for copy in copies)
    return work_seconds(tokens, speed, len(copies)) if speed else 0.0


def _start_seconds(pool: str, routes: Routes) -> float:
    """Return the seconds until a pool without workers has one; infinite if no file lets one be
    started.
    """
    spec = routes.pools.by_name.get(pool)
    return (
        spec.cold_start_seconds + spec.node_seconds
        if spec is not None and spec.max_workers
        else math.inf
    )
