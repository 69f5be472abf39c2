"""What a worker holds between Pull and Complete: leases, their jobs, and the resident models that serve them.

Three kinds of thread touch a HeldJob one after another: the event loop (pull, answer), a preparing or finishing thread, and the
device thread. Only `unwanted` is written by one while another may read it: a stale read costs some work and nothing else.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from shoal.v1 import inference_pb2, worker_pb2

from libs.models import Output, Prepared
from services.worker.jobs.spans import UNTRACED, JobSpan
from services.worker.memory.resident import Resident
from services.worker.scheduling.batcher import Flow

WEIGHTS: Final = (1e-3, 1e3)
"""Tenants' weights are kept within these, whatever a router says."""


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
