"""The rules by which requests are refused, and for how long. Pure: counts, snapshots and the clock
are arguments.

`controller.py` gathers the arguments and applies the rules in order.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Final

from shoal.v1 import models_pb2

from libs.errors import QueueFull, from_reason
from libs.fleet import FleetSnapshot
from libs.queue import LaneKey, Priority
from libs.queue.queue_position import QueuePosition
from services.router.admission.routing.routes import why_broken
from services.router.state.throughput import BULK_SHARE, Throughput, wait_seconds

MIN_WORK_SHARE: Final = 0.05
"""If a lane's work exceeds this share of a request's time, the router reads the queue position from
Redis.
"""
PLANNED_TIME_SHARE: Final = 0.8
"""Share of a request's time that admission plans with: speeds are estimates, and a late answer is
wasted work.
"""
MAX_UNKNOWN: Final = 256
MAX_UNKNOWN_OF_TENANT: Final = 32
"""Maximum lanes with work at one router for models that no worker knows: in total, and with work of
one tenant.
"""


def refuse_broken(lane: LaneKey, snapshot: FleetSnapshot) -> None:
    """Raise the failure, usually ModelNotFound or ModelBroken, while the pool is known not to serve
    the lane (`why_broken`).
    """
    failure = why_broken(lane, snapshot)
    if failure is not None:
        raise from_reason(
            failure.reason,
            failure.message,
            field=failure.field,
            retry_after=failure.retry_after_seconds,
        )


def may_be_late(seconds: float, throughput: Throughput, tokens: int) -> bool:
    """Return whether a lane with `tokens` may make a request late, so that reading its queue
    position is worth a call to Redis.

    A lane without recent backlog and with less than a batch for each worker does not count: its
    speed may have been measured at a bad time, and work that fits into the next batch does not
    wait.
    """
    is_backlogged = throughput.drain > 0 or tokens > throughput.batch_tokens
    return (
        throughput.is_known
        and is_backlogged
        and throughput.seconds(tokens) > MIN_WORK_SHARE * seconds
    )


def refuse_late(
    remaining_seconds: float,
    most_seconds: float,
    throughput: Throughput,
    position: QueuePosition,
    priority: Priority,
    *,
    own_tokens: int,
    since: int = 0,
    waiting_tokens: int = 0,
) -> None:
    """Raise QueueFull if a request would be answered after its deadline, or wait longer than
    `most_seconds`.

    1. A request with nothing ahead of it is admitted however large it is: a speed measured on small
      batches is far too low for a large one, and the work may as well begin.
    2. Any other request must fit its queueing time and that of its batch into PLANNED_TIME_SHARE of
       its remaining time. In a lane that has been backlogged its own work counts in full, because
       batches are full there.

    The retry delay is the time until the lane is half as full as allowed; `retry_slots.py` spreads
    the retries.

    Args:
        since: Tokens admitted after the queue position was read.
        waiting_tokens: Tokens of the same tenant in the lane.
    """
    wait = (
        wait_seconds(throughput, position, priority, since, waiting_tokens)
        if throughput.is_known
        else 0.0
    )
    if wait <= 0:
        return
    own = throughput.seconds(own_tokens)
    service = max(min(throughput.batch_seconds, wait + own), own if throughput.drain > 0 else 0.0)
    most = most_seconds / (BULK_SHARE if priority == "bulk" else 1)
    allowed = min(remaining_seconds * PLANNED_TIME_SHARE - service, most)
    if wait <= allowed:
        return
    ahead = f"about {wait:.1f} s of work wait before this request"
    if allowed == most:
        message = f"{ahead}; at most {most:.0f} s are allowed"
    else:
        message = (
            f"{ahead}, which takes {service:.1f} s itself:"
            f" too much for its deadline in {remaining_seconds:.1f} s"
        )
    raise QueueFull(message, retry_after=_soon(wait - max(0.0, allowed) / 2))


def refuse_over_quota(tokens: int, waiting: int, most: int, throughput: Throughput) -> None:
    """Raise QueueFull if a tenant's waiting work plus the request's `tokens` exceeds its quota at
    this router.

    A request larger than the quota is admitted when the tenant has no waiting work.
    """
    if most and waiting and waiting + tokens > most:
        message = (
            f"{waiting:,} tokens of this tenant wait at this router; its quota is {most:,},"
            f" and the request has {tokens:,}"
        )
        raise QueueFull(
            message,
            retry_after=_soon(
                throughput.seconds(waiting + tokens - most) if throughput.is_known else 1.0
            ),
        )


def refuse_unknown(lane: LaneKey, tenant: str, opened: Mapping[LaneKey, Collection[str]]) -> None:
    """Raise QueueFull for one more lane of a model that no worker knows, if too many are open.

    Clients can invent any number of models, and each lane costs all routers something.

    Args:
        opened: Such lanes here, with the tenants that have work in them.
    """
    if lane in opened:
        return
    own = sum(tenant in tenants for tenants in opened.values())
    if own >= MAX_UNKNOWN_OF_TENANT or len(opened) >= MAX_UNKNOWN:
        waited = (
            f"{own} such models of this tenant"
            if own >= MAX_UNKNOWN_OF_TENANT
            else f"{len(opened)} such models"
        )
        raise QueueFull(
            f"no worker knows {lane.model} yet, and {waited} have waiting requests already",
            retry_after=2.0,
        )


def queue_full(
    lane: LaneKey, queued: int, most: int, tokens: int, throughput: Throughput
) -> QueueFull:
    """Return the error for a request that would exceed the lane's cap."""
    message = f"the lane of {lane.model} is full: {queued:,} of {most:,} tokens"
    return QueueFull(
        message, retry_after=_soon(throughput.seconds(tokens) if throughput.is_known else 1.0)
    )


def _soon(seconds: float) -> float:
    """Clamp a retry delay to 0.1..60 s."""
    return min(max(seconds, 0.1), 60.0)


def deadline_message(lane: LaneKey, snapshot: FleetSnapshot) -> str:
    """Return the error message for a passed deadline: the step for which the request was
    waiting.
    """
    workers = snapshot.in_pool(lane.pool)
    if not workers:
        return f"the deadline passed: pool {lane.pool} has no worker to serve {lane.model}"
    states = {worker.state(lane.model) for worker in workers}
    if models_pb2.MODEL_STATE_RESIDENT in states:
        loaded = {
            name
            for worker in workers
            if lane.model in worker.models
            for name in worker.models[lane.model].adapters
        }
        if lane.adapter and lane.adapter not in loaded:
            return (
                f"the deadline passed before a worker of pool {lane.pool} had loaded"
                f" {lane.adapter} into {lane.model}"
            )
        return f"the deadline passed before {lane.model} answered"
    if models_pb2.MODEL_STATE_LOADING in states:
        return f"the deadline passed while {lane.model} was being loaded"
    if models_pb2.MODEL_STATE_DOWNLOADING in states:
        return (
            f"the deadline passed while {lane.model} was being downloaded; the download continues"
        )
    return f"the deadline passed before a worker of pool {lane.pool} could load {lane.model}"
