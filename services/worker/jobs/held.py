"""State that a worker holds between Pull and Complete: leases, their jobs, and the models that
serve them.

Three kinds of thread own a HeldJob in sequence: the event loop (pull, answer), a preparing or
finishing thread, and the device thread. Only `unwanted` is written by one while another may read
it: a stale read costs some wasted work and nothing else.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final, Literal

from shoal.v1 import inference_pb2, worker_pb2

from libs.errors import DeadlinePassed
from libs.models import Output, Prepared
from services.worker.jobs.spans import UNTRACED, JobSpan
from services.worker.memory.resident import Resident
from services.worker.scheduling.batcher import Flow

WEIGHTS: Final = (1e-3, 1e3)
"""Tenants' weights are clamped to this range, whatever a router sends."""


class Unwanted(Exception):
    """The job was cancelled: no caller waits for its answer, so work on it stops without one."""


PreparationKind = Literal["quick", "images", "documents"]
"""The kind of a job's preparation. Jobs with large images or documents may take seconds without a
yield, so each kind has separate threads.
"""


@dataclass(slots=True, eq=False)
class Lease:
    """A pulled batch, its unanswered jobs and unsent answers. Event loop only."""

    lane: worker_pb2.Lane
    batch_id: str
    lease_seconds: float
    """Time until the lease expires unless it is renewed."""
    jobs: dict[int, HeldJob] = field(default_factory=dict)
    """Jobs not answered yet, by number."""
    outbox: list[worker_pb2.CompletedJob] = field(default_factory=list)
    """Answers not sent yet."""
    answer_seconds: dict[str, float] = field(default_factory=dict)
    """Device seconds spent on these answers, by job ID."""
    pulled_at: float = 0.0
    """The time at which the pull was sent, by the worker's monotonic clock."""
    traceparent: str = ""
    """Trace context of the last traced answer in the outbox."""
    until_unix: float = 0.0
    """The latest deadline of its jobs by Redis' clock. Retries of its answers stop then."""
    sending: bool = False
    closed: bool = False
    unreadable: int = 0
    """Payloads that cannot be parsed as a Job. The lease is left to expire, so that they run out of
    attempts in the lane.
    """


@dataclass(slots=True, eq=False)
class DocumentSeconds:
    """Time that document processes spent on a job. Written by the thread that prepares the job."""

    processor: float = 0.0
    """Processor time of these processes."""
    waited: float = 0.0
    """Wall-clock time that the preparing thread waited for them."""

    def add(self, processor: float, waited: float) -> None:
        self.processor += processor
        self.waited += waited


@dataclass(slots=True, eq=False)
class HeldJob:
    """A leased job in the worker. Times are seconds of the worker's monotonic clock."""

    number: int
    job: worker_pb2.Job
    lease: Lease
    resident: Resident
    received_at: float
    queue_seconds: float
    read_bytes: int = 0
    """Bytes that preparing the job reads, including equivalents for pixels and pages."""
    pages: int = 0
    """Pages of documents, as far as the job specifies them."""
    kind: PreparationKind = "quick"
    document_seconds: DocumentSeconds = field(default_factory=DocumentSeconds)
    estimated_tokens: int = 0
    """Estimate from `read_bytes`, before the job is tokenised."""
    finish_bytes: int = 0
    """Bytes of outputs to read when making the answer."""
    embedding_id: str = ""
    """The id of the vectors of an encode job."""
    prepared: Prepared | None = None
    outputs: dict[int, Output] = field(default_factory=dict)
    prepare_seconds: float = 0.0
    forward_seconds: float = 0.0
    learnt: tuple[int, int] = (0, 0)
    """The job's `meter.whole_texts`: tokens and bytes."""
    device_seconds: float = 0.0
    """The job's share of forward passes, by tokens. Guarded by the lock in `waste.py`."""
    unwanted: bool = False
    """Cancelled, leased to another worker, or returned to its lane."""
    is_growing: bool = False
    """Further sequences will be added to `prepared`: its texts are still read. Guarded by the
    runner's lock.
    """
    queued: int = 0
    """Sequences that were added to the runner. Guarded by its lock."""
    streamed: dict[int, str] = field(default_factory=dict)
    """Text already streamed to clients, by sequence index."""
    streams_chunks: bool = False
    """A client reads the job's chunks while later ones are computed."""
    streamed_chunks: int = 0
    """Chunks already streamed to the client. Event loop only."""
    span: JobSpan = UNTRACED
    flow: Flow = field(init=False)
    """The fair-queueing flow that the job's thread and device time is charged to."""

    def __post_init__(self) -> None:
        kind = self.job.WhichOneof("operation")
        is_bulk = (
            kind is not None and getattr(self.job, kind).priority == inference_pb2.PRIORITY_BULK
        )
        self.flow = Flow(self.lease.lane.adapter, self.job.tenant, is_bulk)

    def drop_operation(self) -> None:
        """Free the operation's message once it was read, so that its texts are not in memory
        twice.
        """
        kind = self.job.WhichOneof("operation")
        if kind is not None:
            self.job.ClearField(kind)

    def check_wanted(self, unix_time: float, done: str) -> None:
        """Raise Unwanted if the job was cancelled, DeadlinePassed if its deadline passed before it
        was `done`.
        """
        if self.unwanted:
            raise Unwanted
        if self.deadline_unix <= unix_time:
            raise DeadlinePassed(f"the deadline passed before the job was {done}")

    @property
    def deadline_unix(self) -> float:
        return self.job.deadline_unix_ms / 1000

    @property
    def weight(self) -> float:
        least, most = WEIGHTS
        return min(max(self.job.weight, least), most) if self.job.weight > 0 else 1.0

    @property
    def ready(self) -> Prepared:
        """The prepared job. Raises RuntimeError if it is not prepared yet."""
        if self.prepared is None:
            raise RuntimeError("the job was not prepared")
        return self.prepared

    @property
    def is_complete(self) -> bool:
        """True if every sequence has its output, and no further sequence will be added."""
        return not self.is_growing and len(self.outputs) == len(self.ready.sequences)
