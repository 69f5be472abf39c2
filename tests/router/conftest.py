"""The redis-server of all tests, emptied for each; tests that kill it start their own."""

from __future__ import annotations

import pytest
from redis.asyncio import Redis

from tests.support.redis import RedisServer


@pytest.fixture
def redis_url(server: RedisServer, redis: Redis) -> str:
    return server.url
