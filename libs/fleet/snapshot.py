"""An immutable view of the workers at one moment, and queries on it. Pure: no clock, no Redis."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Set
from dataclasses import dataclass, field
from itertools import chain
from types import MappingProxyType
from typing import Final

from shoal.v1 import models_pb2, worker_pb2

from libs.errors import ModelNotFound, ModelUnreachable

LOADING_STATES = (models_pb2.MODEL_STATE_DOWNLOADING, models_pb2.MODEL_STATE_LOADING)
"""The states of a model that a worker is fetching or loading."""

ABSENT = (ModelNotFound.reason, ModelUnreachable.reason)
"""Reasons of a failed load on a worker without a copy of the model: no store has it either, or no
store could be reached.
"""

HELD = (*LOADING_STATES, models_pb2.MODEL_STATE_WARM, models_pb2.MODEL_STATE_RESIDENT)
"""The states of a model that a worker holds, or will hold soon, in memory."""

SILENT_MS = 4_000
"""Two heartbeat intervals. Readers get the time of the last heartbeat only for workers that have
been silent for longer, because reading the times of all workers every second would be expensive.
"""

PARTS: Final = 64
"""Number of parts into which a mapping of workers is divided: a change copies only one part."""


@dataclass(frozen=True, slots=True)
class WorkerModelRecord:
    """A model on one worker; fields as in `WorkerModel` of worker.proto."""

    model: str
    state: models_pb2.ModelState
    bytes: int
    load_seconds: float
    tokens_per_second: float
    idle_seconds: float
    pinned: bool
    downloaded_bytes: int = 0
    download_bytes: int = 0
    host_bytes: int = 0
    activation_bytes_per_token: float = 0.0
    adapters: tuple[str, ...] = ()
    leaving: bool = False
    held_jobs: int = 0
    resident_seconds: float = 0.0
    failed_adapters: Mapping[str, worker_pb2.Failure] = field(default_factory=dict)
    measured_batch_tokens: int = 0
    data_type: str = ""
    tokens_per_byte: float = 0.0

    @staticmethod
    def from_proto(model: worker_pb2.WorkerModel) -> WorkerModelRecord:
        """Build the record of a heartbeat's entry."""
        return WorkerModelRecord(
            model.model,
            model.state,
            model.bytes,
            model.load_seconds,
            model.tokens_per_second,
            model.idle_seconds,
            model.pinned,
            model.downloaded_bytes,
            model.download_bytes,
            model.host_bytes,
            model.activation_bytes_per_token,
            tuple(model.adapters),
            model.leaving,
            model.held_jobs,
            model.resident_seconds,
            dict(model.failed_adapters),
            model.measured_batch_tokens,
            model.data_type,
            model.tokens_per_byte,
        )


@dataclass(frozen=True, slots=True)
class WorkerRecord:
    """A worker's last heartbeat."""

    worker_id: str
    epoch: str
    pool: str
    device: str
    memory_bytes: int
    used_bytes: int
    batch_tokens: int
    draining: bool
    heartbeat_ms: int
    """Arrival time of the heartbeat with these values, Unix time by Redis' clock. Later heartbeats
    that have only expected differences are not stored (`drift.py`).
    """
    models: Mapping[str, WorkerModelRecord]
    host_memory_bytes: int = 0
    host_used_bytes: int = 0
    preempted_in_seconds: float | None = None
    plan: int = 0
    wire_version: int = 0
    subject: str = ""
    """The subject of the heartbeat's credential; empty without one."""
    kernels: str = ""
    """The native kernels that a CPU worker uses, or "none: " and the reason."""
    local_models_only: bool = False
    """It has no store: it can load only models that it has on disk."""
    silent_since_ms: int | None = None
    """Arrival time of its last heartbeat, if that was more than SILENT_MS ago, otherwise None."""
    listed: Mapping[str, WorkerModelRecord] | None = field(default=None, compare=False, repr=False)
    """The models on its disk: one object for all workers with the same list."""
    held: tuple[WorkerModelRecord, ...] = field(init=False, compare=False, repr=False)
    """Its models that are warm, resident or being loaded."""

    def __post_init__(self) -> None:
        # Compute this once per heartbeat, not at each access: a worker may list a thousand models
        # on disk, of which it holds ten.
        object.__setattr__(
            self, "held", tuple(record for record in self.models.values() if record.state in HELD)
        )

    @staticmethod
    def from_heartbeat(
        heartbeat: worker_pb2.HeartbeatRequest,
        heartbeat_ms: int,
        on_disk: Mapping[str, WorkerModelRecord],
    ) -> WorkerRecord:
        """Build the record of a worker from its heartbeat.

        Args:
            heartbeat_ms: Arrival time, Unix time in milliseconds by Redis' clock.
            on_disk: The models on the worker's disk, by name.
        """
        return WorkerRecord(
            worker_id=heartbeat.worker_id,
            epoch=heartbeat.epoch,
            pool=heartbeat.pool,
            device=heartbeat.device,
            memory_bytes=heartbeat.memory_bytes,
            used_bytes=heartbeat.used_bytes,
            batch_tokens=heartbeat.batch_tokens,
            draining=heartbeat.draining,
            heartbeat_ms=heartbeat_ms,
            models={
                **on_disk,
                **{model.model: WorkerModelRecord.from_proto(model) for model in heartbeat.models},
            },
            host_memory_bytes=heartbeat.host_memory_bytes,
            host_used_bytes=heartbeat.host_used_bytes,
            preempted_in_seconds=heartbeat.preempted_in_seconds
            if heartbeat.HasField("preempted_in_seconds")
            else None,
            plan=heartbeat.plan,
            wire_version=heartbeat.wire_version,
            subject=heartbeat.subject,
            kernels=heartbeat.kernels,
            local_models_only=heartbeat.local_models_only,
            listed=on_disk,
        )

    @property
    def free_bytes(self) -> int:
        """Return the free bytes of its device, after weights and the activations of the largest
        batch of any held model; may be below 0.
        """
        activations = max((record.activation_bytes_per_token for record in self.held), default=0.0)
        return self.memory_bytes - self.used_bytes - int(activations * self.batch_tokens)

    @property
    def is_going(self) -> bool:
        """Return whether the worker drains, or its machine will be preempted."""
        return self.draining or self.preempted_in_seconds is not None

    def silent_ms(self, now_ms: int) -> int:
        """Return the milliseconds since its last heartbeat if these are more than SILENT_MS, else
        0.
        """
        return 0 if self.silent_since_ms is None else now_ms - self.silent_since_ms

    def state(self, model: str) -> models_pb2.ModelState:
        """Return the model's state on this worker; ABSENT if the worker does not list it."""
        record = self.models.get(model)
        return record.state if record else models_pb2.MODEL_STATE_ABSENT


@dataclass(frozen=True, slots=True)
class LeaderRecord:
    """The leading scheduler."""

    scheduler_id: str
    fence: int
    """Its fencing number."""
    plan: int
    """Number of its last plan: fence * 2**32 + a counter."""
    plan_ms: int
    """Time of that plan, Unix time by Redis' clock."""
    desired: Mapping[str, int] = field(default_factory=dict)
    """Number of workers that each pool should have."""
    cold_starts: Mapping[str, float] = field(default_factory=dict)
    """Seconds in which a new worker of each pool is expected to start."""


class Workers(Mapping[str, WorkerRecord]):
    """Records by worker id. Immutable: a changed copy shares all unchanged parts with the original,
    because copying ten thousand entries for every heartbeat would take most of a router's time.
    """

    __slots__ = ("_count", "_parts")

    def __init__(self, records: Iterable[WorkerRecord] = ()) -> None:
        self._parts: list[dict[str, WorkerRecord]] = [{} for _ in range(PARTS)]
        for record in records:
            self._parts[hash(record.worker_id) % PARTS][record.worker_id] = record
        self._count = sum(map(len, self._parts))

    def changed(self, changes: Mapping[str, WorkerRecord | None]) -> Workers:
        """Return a copy with these records added or replaced; None removes a record."""
        copy = Workers.__new__(Workers)
        copy._parts, owned = list(self._parts), set[int]()
        for worker_id, record in changes.items():
            number = hash(worker_id) % PARTS
            if number not in owned:
                owned.add(number)
                copy._parts[number] = dict(copy._parts[number])
            if record is None:
                copy._parts[number].pop(worker_id, None)
            else:
                copy._parts[number][worker_id] = record
        copy._count = self._count + sum(
            len(copy._parts[number]) - len(self._parts[number]) for number in owned
        )
        return copy

    def __getitem__(self, worker_id: str) -> WorkerRecord:
        return self._parts[hash(worker_id) % PARTS][worker_id]

    def __iter__(self) -> Iterator[str]:
        return chain.from_iterable(self._parts)

    def __len__(self) -> int:
        return self._count

    def values(self) -> Collection[WorkerRecord]:  # type: ignore[override]
        return [record for part in self._parts for record in part.values()]


NO_WORKERS: Final = Workers()
_NONE: Final[Mapping[str, WorkerRecord]] = MappingProxyType({})


class Index:
    """Workers by pool, and by the models that they hold (HELD). Immutable."""

    def __init__(self, workers: Iterable[WorkerRecord] = ()) -> None:
        self._pools: dict[str, Workers] = {}
        self._holders: dict[str, dict[str, WorkerRecord]] = {}
        self._update((None, worker) for worker in workers)

    def pools(self) -> Mapping[str, Workers]:
        """Return the workers of each pool, by id."""
        return self._pools

    def models(self) -> Set[str]:
        """Return the models that some worker holds."""
        return self._holders.keys()

    def holders(self, model: str) -> Mapping[str, WorkerRecord]:
        """Return the workers that hold the model, by id: the same object until one of their records
        changes.
        """
        return self._holders.get(model, _NONE)

    def changed(self, changes: Iterable[tuple[WorkerRecord | None, WorkerRecord | None]]) -> Index:
        """Return an index in which the first record of each pair is replaced by the second one. A
        first record of None adds, a second one of None removes. Unchanged parts are shared.
        """
        index = Index()
        index._pools, index._holders = dict(self._pools), dict(self._holders)
        index._update(changes)
        return index

    def _update(self, changes: Iterable[tuple[WorkerRecord | None, WorkerRecord | None]]) -> None:
        pools: dict[str, dict[str, WorkerRecord | None]] = defaultdict(dict)
        models: dict[str, dict[str, WorkerRecord | None]] = defaultdict(dict)
        for before, now in changes:
            for record, later in ((before, None), (now, now)):
                if record is not None:
                    pools[record.pool][record.worker_id] = later
                    for held in record.held:
                        models[held.model][record.worker_id] = later
        for pool, changed in pools.items():
            self._pools[pool] = self._pools.get(pool, NO_WORKERS).changed(changed)
            if not self._pools[pool]:
                del self._pools[pool]
        for model, changed in models.items():
            found = {**self._holders.get(model, _NONE), **changed}
            holders = {name: record for name, record in found.items() if record is not None}
            if holders:
                self._holders[model] = holders
            else:
                self._holders.pop(model, None)


@dataclass(frozen=True, slots=True)
class FleetSnapshot:
    """The fleet at `now_ms` (Unix time by Redis' clock)."""

    workers: Mapping[str, WorkerRecord]
    """Live workers by id."""
    cards: Mapping[str, models_pb2.ModelCard]
    """Cards by model."""
    failures: Mapping[str, Mapping[str, worker_pb2.Failure]]
    """Failures to load by model and worker."""
    now_ms: int
    leader: LeaderRecord | None = None
    """The scheduler that decides where models go; None while none is alive."""

    _index: list[Index] = field(default_factory=list, init=False, compare=False, repr=False)

    @property
    def index(self) -> Index:
        """Return the index of `workers`."""
        if not self._index:
            self._index.append(Index(self.workers.values()))
        return self._index[0]

    def with_index(self, index: Index) -> FleetSnapshot:
        """Set the index of `workers`, which is otherwise built when it is first used, and return
        self.
        """
        self._index[:] = [index]
        return self

    def pools(self) -> set[str]:
        """Return the pools with a live worker that does not drain."""
        return {
            pool
            for pool, workers in self.index.pools().items()
            if not all(worker.draining for worker in workers.values())
        }

    def in_pool(self, pool: str) -> list[WorkerRecord]:
        """Return the pool's live workers that do not drain."""
        workers = self.index.pools().get(pool, NO_WORKERS)
        return [worker for worker in workers.values() if not worker.draining]

    def has_staying(self, pool: str) -> bool:
        """Return whether the pool has a live worker that neither drains nor will be preempted."""
        workers = self.index.pools().get(pool, NO_WORKERS)
        return not all(worker.is_going for worker in workers.values())

    def lists(self) -> Iterable[Mapping[str, WorkerModelRecord]]:
        """Return the lists of models on workers' disks; a list that several workers share is
        returned once.
        """
        lists = {}
        for worker in self.workers.values():
            models = worker.listed if worker.listed is not None else worker.models
            lists[id(models)] = models
        return lists.values()

    def holders(self, model: str) -> Collection[WorkerRecord]:
        """Return live workers of any pool that hold the model (HELD)."""
        return self.index.holders(model).values()

    def holders_in(self, pool: str, model: str) -> list[WorkerRecord]:
        """Return the pool's live workers that do not drain and hold the model."""
        return [
            worker for worker in self.holders(model) if worker.pool == pool and not worker.draining
        ]

    def resident_on(self, model: str) -> list[WorkerRecord]:
        """Return live workers of any pool with the model on their device."""
        return [
            worker
            for worker in self.holders(model)
            if worker.state(model) == models_pb2.MODEL_STATE_RESIDENT
        ]

    def card(self, model: str) -> models_pb2.ModelCard | None:
        """Return the model's card; None until a worker has read its files."""
        return self.cards.get(model)

    def verdict(self, model: str, pool: str) -> worker_pb2.Failure | None:
        """Return why the pool cannot serve the model, or None while it may.

        1. The pool cannot serve a model if 3 of its workers, or all if it has fewer, have failed to
          load it and no other worker of the pool holds it.
        2. If the failures are ABSENT, the pool may still serve the model while another worker has
          it on disk, because disks differ.
        """
        workers = self.in_pool(pool)
        failed = self.failures.get(model, {})
        failures = [failed[worker.worker_id] for worker in workers if worker.worker_id in failed]
        healthy = [worker.state(model) for worker in workers if worker.worker_id not in failed]
        if (
            not failures
            or len(failures) < min(3, len(workers))
            or any(state in HELD for state in healthy)
        ):
            return None
        broken = [failure for failure in failures if failure.reason not in ABSENT]
        if not broken and models_pb2.MODEL_STATE_COLD in healthy:
            return None
        unasked = [failure for failure in failures if failure.reason == ModelUnreachable.reason]
        return (broken or unasked or failures)[0]
