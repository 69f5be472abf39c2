"""One redis-server for all tests of this folder, emptied for each; tests that kill it start their own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from libs.queue import connect
from tests.support.redis import RedisServer


@pytest.fixture(scope="session")
def server() -> Iterator[RedisServer]:
    with RedisServer() as running:
        yield running


@pytest.fixture
async def redis_url(server: RedisServer) -> str:
    client = connect(server.url)
    await client.flushall()
    await client.aclose()
    return server.url
