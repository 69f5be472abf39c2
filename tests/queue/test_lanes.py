"""Into the lane: whole requests or nothing, each job once."""

from __future__ import annotations

from dataclasses import replace

from redis.asyncio import Redis

from libs.queue import Lanes, QueuedJob
from tests.queue.parts import LANE, add, gauges, ids, job, lease, look_inside, payload


async def test_pulled_job_equals_the_enqueued_one(lanes: Lanes) -> None:
    assert await add(lanes, job("a:b|{c} ü", 7))
    pulled = await lease(lanes)
    assert [(one.job_id, one.payload, one.attempts, one.tokens) for one in pulled.jobs] == [
        ("a:b|{c} ü", payload("a:b|{c} ü"), 0, 7)
    ]
    assert (pulled.tokens, pulled.more) == (7, False)


async def test_each_request_enters_whole_or_not_at_all(lanes: Lanes) -> None:
    groups = [[job("a", 40), job("b", 40)], [job("c", 10), job("d", 20)], [job("e", 20)]]
    assert await lanes.enqueue(LANE, groups, max_tokens=100, notify=False) == [True, False, True]
    now = await gauges(lanes)
    assert (now.queued_jobs, now.queued_tokens, now.enqueued, now.enqueued_tokens) == (
        3,
        100,
        3,
        100,
    )
    assert ids(await lease(lanes)) == ["a", "b", "e"]


async def test_lane_records_the_time_of_the_last_arrival(lanes: Lanes) -> None:
    before = await lanes.now_ms()
    assert await add(lanes, job("a", 7))
    used = (await gauges(lanes)).used_ms
    assert before <= used <= await lanes.now_ms()
    await lease(lanes)
    assert (await gauges(lanes)).used_ms == used


async def test_refused_request_leaves_nothing_behind(lanes: Lanes, redis: Redis) -> None:
    assert not await add(lanes, job("a", 101), max_tokens=100)
    assert await redis.keys("*") == []


async def test_known_job_is_queued_once_and_its_answer_goes_to_the_last_who_asked(
    lanes: Lanes, other: Lanes
) -> None:
    await add(lanes, job("a", 60))
    assert await add(other, job("a", 60), max_tokens=100)
    now = await gauges(lanes)
    assert (now.queued_tokens, now.enqueued, now.enqueued_tokens) == (60, 1, 60)
    pulled = await lease(lanes)
    completed = await lanes.complete(LANE, "w", pulled.batch_id, [("a", b"answer")], release=True)
    assert (completed.accepted, completed.own) == (1, [])
    assert await other.take_replies(0) == [("a", b"answer")]


async def test_job_twice_in_one_call_is_queued_once(lanes: Lanes) -> None:
    groups = [[job("a"), job("a")], [job("a"), job("b")]]
    assert await lanes.enqueue(LANE, groups, max_tokens=20, notify=False) == [True, True]
    assert ids(await lease(lanes)) == ["a", "b"]


async def test_refused_request_does_not_take_over_known_jobs(
    lanes: Lanes, other: Lanes, redis: Redis
) -> None:
    await add(lanes, job("a", 60))
    assert not await add(other, job("a", 60), job("b", 60), max_tokens=100)
    assert (await look_inside(redis)).owners == {"a": "a"}


async def test_router_that_takes_over_a_queued_job_gets_its_streamed_text(
    lanes: Lanes, other: Lanes
) -> None:
    """The payload names the router to which a worker streams."""
    await add(lanes, job("a"))
    assert await add(other, replace(job("a"), payload=b"stream to the other router"))
    (leased,) = (await lease(lanes)).jobs
    assert leased.payload == b"stream to the other router"


async def test_ten_thousand_jobs_enter_as_one_request(lanes: Lanes) -> None:
    jobs = [job(f"{number:05}", 3) for number in range(10_000)]
    assert not await add(lanes, *jobs, max_tokens=29_999)
    assert (await lanes.lane_gauges()) == []
    assert await add(lanes, *jobs, max_tokens=30_000)
    assert (await gauges(lanes)).queued_jobs == 10_000
    # A retry finds the lane full of the jobs of its first try.
    assert await add(lanes, *jobs, max_tokens=30_000)
    now = await gauges(lanes)
    assert (now.queued_tokens, now.enqueued_tokens) == (30_000, 30_000)
    own: list[tuple[str, bytes]] = []
    while len(own) < 10_000:
        pulled = await lease(lanes)
        own += (
            await lanes.complete(
                LANE, "w", pulled.batch_id, [(job_id, b"x") for job_id in ids(pulled)], release=True
            )
        ).own
    assert own == [(one.job_id, b"x") for one in jobs]


async def test_small_and_large_requests_in_one_call_keep_their_answers_apart(lanes: Lanes) -> None:
    large = [job(f"large {number}") for number in range(600)]
    too_large = [job(f"too large {number}") for number in range(700)]
    small = [[job(f"small {number} {part}") for part in range(100)] for number in range(12)]
    admitted = await lanes.enqueue(
        LANE, [small[0], too_large, *small[1:], large], max_tokens=18_000, notify=False
    )
    assert admitted == [True, False, *[True] * 11, True]


async def test_large_payloads_are_spread_over_calls(lanes: Lanes) -> None:
    jobs = [
        QueuedJob(f"{number}", "t", 1.0, 1, 1_800_000_000_000, "bulk", bytes(3 << 20))
        for number in range(4)
    ]
    assert await lanes.enqueue(LANE, [jobs[:3], jobs[3:]], max_tokens=4, notify=False) == [
        True,
        True,
    ]
    assert [len(one.payload) for one in (await lease(lanes)).jobs] == [3 << 20] * 4
