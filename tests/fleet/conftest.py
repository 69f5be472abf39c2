"""The registry as two routers see it."""

from __future__ import annotations

import pytest
from redis.asyncio import Redis

from libs.fleet import Fleet


@pytest.fixture
def fleet(redis: Redis) -> Fleet:
    return Fleet(redis)


@pytest.fixture
def other(redis: Redis) -> Fleet:
    """Another router's view."""
    return Fleet(redis)
