"""Rates over all routers: what passes, what must wait and for exactly how long."""

from __future__ import annotations

import asyncio
import time

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from redis.asyncio import Redis

from libs.errors import NoCapacity
from libs.queue import connect
from libs.queue.rates import RateLimit, Rates, rates_key
from tests.support.redis import RedisServer

START = 1_700_000_000.25


class Now:
    """Unix seconds, moved by hand."""

    def __init__(self) -> None:
        self.seconds = START

    def __call__(self) -> float:
        return self.seconds


@pytest.fixture
def now() -> Now:
    return Now()


@pytest.fixture
def rates(redis: Redis, now: Now) -> Rates:
    return Rates(redis, clock=now)


async def test_burst_passes_and_then_the_rate(rates: Rates, now: Now) -> None:
    rate = RateLimit(requests_per_second=2.0, burst_seconds=2.0)
    waits = [await rates.take("t", rate, 1) for _ in range(5)]
    assert waits == [0, 0, 0, 0, pytest.approx(0.5, abs=1e-5)]
    now.seconds += 0.5
    assert await rates.take("t", rate, 1) == 0
    assert await rates.take("t", rate, 1) == pytest.approx(0.5, abs=1e-5)


async def test_tokens_count_and_a_request_above_the_burst_passes_once_nothing_is_owed(
    rates: Rates, now: Now
) -> None:
    rate = RateLimit(tokens_per_second=100.0, burst_seconds=1.0)
    assert await rates.take("t", rate, 500) == 0
    assert await rates.take("t", rate, 1) == pytest.approx(4.01, abs=1e-5)
    now.seconds += 4.01
    assert await rates.take("t", rate, 1) == 0
    assert await rates.take("t", rate, 500) == pytest.approx(1.0, abs=1e-5)
    now.seconds += 1.0
    assert await rates.take("t", rate, 500) == 0


async def test_request_passes_after_reported_wait_but_not_earlier(rates: Rates, now: Now) -> None:
    rate = RateLimit(requests_per_second=3.0, tokens_per_second=70.0, burst_seconds=0.1)
    await rates.take("t", rate, 33)
    wait = await rates.take("t", rate, 5)
    now.seconds += wait * 0.9
    again = await rates.take("t", rate, 5)
    assert again == pytest.approx(wait * 0.1, abs=1e-5)
    now.seconds += again
    assert await rates.take("t", rate, 5) == 0


async def test_refusal_by_one_rate_does_not_charge_the_other(rates: Rates) -> None:
    rate = RateLimit(requests_per_second=1.0, tokens_per_second=100.0, burst_seconds=1.0)
    assert await rates.take("t", rate, 60) == 0
    assert await rates.take("t", rate, 60) > 0
    only_tokens = RateLimit(tokens_per_second=100.0, burst_seconds=1.0)
    assert await rates.take("t", only_tokens, 40) == 0


async def test_refunded_cost_can_be_charged_again(rates: Rates) -> None:
    rate = RateLimit(requests_per_second=1.0, tokens_per_second=100.0, burst_seconds=1.0)
    for _ in range(3):
        assert await rates.take("t", rate, 100) == 0
        await rates.give_back("t", rate, 100)
    assert await rates.take("t", rate, 100) == 0
    assert await rates.take("t", rate, 100) > 0


async def test_tenants_do_not_share_and_routers_do(rates: Rates, redis: Redis, now: Now) -> None:
    other, rate = Rates(redis, clock=now), RateLimit(requests_per_second=1.0, burst_seconds=1.0)
    assert await rates.take("a:b {c}", rate, 1) == 0
    assert await other.take("a:b {c}", rate, 1) > 0
    assert await other.take("a", rate, 1) == 0


async def test_paid_debts_are_removed(rates: Rates, redis: Redis) -> None:
    begin = time.monotonic()
    await rates.take("t", RateLimit(requests_per_second=0.5, burst_seconds=1.0), 1)
    left_ms = await redis.pttl(rates_key("t"))
    passed_ms = (time.monotonic() - begin) * 1000  # at least the time that has passed for the key
    assert left_ms <= 3000
    assert left_ms + passed_ms > 2000


@settings(
    max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    st.floats(0.5, 50),
    st.floats(1, 500),
    st.floats(0.05, 5),
    st.lists(st.tuples(st.floats(0, 3), st.integers(1, 800)), min_size=1, max_size=20),
)
async def test_over_any_time_no_more_passes_than_the_rates_allow(
    redis: Redis, requests: float, tokens: float, burst: float, asked: list[tuple[float, int]]
) -> None:
    now, rate = Now(), RateLimit(requests, tokens, burst)
    rates, count, total, largest = Rates(redis, clock=now), 0, 0, 0
    await redis.delete(rates_key("t"))
    for pause, size in asked:
        now.seconds += pause
        if await rates.take("t", rate, size) == 0:
            count, total, largest = count + 1, total + size, max(largest, size)
    seconds = now.seconds - START
    assert count <= requests * (seconds + burst) + 1 + 1e-3
    assert total <= tokens * (seconds + burst) + largest + 1e-3


async def test_by_redis_own_clock_a_flood_from_two_routers_passes_at_the_rate(redis: Redis) -> None:
    rate, routers = (
        RateLimit(requests_per_second=0.01, burst_seconds=1000.0),
        [Rates(redis), Rates(redis)],
    )
    waits = await asyncio.gather(*(routers[number % 2].take("t", rate, 1) for number in range(40)))
    assert sum(wait == 0 for wait in waits) == 10
    assert all(0 < wait <= 100 for wait in waits if wait)


async def test_while_redis_is_away_nothing_is_taken() -> None:
    with RedisServer() as server:
        redis = connect(server.url)
        server.kill()
        try:
            with pytest.raises(NoCapacity):
                await Rates(redis).take("t", RateLimit(requests_per_second=1.0), 1)
        finally:
            await redis.aclose()
