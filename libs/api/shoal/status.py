"""The state of the mesh: models, aliases, workers and lanes, as frozen dataclasses (protos
models.proto, aliases.proto and mesh.proto).

`state` of a model is one of "absent", "downloading" (from a store to a worker's disk), "cold" (on
disk), "loading", "warm" (in host memory), "resident" (on the device), "failed".
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NoReturn, Self

from shoal.errors import InvalidInput


class AliasModels:
    """The models of an alias while it is changed from one to another."""

    __slots__ = ()
    next_model: str
    previous_model: str

    @property
    def other_model(self) -> str:
        """The second model of a change: the next one before the switch, the previous one after it,
        and empty without a change.
        """
        return self.next_model or self.previous_model


@dataclass(frozen=True, slots=True)
class Alias(AliasModels):
    """A name that stands for a model. The methods return the alias as it is after a step of a
    change to another model, and raise InvalidInput, with the step to take instead.

    Attributes:
        model: The model that answers requests by the name.
        next_model: The model to which the alias is being changed; empty: no change is in progress.
        previous_model: The model before the last change, to which the alias can be rolled back.
        output: Where the vectors of the corpus by the next model are written; may be empty.
        revision: Number of its last change.
    """

    name: str
    model: str
    next_model: str = ""
    previous_model: str = ""
    output: str = ""
    revision: int = 0

    def started(self, model: str, output: str = "") -> Self:
        """Begin a change to `model`. The same change may be begun again."""
        if self.previous_model:
            self._refuse(
                f"its change from {self.previous_model} to {self.model} is not finished: "
                f"`shoal migrate finish {self.name}` gives up the way back"
            )
        if self.model == model:
            self._refuse(f"it names {model} already")
        if self.next_model not in ("", model):
            self._refuse(
                f"it is being changed to {self.next_model} already: "
                f"`shoal migrate finish {self.name}` gives that up"
            )
        return replace(self, next_model=model, output=output or self.output)

    def switched(self) -> Self:
        """Let the next model answer. An alias that was switched already stays as it is."""
        if self.previous_model and not self.next_model:
            return self
        if not self.next_model:
            self._refuse(
                f"no change is in progress: `shoal migrate start {self.name} --to MODEL` begins one"
            )
        return replace(self, model=self.next_model, next_model="", previous_model=self.model)

    def rolled_back(self) -> Self:
        """Let the previous model answer again. The change stays in progress. An alias that was
        rolled back already, or not switched yet, stays as it is.
        """
        if self.next_model and not self.previous_model:
            return self
        if not self.previous_model:
            self._refuse("it has no previous model")
        return replace(self, model=self.previous_model, next_model=self.model, previous_model="")

    def finished(self) -> Self:
        """End the change: keep the model that answers now, and forget the other one."""
        if not self.other_model:
            self._refuse("no change is in progress")
        return replace(self, next_model="", previous_model="", output="")

    def _refuse(self, reason: str) -> NoReturn:
        raise InvalidInput(f"alias {self.name}: {reason}", field="alias")


@dataclass(frozen=True, slots=True)
class ModelCard:
    """The properties of a model, read from its files. `bytes`, `data_type` and `tokens_per_byte`
    are empty until it has been loaded."""

    model: str
    revision: str
    family: str
    tasks: tuple[str, ...]
    representations: tuple[str, ...]
    dimensions: int
    multi_vector_dimensions: int
    max_tokens: int
    bytes: int
    labels: tuple[str, ...]
    data_type: str
    prompts: tuple[str, ...]
    tokens_per_byte: float
    pools: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ModelPlace:
    """The state of a model on one worker."""

    worker_id: str
    state: str
    bytes: int
    load_seconds: float
    tokens_per_second: float
    last_error: str
    pinned: bool
    downloaded_bytes: int
    """Bytes on disk in state "downloading", of `download_bytes` in all; both are 0 in any other
    state.
    """
    download_bytes: int
    host_bytes: int = 0
    """Bytes of host memory for a copy in addition to the one on the device."""
    adapters: tuple[str, ...] = ()
    """The adapters that are loaded with it."""
    leaving: bool = False
    """Whether it accepts no new work and is unloaded once the jobs in flight are done."""


@dataclass(frozen=True, slots=True)
class Model:
    """A model in the mesh; `state` is the most ready one on any worker. `card` is None until a
    worker has read its files.
    """

    model: str
    state: str
    card: ModelCard | None
    places: tuple[ModelPlace, ...]
    queued_tokens: int
    last_error: str

    @property
    def downloaded(self) -> float | None:
        """The progress of the most advanced download, 0..1; None if there is none, or its size is
        not known yet.
        """
        shares = [
            place.downloaded_bytes / place.download_bytes
            for place in self.places
            if place.download_bytes
        ]
        return max(shares, default=None)


@dataclass(frozen=True, slots=True)
class WorkerStatus:
    """A worker as last reported."""

    worker_id: str
    pool: str
    device: str
    memory_bytes: int
    used_bytes: int
    resident: tuple[str, ...]
    draining: bool
    heartbeat_age_seconds: float
    host_memory_bytes: int = 0
    """Host memory that warm models may take; `host_used_bytes` of it is in use."""
    host_used_bytes: int = 0
    preempted_in_seconds: float | None = None
    """Seconds until its machine is preempted (a spot notice), as last reported; None without a
    notice.
    """
    device_seconds: float = 0.0
    """Device time used since the worker started; `wasted_seconds` of it for requests that had ended
    before their answer.
    """
    wasted_seconds: float = 0.0
    kernels: str = ""
    """Native kernels that a CPU worker uses ("avx2", "avx512", "avx512_bf16"), or "none: " and why.
    Empty on another device.
    """


@dataclass(frozen=True, slots=True)
class LaneStatus:
    """The state of a lane. The counters of jobs restart after the lane was idle for a day."""

    pool: str
    model: str
    adapter: str
    queued_jobs: int
    queued_tokens: int
    leased_tokens: int
    enqueued_jobs: int
    done_jobs: int
    expired_jobs: int
    dead_jobs: int
    cancelled_jobs: int
    enqueued_tokens: int = 0
    oldest_seconds: float = 0.0
    """The age of the oldest job that the answering router waits for; 0: it waits for none."""


@dataclass(frozen=True, slots=True)
class PoolStatus:
    """The number of workers that the leading scheduler wants in a pool."""

    pool: str
    desired_workers: int


@dataclass(frozen=True, slots=True)
class Scheduler:
    """The scheduler that leads, by its last plan. `scheduler_id` is empty while none does: workers
    then claim models themselves.
    """

    scheduler_id: str = ""
    plan: int = 0
    age_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class ProcessStatus:
    """A process that `shoal up` supervises.

    Attributes:
        state: "running", "restarting", or "given up" after it ended too often.
        detail: How it last ended, and the last line of its log; empty if it has never ended.
    """

    name: str
    state: str
    restarts: int
    detail: str


@dataclass(frozen=True, slots=True)
class Mesh:
    """The whole mesh, as the router `router_id` sees it."""

    workers: tuple[WorkerStatus, ...]
    models: tuple[Model, ...]
    lanes: tuple[LaneStatus, ...]
    router_id: str
    scheduler: Scheduler = Scheduler()
    pools: tuple[PoolStatus, ...] = ()
    """Empty while no scheduler leads."""
    processes: tuple[ProcessStatus, ...] = ()
    """The processes of a mesh that `shoal up` started; else empty."""


@dataclass(frozen=True, slots=True)
class PlacementReason:
    """Why a worker is or is not chosen.

    Attributes:
        score: From 1 (resident) to 0 (absent), less the share of time that the worker is busy.
    """

    worker_id: str
    pool: str
    eligible: bool
    score: float
    reason: str


@dataclass(frozen=True, slots=True)
class Placement:
    """The placement of a model and its reasons.

    Attributes:
        plan: The entry of the scheduler's last plan for the model; may be empty.
    """

    model: str
    summary: str
    workers: tuple[PlacementReason, ...]
    scheduler: Scheduler
    plan: str
