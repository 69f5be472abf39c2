"""What goes into a lane and what comes out, for those who call `Lanes`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from libs.queue.keys import LaneKey

Priority = Literal["interactive", "bulk"]


@dataclass(frozen=True, slots=True)
class QueuedJob:
    """A job as a router enqueues it. `deadline_ms` is Unix time by Redis' clock; `tokens` and `weight` are above 0."""

    job_id: str
    tenant: str
    weight: float
    tokens: int
    deadline_ms: int
    priority: Priority
    payload: bytes


@dataclass(frozen=True, slots=True)
class PulledJob:
    """A leased job. `attempts`: leases of it that ran out before this one."""

    job_id: str
    payload: bytes
    attempts: int
    tokens: int


@dataclass(frozen=True, slots=True)
class Pulled:
    """A leased batch, never empty. `more`: jobs are left in the lane."""

    batch_id: str
    jobs: list[PulledJob]
    tokens: int
    more: bool


@dataclass(frozen=True, slots=True)
class Idle:
    """Nothing to lease. `next_expiry_ms`: when a lease may run out (Unix time by Redis' clock), and another look is worth it."""

    next_expiry_ms: int | None


@dataclass(frozen=True, slots=True)
class Completed:
    """`accepted`: answers that ended their job. `own`: those of them that this router waits for itself; Redis does not get them."""

    accepted: int
    own: list[tuple[str, bytes]]


@dataclass(frozen=True, slots=True)
class RenewedBatch:
    """`lost`: the lease has run out. `gone`: jobs of it that are finished or cancelled."""

    batch_id: str
    lost: bool
    gone: list[str]


@dataclass(frozen=True, slots=True)
class LaneGauges:
    """A lane's counters: of jobs unless tokens are named. From `enqueued` on they only grow, until the lane is idle for a day.

    `enqueued_tokens`: of the jobs in `enqueued`; from its growth come arrivals in tokens a second. `used_ms`: when jobs came last,
    or a later moment at which the lane was swept and had some; Unix time by Redis' clock, 0: unknown.
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
