"""Leadership, fencing of orders, and that an order and a claim never load a model twice, on a real
Redis.
"""

from __future__ import annotations

import asyncio

import pytest
from redis.asyncio import Redis
from shoal.v1 import models_pb2, worker_pb2

from libs.fleet import Fleet, LeaderRecord, LostLeadership
from libs.queue import LaneKey, Lanes, WorkerWakeup
from tests.fleet.test_registry import BROKEN, NOT_FOUND, heartbeat, holds

LANE = LaneKey("cpu", "org/model")
LOAD = worker_pb2.Directive(load_model="org/model", plan=1)


async def lead(fleet: Fleet, name: str = "a", *, last_ms: int = 600_000) -> int:
    fence = await fleet.lead(name, last_ms=last_ms)
    assert fence is not None
    return fence


async def test_one_leads_at_a_time(fleet: Fleet, other: Fleet) -> None:
    fences = await asyncio.gather(
        *(one.lead(f"s{number}", last_ms=600_000) for number, one in enumerate([fleet, other] * 20))
    )
    (fence,) = {fence for fence in fences if fence is not None}
    assert fences.count(None) == 39
    first = f"s{fences.index(fence)}"
    assert await fleet.lead(first, fence) == fence
    assert await other.lead("another", fence) is None
    assert await other.lead(first, fence - 1) is None  # started again under the same name
    leader = (await other.refresh()).leader
    assert leader is not None
    assert (leader.scheduler_id, leader.fence, leader.plan) == (first, fence, 0)


async def test_later_leader_has_a_higher_number(fleet: Fleet, other: Fleet, redis: Redis) -> None:
    first = await lead(fleet, last_ms=1)
    while (second := await other.lead("b", last_ms=600_000)) is None:
        pass
    assert second > first
    assert await fleet.lead("a", first) is None
    assert not await fleet.resign(first)
    assert await other.resign(second)
    assert await lead(fleet) > second
    await redis.flushall()  # numbers rise even if Redis forgets them, because they are times
    assert await lead(fleet) >= first
    await redis.flushall()
    assert await fleet.lead("a", second + 100) == second + 101


async def test_lead_that_is_not_renewed_is_over(fleet: Fleet, other: Fleet) -> None:
    await lead(fleet, last_ms=1)
    while (await other.refresh()).leader is not None:
        pass
    assert await other.lead("b") is not None


async def test_order_of_a_former_leader_is_refused(fleet: Fleet, other: Fleet) -> None:
    old = await lead(fleet)
    await fleet.resign(old)
    new = await lead(other, "b")
    with pytest.raises(LostLeadership):
        await fleet.order("w", "1", LOAD, fence=old, lane=LANE)
    with pytest.raises(LostLeadership):
        await fleet.note_plan(old, 1, {"org/model": "too late"})
    assert await fleet.orders("w", "1", 0) == []
    assert await fleet.plan_notes() == {}
    assert await fleet.claim(LANE, "v", 600_000)  # nor did the refused order take the claim
    assert await other.order("w", "1", LOAD, fence=new)
    assert len(await fleet.orders("w", "1", 0)) == 1
    assert await fleet.order(
        "w", "1", worker_pb2.Directive(evict_model="org/model")
    )  # an operator needs no lead


async def test_no_scheduler_leads_without_the_lock(fleet: Fleet) -> None:
    with pytest.raises(LostLeadership):
        await fleet.order("w", "1", LOAD, fence=1)


async def test_order_and_a_claim_exclude_each_other(fleet: Fleet, other: Fleet) -> None:
    fence = await lead(fleet)
    assert await other.claim(LANE, "v", 600_000)
    assert await fleet.order("w", "1", LOAD, fence=fence, lane=LANE) == 0
    assert await fleet.orders("w", "1", 0) == []
    assert await fleet.order(
        "v", "1", LOAD, fence=fence, lane=LANE
    )  # it loads the model already, or has lost it since
    assert await other.release_claim(LANE, "v")
    assert await fleet.order("w", "1", LOAD, fence=fence, lane=LANE)
    assert not await other.claim(LANE, "v", 600_000)
    assert await other.release_claim(LANE, "w")  # the ordered worker failed


async def test_further_copy_is_ordered_despite_a_claim_known_to_the_plan(
    fleet: Fleet, other: Fleet
) -> None:
    fence = await lead(fleet)
    assert await other.claim(LANE, "v", 600_000)
    assert await fleet.order("w", "1", LOAD, fence=fence, lane=LANE, known=["u"]) == 0
    assert await fleet.order("w", "1", LOAD, fence=fence, lane=LANE, known=["u", "v"])
    assert not await other.claim(LANE, "x", 600_000)


async def test_order_notifies_its_worker(fleet: Fleet, redis: Redis) -> None:
    wakeups = Lanes(redis, router_id="r", dead_result=b"").wakeups()
    assert await anext(wakeups) is None
    await fleet.order("w", "1", worker_pb2.Directive(evict_model="org/model"))
    assert await anext(wakeups) == WorkerWakeup("w")
    await wakeups.aclose()


async def test_notes_and_plan_are_published(fleet: Fleet, other: Fleet) -> None:
    fence = await lead(fleet)
    plan = (fence << 32) + 7
    await fleet.note_plan(fence, plan, {"a": "loads on w", "b": "held back"}, replace_all=True)
    await fleet.note_plan(fence, plan, {"b": "", "c": "held back"})
    assert await other.plan_notes() == {"a": "loads on w", "c": "held back"}
    assert await other.plan_notes("c", "b") == {"c": "held back"}
    leader = (await other.refresh()).leader
    assert leader == LeaderRecord("a", fence, plan, leader.plan_ms if leader else 0)
    await fleet.note_plan(
        fence, plan + 1, {"d": "loads on v"}, desired={"cpu": 2, "l4-spot": 0}, replace_all=True
    )
    assert await other.plan_notes() == {"d": "loads on v"}
    leader = (await other.refresh()).leader
    assert leader is not None
    assert leader.desired == {"cpu": 2, "l4-spot": 0}


async def expiry_seconds(redis: Redis, model: str) -> float:
    value = await redis.hget("v1:{fleet}:failures", f"{model} w")
    assert isinstance(value, bytes)
    seconds, _ = await redis.time()
    return int(value.split(b" ")[0]) / 1000 - seconds


async def test_model_that_fails_again_is_left_alone_for_longer(fleet: Fleet, redis: Redis) -> None:
    for minutes in (15, 30, 60, 120, 240, 480, 480):
        await fleet.record_failure("org/model", "w", BROKEN)
        assert minutes * 60 - 10 < await expiry_seconds(redis, "org/model") <= minutes * 60 + 1
    await fleet.report(
        heartbeat("w", holds(models_pb2.MODEL_STATE_RESIDENT))
    )  # success ends the series
    await fleet.record_failure("org/model", "w", BROKEN)
    assert await expiry_seconds(redis, "org/model") <= 15 * 60 + 1
    for _ in range(3):
        await fleet.record_failure("org/absent", "w", NOT_FOUND)
    assert await expiry_seconds(redis, "org/absent") <= 61


async def test_failures_are_forgiven_after_half_their_time(fleet: Fleet, redis: Redis) -> None:
    for _ in range(2):
        await fleet.record_failure("org/model", "w", BROKEN)
    await fleet.record_failure("org/absent", "w", NOT_FOUND)
    assert await fleet.forgive(["org/model", "org/absent", "org/other"]) == 0
    seconds, _ = await redis.time()
    for minutes, forgiven in ((16, 0), (14, 1)):  # left of 30
        value = f"{(seconds + minutes * 60) * 1000} ".encode() + BROKEN.SerializeToString()
        await redis.hset("v1:{fleet}:failures", "org/model w", value)
        assert await fleet.forgive(["org/model"]) == forgiven
    assert (await fleet.refresh()).failures == {"org/absent": {"w": NOT_FOUND}}
