"""Out to workers and back: leases that end well, run out, or kill; every job answered exactly
once.
"""

from __future__ import annotations

import pytest
from redis.asyncio import Redis

from libs.queue import Idle, LaneKey, Lanes, Pulled, RenewedBatch, WorkerWakeup
from libs.queue.keys import RedisKeys
from tests.queue.parts import (
    DEAD,
    FAR_MS,
    LANE,
    LEASE_MS,
    NOTHING,
    Clock,
    add,
    gauges,
    ids,
    job,
    lease,
    look_inside,
)


async def test_answer_goes_to_the_router_that_waits_for_it(lanes: Lanes, other: Lanes) -> None:
    await add(lanes, job("mine"))
    await add(other, job("theirs"))
    pulled = await lease(lanes)
    completed = await lanes.complete(
        LANE, "w", pulled.batch_id, [("mine", b"1"), ("theirs", b"2\0\n")], release=True
    )
    assert completed.accepted == 2
    assert completed.own == [("mine", b"1")]
    assert await lanes.take_replies(0) == []
    assert await other.take_replies(0) == [("theirs", b"2\0\n")]
    assert await other.take_replies(0) == []


async def test_only_the_first_answer_counts(lanes: Lanes, other: Lanes) -> None:
    await add(other, job("a"))
    pulled = await lease(lanes)
    assert (
        await lanes.complete(LANE, "w", pulled.batch_id, [("a", b"first")], release=False)
    ).accepted == 1
    assert (
        await lanes.complete(
            LANE, "w", pulled.batch_id, [("a", b"second"), ("unknown", b"x")], release=True
        )
    ).accepted == 0
    assert await other.take_replies(0) == [("a", b"first")]


async def test_lease_that_runs_out_returns_its_jobs_to_the_head(lanes: Lanes, clock: Clock) -> None:
    await add(lanes, *(job(name) for name in "abcd"))
    first = await lease(lanes, 20)
    clock.ms += LEASE_MS - 1
    assert ids(await lease(lanes, 10)) == ["c"]
    clock.ms += 1
    again = await lease(lanes)
    # A job that lost a worker is leased alone: it may have been the reason.
    assert [(one.job_id, one.attempts) for one in again.jobs] == [("a", 1)]
    assert ids(await lease(lanes)) == ["b"]
    assert ids(await lease(lanes)) == ["d"]
    assert first.batch_id not in {again.batch_id}


async def test_suspect_job_is_leased_alone(lanes: Lanes, clock: Clock) -> None:
    await add(lanes, job("bulk", priority="bulk"))
    await lease(lanes)
    clock.ms += LEASE_MS
    await add(lanes, job("a"))
    assert ids(await lease(lanes)) == ["a"]
    assert ids(await lease(lanes)) == ["bulk"]


async def test_idle_pull_says_when_a_lease_may_run_out(lanes: Lanes, clock: Clock) -> None:
    assert await lanes.pull(LANE, worker_id="w", budget_tokens=1, budget_jobs=1) == Idle(None)
    await add(lanes, job("a"))
    await lease(lanes)
    assert await lanes.pull(LANE, worker_id="w", budget_tokens=1, budget_jobs=1) == Idle(
        clock.ms + LEASE_MS
    )


async def test_job_that_kills_workers_fails_and_is_answered(
    lanes: Lanes, other: Lanes, clock: Clock, redis: Redis
) -> None:
    await add(other, job("poison"))
    for attempts in range(3):
        assert [one.attempts for one in (await lease(lanes)).jobs] == [attempts]
        clock.ms += LEASE_MS
    assert await lanes.pull(LANE, worker_id="w", budget_tokens=1, budget_jobs=1) == Idle(None)
    assert await other.take_replies(0) == [("poison", DEAD)]
    dead_letters = RedisKeys(1).lane_keys(LANE)[11]
    letters = await redis.xrange(dead_letters)
    assert letters is not None
    ((_, letter),) = letters
    assert letter == {b"lane": LANE.name.encode(), b"job": b"poison", b"attempts": b"3"}
    assert (await gauges(lanes)).dead == 1
    assert await look_inside(redis) == NOTHING


async def test_dead_letters_are_bounded(redis: Redis, clock: Clock) -> None:
    lanes = Lanes(
        redis,
        router_id="a",
        dead_result=DEAD,
        max_attempts=1,
        lease_ms=LEASE_MS,
        dead_letter_limit=100,
        clock=clock,
    )
    for number in range(10):
        await add(lanes, *(job(f"{number} {part}") for part in range(100)))
        await lease(lanes)
        clock.ms += LEASE_MS
    await lanes.pull(LANE, worker_id="w", budget_tokens=1, budget_jobs=1)
    assert (await gauges(lanes)).dead == 1000
    assert await redis.xlen(RedisKeys(1).lane_keys(LANE)[11]) <= 200


async def test_late_answer_counts_if_it_is_the_first(
    lanes: Lanes, other: Lanes, clock: Clock, redis: Redis
) -> None:
    await add(other, job("a"), job("b"))
    slow = await lease(lanes)
    clock.ms += LEASE_MS
    fast = await lease(lanes)
    assert ids(fast) == ["a"]
    # The first worker was only slow: its answers spare the second the work, whether leased again
    # (a) or waiting (b).
    assert (
        await lanes.complete(LANE, "w", slow.batch_id, [("a", b"1"), ("b", b"2")], release=True)
    ).accepted == 2
    assert await lanes.renew(LANE, "w", [fast.batch_id]) == [
        RenewedBatch(fast.batch_id, lost=False, gone=["a"])
    ]
    assert (
        await lanes.complete(LANE, "w", fast.batch_id, [("a", b"3")], release=True)
    ).accepted == 0
    assert sorted(await other.take_replies(0)) == [("a", b"1"), ("b", b"2")]
    assert await lanes.pull(LANE, worker_id="w", budget_tokens=1, budget_jobs=1) == Idle(None)
    assert await look_inside(redis) == NOTHING
    now = await gauges(lanes)
    assert (now.queued_tokens, now.leased_tokens, now.done) == (0, 0, 2)


async def test_only_the_holder_answers_renews_or_returns_leased_jobs(
    lanes: Lanes, other: Lanes, redis: Redis
) -> None:
    """Though it knows the ids of the lease and of the jobs."""
    await add(lanes, job("a"), job("b"), job("waiting"))
    pulled = await lanes.pull(LANE, worker_id="w", batch_id="e-1", budget_tokens=20, budget_jobs=2)
    assert isinstance(pulled, Pulled)
    forged = [("a", b"forged"), ("b", b"forged"), ("waiting", b"forged")]
    for worker, batch_id in (("thief", "e-1"), ("w", "e-2"), ("", "e-1"), ("w", "")):
        assert (await other.complete(LANE, worker, batch_id, forged, release=True)).accepted == 0
    assert (await lanes.complete(LANE, "thief", "e-1", [], release=True)).accepted == 0
    assert await lanes.renew(LANE, "thief", ["e-1"]) == [RenewedBatch("e-1", lost=True, gone=[])]
    assert await lanes.end_leases(LANE, "thief", "e") == 0
    assert await lanes.pull(
        LANE, worker_id="thief", batch_id="e-1", budget_tokens=100, budget_jobs=9
    ) == Idle(None)
    inside = await look_inside(redis)
    assert (inside.leases, inside.waiting, inside.payloads) == (
        {"e-1"},
        ["waiting"],
        {"a", "b", "waiting"},
    )
    assert not (await lanes.renew(LANE, "w", ["e-1"]))[0].lost
    assert (
        await other.complete(LANE, "w", "e-1", [("a", b"1"), ("b", b"2")], release=True)
    ).accepted == 2


async def test_released_jobs_cannot_be_answered(lanes: Lanes) -> None:
    await add(lanes, job("a"))
    pulled = await lease(lanes)
    await lanes.complete(LANE, "w", pulled.batch_id, [], release=True)
    assert (
        await lanes.complete(LANE, "w", pulled.batch_id, [("a", b"x")], release=True)
    ).accepted == 0


async def test_renewed_leases_last(lanes: Lanes, clock: Clock) -> None:
    await add(lanes, job("a"))
    pulled = await lease(lanes)
    for _ in range(3):
        clock.ms += LEASE_MS - 1
        assert await lanes.renew(LANE, "w", [pulled.batch_id]) == [
            RenewedBatch(pulled.batch_id, lost=False, gone=[])
        ]
    clock.ms += LEASE_MS
    await lease(lanes)
    assert await lanes.renew(LANE, "w", [pulled.batch_id, "never"]) == [
        RenewedBatch(pulled.batch_id, lost=True, gone=[]),
        RenewedBatch("never", lost=True, gone=[]),
    ]


async def test_released_jobs_go_back_to_the_head_without_blame(lanes: Lanes, redis: Redis) -> None:
    await add(lanes, *(job(name) for name in "abcd"))
    pulled = await lease(lanes, 30)
    completed = await lanes.complete(LANE, "w", pulled.batch_id, [("b", b"x")], release=True)
    assert completed.own == [("b", b"x")]
    assert [(one.job_id, one.attempts) for one in (await lease(lanes)).jobs] == [
        ("a", 0),
        ("c", 0),
        ("d", 0),
    ]


async def test_partial_answer_keeps_the_lease(lanes: Lanes) -> None:
    await add(lanes, job("a"), job("b"))
    pulled = await lease(lanes)
    await lanes.complete(LANE, "w", pulled.batch_id, [("a", b"x")], release=False)
    assert isinstance(await lanes.pull(LANE, worker_id="w", budget_tokens=1, budget_jobs=1), Idle)
    assert await lanes.renew(LANE, "w", [pulled.batch_id]) == [
        RenewedBatch(pulled.batch_id, lost=False, gone=["a"])
    ]


async def test_pull_with_a_lost_answer_is_answered_again(
    lanes: Lanes, monkeypatch: pytest.MonkeyPatch
) -> None:
    await add(lanes, job("a"), job("b"))
    first = await lease(lanes, 10)
    monkeypatch.setattr(
        lanes, "_batch_numbers", iter([1])
    )  # what redis-py does when the connection broke: the same command again
    assert await lease(lanes, 10) == first


async def test_batch_that_its_worker_named_is_found_and_given_again(
    lanes: Lanes, other: Lanes, clock: Clock
) -> None:
    """Another router returns the rest of the batch, and its lease is extended."""
    elsewhere = LaneKey(LANE.pool, "org/elsewhere")
    await add(lanes, *(job(name) for name in "abc"))
    first = await lanes.pull(LANE, worker_id="w", batch_id="w1-7", budget_tokens=100, budget_jobs=2)
    assert isinstance(first, Pulled)
    assert (first.batch_id, [one.job_id for one in first.jobs]) == ("w1-7", ["a", "b"])
    assert await other.leasing([elsewhere, LANE], "w1-7") == LANE
    assert await other.leasing([elsewhere], "w1-7") is None
    assert await other.leasing([], "w1-7") is None
    await lanes.complete(LANE, "w", "w1-7", [("a", b"1")], release=False)
    clock.ms += LEASE_MS - 1
    again = await other.pull(LANE, worker_id="w", batch_id="w1-7", budget_tokens=100, budget_jobs=2)
    assert isinstance(again, Pulled)
    assert [one.job_id for one in again.jobs] == ["b"]
    clock.ms += LEASE_MS - 1
    assert [one.job_id for one in (await lease(lanes)).jobs] == ["c"], "b is still leased"
    await lanes.complete(LANE, "w", "w1-7", [("b", b"2")], release=True)
    assert await other.leasing([elsewhere, LANE], "w1-7") is None


@pytest.mark.parametrize("leased", [False, True])
async def test_cancelled_job_is_gone(lanes: Lanes, redis: Redis, leased: bool) -> None:
    await add(lanes, job("a"), job("b"))
    pulled = await lease(lanes) if leased else None
    assert await lanes.cancel(LANE, [job("a"), job("unknown")]) == 1
    if pulled:
        assert await lanes.renew(LANE, "w", [pulled.batch_id]) == [
            RenewedBatch(pulled.batch_id, lost=False, gone=["a"])
        ]
        completed = await lanes.complete(
            LANE, "w", pulled.batch_id, [("a", b"x"), ("b", b"y")], release=True
        )
        assert completed.own == [("b", b"y")]
    else:
        assert (await gauges(lanes)).queued_tokens == 10
        assert ids(await lease(lanes)) == ["b"]
    assert (await gauges(lanes)).cancelled == 1


async def test_cancellation_notifies_each_worker_that_holds_a_job(
    lanes: Lanes, other: Lanes, clock: Clock
) -> None:
    wakeups = other.wakeups()
    await anext(wakeups)
    await add(lanes, *(job(name) for name in "abcdefg"))
    await lease(lanes, 20, worker="v")
    await lease(other, 20, worker="odd | name")
    await lease(lanes, 10, worker="u")
    released = await lease(lanes, 10, worker="t")
    await lanes.complete(LANE, "t", released.batch_id, [], release=True)
    assert await anext(wakeups) == LANE
    await lanes.cancel(LANE, [job(name) for name in "abcfg"])
    assert {await anext(wakeups), await anext(wakeups)} == {
        WorkerWakeup("v"),
        WorkerWakeup("odd | name"),
    }
    # No worker holds these: one waits, one is unknown, one was cancelled before. Then one that has
    # had two workers.
    await add(lanes, job("h"))
    await lanes.cancel(LANE, [job(name) for name in "hxa"])
    clock.ms += LEASE_MS
    assert ids(await lease(lanes, worker="s")) == ["d"]
    await lanes.cancel(LANE, [job("d")])
    assert await anext(wakeups) == WorkerWakeup("s")
    await wakeups.aclose()


async def test_jobs_that_another_router_waits_for_are_not_rung_for(
    lanes: Lanes, other: Lanes
) -> None:
    wakeups = other.wakeups()
    await anext(wakeups)
    await add(lanes, job("a"), job("b"))
    await lease(lanes, 10, worker="v")
    await lease(lanes, 10, worker="w")
    await add(other, job("a"))
    assert await lanes.cancel(LANE, [job("a"), job("b")]) == 1
    assert await anext(wakeups) == WorkerWakeup("w")
    await wakeups.aclose()


async def test_cancelling_everything_leaves_nothing(lanes: Lanes, redis: Redis) -> None:
    jobs = [job(f"{number}") for number in range(1200)]
    await add(lanes, *jobs)
    assert await lanes.cancel(LANE, jobs) == 1200
    assert await look_inside(redis) == NOTHING


async def test_router_does_not_cancel_jobs_of_another_router(lanes: Lanes, other: Lanes) -> None:
    await add(lanes, job("a"))
    await add(other, job("a"))
    assert await lanes.cancel(LANE, [job("a")]) == 0
    assert await other.cancel(LANE, [job("a")]) == 1


async def test_cancelled_job_with_a_changed_deadline_is_not_leased(
    lanes: Lanes, other: Lanes, redis: Redis
) -> None:
    await add(lanes, job("a"))
    await add(other, job("a", deadline_ms=FAR_MS + 1))
    assert await other.cancel(LANE, [job("a", deadline_ms=FAR_MS + 1)]) == 1
    assert await lanes.pull(LANE, worker_id="w", budget_tokens=1, budget_jobs=1) == Idle(None)
    assert await look_inside(redis) == NOTHING


async def test_expired_jobs_are_dropped_at_their_turn(
    lanes: Lanes, clock: Clock, redis: Redis
) -> None:
    await add(
        lanes, *(job(f"{number}", deadline_ms=clock.ms + 10) for number in range(2500)), job("late")
    )
    clock.ms += 10
    assert ids(await lease(lanes)) == ["late"]
    now = await gauges(lanes)
    assert (now.expired, now.queued_tokens, now.leased_tokens) == (2500, 0, 10)
    inside = await look_inside(redis)
    assert inside.payloads == set(inside.owners) == {"late"}


async def test_expired_suspect_is_dropped_with_its_attempts(
    lanes: Lanes, clock: Clock, redis: Redis
) -> None:
    await add(lanes, job("a", deadline_ms=clock.ms + LEASE_MS))
    await lease(lanes)
    clock.ms += LEASE_MS
    assert await lanes.pull(LANE, worker_id="w", budget_tokens=1, budget_jobs=1) == Idle(None)
    assert await look_inside(redis) == NOTHING


async def test_old_lease_does_not_return_jobs_that_a_retry_queued_again(
    lanes: Lanes, clock: Clock, redis: Redis
) -> None:
    await add(lanes, job("a"))
    await lease(lanes)
    await lanes.cancel(LANE, [job("a")])
    await add(lanes, job("a", deadline_ms=FAR_MS + 1))
    clock.ms += LEASE_MS
    again = await lease(lanes)
    assert [(one.job_id, one.attempts) for one in again.jobs] == [("a", 0)]
    assert (await look_inside(redis)).waiting == []
    assert (await gauges(lanes)).queued_tokens == 0


async def test_leases_of_one_process_end_as_if_they_had_run_out(lanes: Lanes, other: Lanes) -> None:
    await add(other, *(job(name) for name in "abcd"))
    for batch_id in ("dead-1", "live-1", "dead-2", "deadly-1"):
        assert isinstance(
            await lanes.pull(
                LANE, worker_id="w", batch_id=batch_id, budget_tokens=1, budget_jobs=1
            ),
            Pulled,
        )
    assert await lanes.end_leases(LANE, "w", "dead") == 2
    assert [
        batch.lost
        for batch in await lanes.renew(LANE, "w", ["dead-1", "live-1", "dead-2", "deadly-1"])
    ] == [
        True,
        False,
        True,
        False,
    ]
    assert [(one.job_id, one.attempts) for one in (await lease(lanes)).jobs] == [("a", 1)]
    assert ids(await lease(lanes)) == ["c"]
    assert await lanes.end_leases(LANE, "w", "dead") == 0


async def test_job_that_kills_its_worker_is_given_up_though_its_leases_end_early(
    lanes: Lanes, redis: Redis
) -> None:
    await add(lanes, job("poison"))
    for attempt in range(3):
        assert isinstance(
            await lanes.pull(
                LANE, worker_id="w", batch_id=f"e{attempt}-1", budget_tokens=1, budget_jobs=1
            ),
            Pulled,
        )
        assert await lanes.end_leases(LANE, "w", f"e{attempt}") == (1 if attempt < 2 else 0)
    assert await lanes.take_replies(0) == [("poison", DEAD)]
    assert await look_inside(redis) == NOTHING
