"""The arguments and results of `Lanes`: jobs, leased batches and gauges."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from libs.queue.keys import LaneKey

Priority = Literal["interactive", "bulk"]


@dataclass(frozen=True, slots=True)
class QueuedJob:
    """A job as a router enqueues it."""

    job_id: str
    tenant: str
    weight: float
    """The tenant's fair-queueing weight, above 0."""
    tokens: int
    """Estimated tokens, above 0."""
    deadline_ms: int
    """Unix time by Redis' clock."""
    priority: Priority
    payload: bytes


@dataclass(frozen=True, slots=True)
class PulledJob:
    """A leased job."""

    job_id: str
    payload: bytes
    attempts: int
    """Number of its earlier leases that expired."""
    tokens: int


@dataclass(frozen=True, slots=True)
class Pulled:
    """A leased batch, never empty."""

    batch_id: str
    jobs: list[PulledJob]
    tokens: int
    more: bool
    """The lane has jobs left."""


@dataclass(frozen=True, slots=True)
class Idle:
    """Nothing to lease."""

    next_expiry_ms: int | None
    """The time at which the next lease may expire (Unix time by Redis' clock) and another pull may
    succeed.
    """


@dataclass(frozen=True, slots=True)
class Completed:
    """The result of `Lanes.complete`."""

    accepted: int
    """The number of answers that ended their job."""
    own: list[tuple[str, bytes]]
    """Accepted answers for requests of this router, which do not pass through Redis."""


@dataclass(frozen=True, slots=True)
class RenewedBatch:
    """The result of renewing one lease."""

    batch_id: str
    lost: bool
    """The lease has expired."""
    gone: list[str]
    """Jobs of the batch that are finished or cancelled."""


@dataclass(frozen=True, slots=True)
class LaneGauges:
    """A lane's gauges and counters, in jobs unless tokens are named. From `enqueued` on they only
    grow until the lane was idle for a day.
    """

    lane: LaneKey
    queued_jobs: int
    queued_tokens: int
    leased_tokens: int
    enqueued: int
    done: int
    expired: int
    dead: int
    cancelled: int
    enqueued_tokens: int = 0
    """Tokens of the jobs in `enqueued`; its growth gives the arrival rate in tokens per second."""
    used_ms: int = field(default=0, compare=False)
    """The time at which jobs last arrived, or at which a later sweep found some in the lane. Unix
    time by Redis' clock; 0: unknown.
    """
