"""Retry times: a lane receives no more retries than it can serve."""

from __future__ import annotations

import heapq
import random
from itertools import count

import pytest

from libs.queue import LaneKey
from services.router.admission.retry_slots import MAX_SECONDS, RESERVED_FACTOR, RetrySlots

LANE, OTHER = LaneKey("cpu", "a/b"), LaneKey("cpu", "c/d")


def test_retry_times_are_spread_per_lane() -> None:
    given = RetrySlots()
    first, second, third = (
        given.reserve(LANE, soonest=1.0, remaining=60.0, cost=0.5, now=10.0) for _ in range(3)
    )
    assert (first, second, third) == (1.0, 1.0 + 0.5 * RESERVED_FACTOR, 1.0 + 1.0 * RESERVED_FACTOR)
    assert given.reserve(OTHER, soonest=1.0, remaining=60.0, cost=0.5, now=10.0) == 1.0
    assert given.reserve(LANE, soonest=1.0, remaining=60.0, cost=0.5, now=100.0) == 1.0


def test_request_that_is_too_late_reserves_nothing() -> None:
    given = RetrySlots()
    for _ in range(100):
        assert given.reserve(LANE, soonest=3.0, remaining=2.0, cost=0.5, now=10.0) == 3.0
    assert given.reserve(LANE, soonest=90.0, remaining=2.0, cost=0.5, now=10.0) == MAX_SECONDS


@pytest.mark.parametrize("deadline", [2.0, 10.0, 60.0])
@pytest.mark.parametrize("routers", [1, 2])
def test_long_overload_causes_few_retries(deadline: float, routers: int) -> None:
    """Clients without a retry budget: they retry at the given time while their deadline allows,
    forever.
    """
    generator, given, numbers = random.Random(1), [RetrySlots() for _ in range(routers)], count()
    capacity, seconds, waiting, last, asked, new, done = 100.0, 60.0, 0.0, 0.0, 0, 0, 0
    events = [(0.0, next(numbers), 0.0)]
    while events:
        now, _, due = heapq.heappop(events)
        if now > seconds:
            break
        waiting, last = max(0.0, waiting - (now - last)), now
        if not due:
            heapq.heappush(events, (now + generator.expovariate(5 * capacity), next(numbers), 0.0))
            new, due = new + 1, now + deadline
        asked += 1
        remaining = due - now
        if waiting <= 0.8 * remaining:
            waiting, done = waiting + 1 / capacity, done + 1
            continue
        wait = given[generator.randrange(routers)].reserve(
            LANE, soonest=waiting - 0.4 * remaining, remaining=remaining, cost=1 / capacity, now=now
        )
        if wait * (1 + 0.5 * generator.random()) < remaining:
            heapq.heappush(events, (now + wait, next(numbers), due))
    assert asked / new <= 1.2
    assert done >= 0.99 * capacity * seconds
