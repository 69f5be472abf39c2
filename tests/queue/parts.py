"""Shared by the tests of the queue: jobs, a clock moved by hand, and access to a lane's keys."""

from __future__ import annotations

from dataclasses import dataclass

from redis.asyncio import Redis

from libs.queue import LaneGauges, LaneKey, Lanes, Priority, Pulled, QueuedJob
from libs.queue.keys import RedisKeys

DEAD = b"worker lost"
LANE = LaneKey("cpu", "org/model")
LEASE_MS = 1000
FAR_MS = 1_800_000_000_000


class Clock:
    """Unix milliseconds, moved by hand."""

    def __init__(self) -> None:
        self.ms = 1_700_000_000_000

    def __call__(self) -> int:
        return self.ms


def job(
    job_id: str,
    tokens: int = 10,
    *,
    tenant: str = "t",
    weight: float = 1.0,
    priority: Priority = "interactive",
    deadline_ms: int = FAR_MS,
) -> QueuedJob:
    return QueuedJob(job_id, tenant, weight, tokens, deadline_ms, priority, payload(job_id))


def payload(job_id: str) -> bytes:
    return b"payload \0 of " + job_id.encode()


def make_lanes(redis: Redis, clock: Clock, router_id: str) -> Lanes:
    return Lanes(redis, router_id=router_id, dead_result=DEAD, lease_ms=LEASE_MS, clock=clock)


async def add(lanes: Lanes, *jobs: QueuedJob, max_tokens: int = 10**9) -> bool:
    """Enqueues the jobs as one request."""
    (admitted,) = await lanes.enqueue(LANE, [jobs], max_tokens=max_tokens, notify=False)
    return admitted


async def lease(
    lanes: Lanes, budget_tokens: int = 10**6, budget_jobs: int = 256, *, worker: str = "w"
) -> Pulled:
    """A pull that must find something."""
    pulled = await lanes.pull(
        LANE, worker_id=worker, budget_tokens=budget_tokens, budget_jobs=budget_jobs
    )
    assert isinstance(pulled, Pulled)
    return pulled


def ids(pulled: Pulled) -> list[str]:
    return [leased.job_id for leased in pulled.jobs]


async def gauges(lanes: Lanes) -> LaneGauges:
    (only,) = await lanes.lane_gauges()
    return only


@dataclass(frozen=True)
class Inside:
    """The structure of a lane, read past `Lanes`."""

    waiting: list[str]
    payloads: set[str]
    owners: dict[str, str]
    attempts: dict[str, int]
    leases: set[str]
    batches: set[str]
    tenants: set[str]
    queued_tokens: int
    holders: dict[str, str]
    tenant_of: dict[str, str]


def raw(reply: object) -> bytes:
    """Type the reply of a connection that decodes nothing, which redis types as text too."""
    assert isinstance(reply, bytes)
    return reply


async def look_inside(redis: Redis) -> Inside:
    (
        interactive,
        bulk,
        payloads,
        owners,
        attempts,
        tags_i,
        tags_b,
        leases,
        batches,
        *_,
        holders,
        tenant_of,
        _,
    ) = RedisKeys(1).lane_keys(LANE)
    members = [
        raw(member) for lane in (interactive, bulk) for member in await redis.zrange(lane, 0, -1)
    ]
    return Inside(
        waiting=[member.decode().split(":", 3)[3] for member in members],
        payloads={raw(name).decode() for name in await redis.hkeys(payloads)},
        owners={
            raw(name).decode(): raw(router).partition(b"\0")[0].decode()
            for name, router in (await redis.hgetall(owners)).items()
        },
        attempts={
            raw(name).decode(): int(tries)
            for name, tries in (await redis.hgetall(attempts)).items()
        },
        leases={raw(name).decode() for name in await redis.zrange(leases, 0, -1)},
        batches={raw(name).decode() for name in await redis.hkeys(batches)},
        tenants={
            raw(name).decode() for tags in (tags_i, tags_b) for name in await redis.hkeys(tags)
        },
        queued_tokens=sum(int(member.split(b":")[1]) for member in members),
        tenant_of={
            raw(name).decode(): raw(tenant).decode()
            for name, tenant in (await redis.hgetall(tenant_of)).items()
        },
        holders={
            raw(name).decode(): raw(worker).decode().rstrip()
            for name, worker in (await redis.hgetall(holders)).items()
        },
    )


NOTHING = Inside([], set(), {}, {}, set(), set(), set(), 0, {}, {})
"""Assert that the lane is idle."""
