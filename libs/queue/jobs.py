"""The arguments and results of `Lanes`: jobs, leased batches and gauges."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from libs.queue.keys import LaneKey

Priority = Literal["interactive", "bulk"]


@dataclass(frozen=True, slots=True)
class QueuedJob:
    """A job as a router enqueues it. `deadline_ms` is Unix time by Redis' clock; `tokens` and
    `weight` are above 0.
    """

    job_id: str
    tenant: str
    weight: float
    tokens: int
    deadline_ms: int
    priority: Priority
    payload: bytes


@dataclass(frozen=True, slots=True)
class PulledJob:
    """A leased job. `attempts`: how many earlier leases of it expired."""

    job_id: str
    payload: bytes
    attempts: int
    tokens: int


@dataclass(frozen=True, slots=True)
class Pulled:
    """A leased batch, never empty. `more`: the lane has jobs left."""

    batch_id: str
    jobs: list[PulledJob]
    tokens: int
    more: bool


@dataclass(frozen=True, slots=True)
class Idle:
    """Nothing to lease. `next_expiry_ms`: when the next lease may expire (Unix time by Redis'
    clock) and another pull is worth it."""

    next_expiry_ms: int | None


@dataclass(frozen=True, slots=True)
class Completed:
    """`accepted`: how many answers ended their job. `own`: those for requests of this router, which
    do not go through Redis.
    """

    accepted: int
    own: list[tuple[str, bytes]]


@dataclass(frozen=True, slots=True)
class RenewedBatch:
    """`lost`: the lease has expired. `gone`: jobs of the batch that are finished or cancelled."""

    batch_id: str
    lost: bool
    gone: list[str]


@dataclass(frozen=True, slots=True)
class LaneGauges:
    """A lane's gauges and counters, in jobs unless tokens are named. From `enqueued` on they only
    grow until the lane was idle a day.

    `enqueued_tokens`: of the jobs in `enqueued`; its growth gives the arrival rate in tokens a
    second. `used_ms`: when jobs arrived last, or when a later sweep found some in the lane; Unix
    time by Redis' clock, 0: unknown.
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
    used_ms: int = field(default=0, compare=False)
