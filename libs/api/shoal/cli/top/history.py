"""The snapshots that `shoal top` shows: the state of the mesh, with rates since earlier states.
Pure.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from shoal.status import LaneStatus, Mesh, Model, WorkerStatus

RATE_WINDOW_SECONDS = 10.0
"""The window of rates: long enough for several heartbeats."""
_MIN_RATE_SECONDS = 0.1
# States of models that are shown: more than files on a disk.
_SHOWN_STATES = ("resident", "loading", "warm", "downloading", "failed")


@dataclass(frozen=True, slots=True)
class PoolLine:
    """A pool: sums over its workers and lanes. None: not known (yet)."""

    pool: str
    workers: int
    draining: int
    """Workers that drain or are about to be preempted."""
    desired_workers: int | None
    busy: float | None
    used_bytes: int
    memory_bytes: int
    tokens_per_second: float | None
    queued_tokens: int
    oldest_seconds: float


@dataclass(frozen=True, slots=True)
class WorkerLine:
    """A worker.

    Attributes:
        busy: The share of the last seconds in which its device computed.
    """

    worker_id: str
    pool: str
    device: str
    draining: bool
    preempted_in_seconds: float | None
    busy: float | None
    used_bytes: int
    memory_bytes: int
    resident: tuple[str, ...]
    heartbeat_age_seconds: float


@dataclass(frozen=True, slots=True)
class LaneLine:
    """A lane.

    Attributes:
        tokens_per_second: Tokens that left the lane, estimated from bytes as all tokens of lanes.
    """

    pool: str
    model: str
    adapter: str
    queued_jobs: int
    queued_tokens: int
    leased_tokens: int
    oldest_seconds: float
    tokens_per_second: float | None


@dataclass(frozen=True, slots=True)
class ModelLine:
    """A model in or on its way to memory, or failed.

    Attributes:
        tokens_per_second: The measured throughput of its workers, added up.
    """

    model: str
    state: str
    pools: tuple[str, ...]
    resident_on: tuple[str, ...]
    bytes: int
    tokens_per_second: float
    last_error: str


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The mesh as the router `router_id` sees it. `scheduler_id` is empty while none leads."""

    router_id: str
    scheduler_id: str
    pools: tuple[PoolLine, ...]
    workers: tuple[WorkerLine, ...]
    lanes: tuple[LaneLine, ...]
    models: tuple[ModelLine, ...]

    def for_pool(self, pool: str) -> Snapshot:
        """Only what belongs to one pool."""
        return replace(
            self,
            pools=tuple(one for one in self.pools if one.pool == pool),
            workers=tuple(worker for worker in self.workers if worker.pool == pool),
            lanes=tuple(lane for lane in self.lanes if lane.pool == pool),
            models=tuple(model for model in self.models if pool in model.pools),
        )


_Counters = dict[tuple[str, ...], tuple[float, float]]
"""A time and the counter at that time, by worker or lane."""


class MeshHistory:
    """Makes snapshots from the states of the mesh, which are added in order."""

    def __init__(self) -> None:
        # The counters of the states of the last seconds, by monotonic time.
        self._counters: deque[tuple[float, _Counters]] = deque()

    def add(self, mesh: Mesh, now: float) -> Snapshot:
        """Return the snapshot of a state at `now`, monotonic seconds."""
        self._counters.append((now, _counters(mesh, now)))
        while self._counters[0][0] < now - RATE_WINDOW_SECONDS:
            self._counters.popleft()
        workers = tuple(self._worker(worker) for worker in mesh.workers)
        lanes = tuple(self._lane(lane) for lane in mesh.lanes)
        pools = {worker.worker_id: worker.pool for worker in workers}
        models = tuple(
            _model(model, pools) for model in mesh.models if model.state in _SHOWN_STATES
        )
        return Snapshot(
            mesh.router_id,
            mesh.scheduler.scheduler_id,
            _pools(mesh, workers, lanes),
            workers,
            lanes,
            models,
        )

    def _worker(self, worker: WorkerStatus) -> WorkerLine:
        busy = self._rate((worker.worker_id,))
        return WorkerLine(
            worker.worker_id,
            worker.pool,
            worker.device,
            worker.draining,
            worker.preempted_in_seconds,
            None if busy is None else min(1.0, busy),
            worker.used_bytes,
            worker.memory_bytes,
            worker.resident,
            worker.heartbeat_age_seconds,
        )

    def _lane(self, lane: LaneStatus) -> LaneLine:
        key = (lane.pool, lane.model, lane.adapter)
        queued = (lane.queued_jobs, lane.queued_tokens, lane.leased_tokens)
        return LaneLine(*key, *queued, lane.oldest_seconds, self._rate(key))

    def _rate(self, key: tuple[str, ...]) -> float | None:
        """Return the rate of a counter; None without an earlier value, or if the counter fell
        because it was reset.
        """
        counted = [counters[key] for _, counters in self._counters if key in counters]
        (first, before), (last, after) = counted[0], counted[-1]
        return (
            (after - before) / (last - first)
            if last - first >= _MIN_RATE_SECONDS and after >= before
            else None
        )


def _counters(mesh: Mesh, now: float) -> _Counters:
    """Return the counters: workers' computed seconds until their last heartbeat, and lanes' tokens
    that have left.
    """
    counters: _Counters = {}
    for worker in mesh.workers:
        counters[worker.worker_id,] = now - worker.heartbeat_age_seconds, worker.device_seconds
    for lane in mesh.lanes:
        left = lane.enqueued_tokens - lane.queued_tokens - lane.leased_tokens
        counters[lane.pool, lane.model, lane.adapter] = now, left
    return counters


def _pools(
    mesh: Mesh, workers: Sequence[WorkerLine], lanes: Sequence[LaneLine]
) -> tuple[PoolLine, ...]:
    """Pools that have workers, lanes or a desired number of workers."""
    desired = {pool.pool: pool.desired_workers for pool in mesh.pools}
    names = {*desired, *(worker.pool for worker in workers), *(lane.pool for lane in lanes)}
    return tuple(
        _pool(
            name,
            desired.get(name),
            [worker for worker in workers if worker.pool == name],
            [lane for lane in lanes if lane.pool == name],
        )
        for name in sorted(names)
    )


def _pool(
    name: str, desired: int | None, workers: Sequence[WorkerLine], lanes: Sequence[LaneLine]
) -> PoolLine:
    busy = _known(worker.busy for worker in workers)
    rates = _known(lane.tokens_per_second for lane in lanes)
    return PoolLine(
        pool=name,
        workers=len(workers),
        draining=sum(
            worker.draining or worker.preempted_in_seconds is not None for worker in workers
        ),
        desired_workers=desired,
        busy=sum(busy) / len(busy) if busy else None,
        used_bytes=sum(worker.used_bytes for worker in workers),
        memory_bytes=sum(worker.memory_bytes for worker in workers),
        tokens_per_second=sum(rates) if rates else None,
        queued_tokens=sum(lane.queued_tokens for lane in lanes),
        oldest_seconds=max((lane.oldest_seconds for lane in lanes), default=0.0),
    )


def _known(values: Iterable[float | None]) -> list[float]:
    return [value for value in values if value is not None]


def _model(model: Model, pools: Mapping[str, str]) -> ModelLine:
    near = [place for place in model.places if place.state in _SHOWN_STATES]
    held = [place for place in near if place.state == "resident"]
    return ModelLine(
        model=model.model,
        state=model.state,
        pools=tuple(sorted({pools[place.worker_id] for place in near if place.worker_id in pools})),
        resident_on=tuple(place.worker_id for place in held),
        bytes=max((place.bytes for place in held), default=0),
        tokens_per_second=sum(place.tokens_per_second for place in held),
        last_error=model.last_error if model.state == "failed" else "",
    )
