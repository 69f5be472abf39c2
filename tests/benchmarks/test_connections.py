"""The cost of Redis under many routers (`make simulate-mesh`), for few of them."""

from __future__ import annotations

from contextlib import AsyncExitStack

import pytest
from redis.asyncio import Redis

from benchmarks.mesh.connections import (
    ACTIVE,
    LANES,
    ConnectedRouters,
    ConnectionCosts,
    IdleRouter,
    Spent,
)
from libs.queue import Lanes
from tests.support.redis import RedisServer


def test_rate_of_singles_is_that_of_the_busiest_master() -> None:
    idle, none = Spent((0.01, 0.02), 0.0), Spent((0.0, 0.0), 0.0)
    single = Spent((0.0001, 0.0002), 0.0)
    found = ConnectionCosts(10, 2, 1, 1, idle, single, wakeup=none)
    assert found.singles(0.7) == pytest.approx((0.7 - 0.2) / 0.0002)
    assert found.cores(1000) == pytest.approx(10 * 0.03 + 0.3)


async def test_idle_routers_are_not_notified_of_singles(server: RedisServer, redis: Redis) -> None:
    """A single notifies at most the routers that have pulled from its lane since the last one."""
    await Lanes(redis, router_id="probe", dead_result=b"").check()
    routers = [IdleRouter(server.url, f"router-{number}", 1) for number in range(ACTIVE + 2)]
    nothing = Spent((0.0,), 0.0)
    async with AsyncExitStack() as stack:
        for router in routers:
            await stack.enter_async_context(router.running())
        mesh = ConnectedRouters(routers)
        await mesh.singles(4 * len(LANES), nothing, notify=True)  # so that each lane has a watcher
        idle = [router.wakeups for router in routers[ACTIVE:]]
        served = sum(router.wakeups for router in routers)
        await mesh.singles(160, nothing, notify=True)
        assert [router.wakeups for router in routers[ACTIVE:]] == idle
        assert 0 < sum(router.wakeups for router in routers) - served <= 2 * 160
