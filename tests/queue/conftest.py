"""The lanes of two routers, on the redis-server of all tests, as Redis' ACL lets routers use it."""

from __future__ import annotations

import pytest
from redis.asyncio import Redis

from libs.queue import Lanes
from tests.queue.parts import Clock, make_lanes


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def lanes(as_router: Redis, clock: Clock) -> Lanes:
    """The lanes of router `a`."""
    return make_lanes(as_router, clock, "a")


@pytest.fixture
def other(as_router: Redis, clock: Clock) -> Lanes:
    """The lanes of router `b`."""
    return make_lanes(as_router, clock, "b")
