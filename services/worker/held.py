"""What a worker holds between Pull and Complete: leases, their jobs, and the resident models that serve them.

Three kinds of thread touch a HeldJob one after another: the event loop (pull, answer), a preparing or finishing thread, and the
device thread. Only `unwanted` is written by one while another may read it: a stale read costs some work and nothing else.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Protocol

from shoal.v1 import inference_pb2, worker_pb2

from libs.catalog.card import Card
from libs.models import Between, GoOn, Head, Output, Prepared, Result, Sequence, Work, nothing_between
from services.worker.adapters import AdapterCache
from services.worker.batcher import Flow
from services.worker.meter import Meter
from services.worker.spans import UNTRACED, JobSpan

WEIGHTS: Final = (1e-3, 1e3)
"""Tenants' weights are kept within these, whatever a router says."""


class Parked(Protocol):
    """A model in host memory, off the device."""

    @property
    def host_bytes(self) -> int:
        """What it takes there."""

    def resume(self) -> Model:
        """Back to the device. Blocking, but need not wait for the copy: the first forward does, on the device."""


class Model(Protocol):
    """What the worker needs of a model: `libs.models.TextModel` is one."""

    card: Card
    bytes: int

    def prepare(self, work: Work, go_on: GoOn) -> Prepared:
        """`go_on` is called every few milliseconds; what it raises ends the preparation."""

    def forward(self, head: Head, sequences: list[Sequence], between: Between = nothing_between) -> list[Output]:
        """`between` may be called between two layers; a forward of this model or of another may run within."""

    def finish(self, prepared: Prepared, outputs: list[Output]) -> Result: ...

    def widened(self) -> Model | None:
        """The same in float32 on the CPU, read anew; None if it computes in float32 already. Blocking; raises ShoalError."""

    @property
    def host_bytes(self) -> int:
        """Of a copy that it keeps in host memory while it is on the device; 0: it keeps none."""

    def drop_host_copy(self) -> None:
        """Keep none from now on. Blocking."""

    def park(self) -> Parked:
        """Give its device memory back, and stay in host memory. No call of it may be under way. Blocking."""

    def probe(self) -> float:
        """Bytes of activations that a token of a batch takes on the device, measured with a tiny forward. Blocking."""


Load = Callable[[Path, str], Model]
"""Reads a model from its directory: (directory, model id). Blocking; raises ShoalError."""


def _set() -> asyncio.Event:
    event = asyncio.Event()
    event.set()
    return event


@dataclass(slots=True, eq=False)
class Resident:
    """A model on the device. Times are seconds of the worker's rising clock."""

    name: str
    model: Model
    load_seconds: float
    loaded_at: float
    last_used: float
    pinned: bool = False
    leaving: bool = False
    """It is being unloaded: it takes no new work, and goes when `held_jobs` is 0."""
    held_jobs: int = 0
    drained: asyncio.Event = field(default_factory=_set)
    """Set while no job is held."""
    held_tokens: float = 0.0
    """Of the jobs held, estimated."""
    uses: int = 0
    """Jobs since it became resident."""
    floor: float = 0.0
    """The value of the model that was evicted last before it was used last (GDSF)."""
    activation_bytes_per_token: float = 0.0
    turn: float = 0.0
    """What it has had of the device, as the batcher counts it: the lower, the sooner it is next."""
    meter: Meter = field(default_factory=Meter)
    adapters: AdapterCache = field(default_factory=AdapterCache)


@dataclass(slots=True, eq=False)
class Lease:
    """A pulled batch and what is still owed for it. Belongs to the event loop."""

    lane: worker_pb2.Lane
    batch_id: str
    lease_seconds: float
    """How long it lasts unless renewed."""
    jobs: dict[int, HeldJob] = field(default_factory=dict)
    """Not answered yet, by number."""
    outbox: list[worker_pb2.CompletedJob] = field(default_factory=list)
    """Answers not sent yet."""
    answer_seconds: dict[str, float] = field(default_factory=dict)
    """Device seconds that went into these, by job id."""
    asked_at: float = 0.0
    """When the pull was sent, by the worker's rising clock."""
    traceparent: str = ""
    """Of the last traced answer in the outbox."""
    until_unix: float = 0.0
    """When the last of its jobs' deadlines passes, by Redis' clock: nobody wants its answers after that."""
    sending: bool = False
    closed: bool = False
    unreadable: int = 0
    """Payloads that were no Job: they must run out of attempts in the lane, so the lease is left to expire."""


@dataclass(slots=True, eq=False)
class HeldJob:
    """A job on its way through the worker. Times are seconds of the worker's rising clock."""

    number: int
    job: worker_pb2.Job
    lease: Lease
    resident: Resident
    received_at: float
    queue_seconds: float
    read_bytes: int = 0
    """That preparing it reads."""
    estimated_tokens: int = 0
    """Of these, before it is tokenised."""
    prepared: Prepared | None = None
    outputs: dict[int, Output] = field(default_factory=dict)
    prepare_seconds: float = 0.0
    forward_seconds: float = 0.0
    learnt: tuple[int, int] = (0, 0)
    """`meter.whole_texts` of it."""
    device_seconds: float = 0.0
    """Its share of forward passes, by tokens. `waste.py` guards it."""
    unwanted: bool = False
    """Cancelled, or leased to another worker, or handed back."""
    span: JobSpan = UNTRACED
    flow: Flow = field(init=False)
    """Whose share of the threads and of the device it takes."""

    def __post_init__(self) -> None:
        kind = self.job.WhichOneof("operation")
        is_bulk = kind is not None and getattr(self.job, kind).priority == inference_pb2.PRIORITY_BULK
        self.flow = Flow(self.lease.lane.adapter, self.job.tenant, is_bulk)

    def drop_operation(self) -> None:
        """Once it was read, its texts need not be here twice."""
        kind = self.job.WhichOneof("operation")
        if kind is not None:
            self.job.ClearField(kind)

    @property
    def deadline_unix(self) -> float:
        return self.job.deadline_unix_ms / 1000

    @property
    def weight(self) -> float:
        least, most = WEIGHTS
        return min(max(self.job.weight, least), most) if self.job.weight > 0 else 1.0

    @property
    def ready(self) -> Prepared:
        """What was prepared; only for jobs that are past that."""
        if self.prepared is None:
            raise RuntimeError("the job was not prepared")
        return self.prepared

    @property
    def is_complete(self) -> bool:
        """Whether every sequence has its output."""
        return len(self.outputs) == len(self.ready.sequences)
