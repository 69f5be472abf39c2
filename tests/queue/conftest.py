"""The lanes of one router, on the redis-server of all tests."""

from __future__ import annotations

import pytest
from redis.asyncio import Redis

from libs.queue import Lanes
from tests.queue.parts import Clock, make_lanes


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def lanes(redis: Redis, clock: Clock) -> Lanes:
    """The lanes of router `a`."""
    return make_lanes(redis, clock, "a")


@pytest.fixture
def other(redis: Redis, clock: Clock) -> Lanes:
    """The lanes of router `b`."""
    return make_lanes(redis, clock, "b")
