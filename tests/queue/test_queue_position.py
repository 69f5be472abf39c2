"""The queue position of a tenant's next job, compared with the order in which jobs are really
leased.
"""

from __future__ import annotations

import pytest
from redis.asyncio import Redis

from libs.queue import Lanes
from libs.queue.queue_position import QueuePosition, QueuePositions
from tests.queue.parts import LANE, add, ids, job, lease


async def read_positions(redis: Redis, *tenants: str) -> list[QueuePosition]:
    return await QueuePositions(redis).read(LANE, tenants)


async def test_nothing_stands_in_an_unused_lane(redis: Redis) -> None:
    assert await read_positions(redis, "t", "u") == [QueuePosition(), QueuePosition()]
    assert await redis.keys("*") == []


@pytest.mark.parametrize(
    ("tenant", "weight"), [("heavy", 1.0), ("light", 1.0), ("new", 1.0), ("heavy", 8.0)]
)
async def test_jobs_ahead_of_next_job_are_leased_before_it(
    lanes: Lanes, redis: Redis, tenant: str, weight: float
) -> None:
    for number in range(30):
        await add(
            lanes,
            job(f"heavy-{number}", tenant="heavy", weight=weight if tenant == "heavy" else 1.0),
        )
    for number in range(5):
        await add(lanes, job(f"light-{number}", tenant="light"))
    await lease(lanes, budget_jobs=4)
    (standing,) = await read_positions(redis, tenant)
    assert (standing.leased, standing.interactive) == (40, 310)
    await add(lanes, job("next", tenant=tenant, weight=weight))
    before = ids(await lease(lanes)).index("next")
    assert abs(standing.interactive_ahead - 10 * before) <= 20


async def test_both_classes_are_distinguished(lanes: Lanes, redis: Redis) -> None:
    await add(lanes, *(job(f"i{number}", 30, tenant="a") for number in range(2)))
    await add(lanes, *(job(f"b{number}", 30, tenant="a", priority="bulk") for number in range(4)))
    assert await read_positions(redis, "a", "b") == [
        QueuePosition(0, 60, 120, 60, 120, 2),
        QueuePosition(0, 60, 120, 30, 30, 1),
    ]


async def test_many_tenants_are_asked_for_in_several_calls(lanes: Lanes, redis: Redis) -> None:
    await add(lanes, job("a", 30))
    assert (
        await read_positions(redis, *map(str, range(600)))
        == [QueuePosition(interactive=30, interactive_ahead=30, interactive_jobs=1)] * 600
    )


async def test_only_an_idle_lane_is_forgotten(lanes: Lanes, redis: Redis) -> None:
    standings = QueuePositions(redis)
    await add(lanes, job("a"))
    assert not await standings.forget(LANE)
    pulled = await lease(lanes)
    assert not await standings.forget(LANE)
    await lanes.complete(LANE, "w", pulled.batch_id, [("a", b"answer")], release=True)
    assert await lanes.lane_gauges()
    assert await standings.forget(LANE)
    assert await lanes.lane_gauges() == []
    assert not [name for name in await redis.keys("*") if b":lane:" in name]
