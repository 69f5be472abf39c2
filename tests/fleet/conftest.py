"""One redis-server for all tests of this folder, emptied for each."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest
from redis.asyncio import Redis

from libs.queue import connect
from tests.support.redis import RedisServer


@pytest.fixture(scope="session")
def server() -> Iterator[RedisServer]:
    with RedisServer() as running:
        yield running


@pytest.fixture
async def redis(server: RedisServer) -> AsyncIterator[Redis]:
    client = connect(server.url)
    await client.flushall()
    yield client
    await client.aclose()
