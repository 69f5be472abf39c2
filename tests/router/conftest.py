"""The redis-server of all tests, emptied for each; tests that kill it start their own."""

from __future__ import annotations

import pytest
from redis.asyncio import Redis

from services.router import app
from services.router.lanes import pull
from services.router.lanes.pending_pulls import PendingPulls
from tests.support.redis import RedisServer


@pytest.fixture
def redis_url(server: RedisServer, redis: Redis) -> str:
    return server.url


@pytest.fixture(autouse=True)
def _pulls_wait_as_long_as_they_ask(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pull that ends by itself, because the machine is slow, fails tests of what ends it."""
    monkeypatch.setattr(pull, "MAX_PULL_WAIT_SECONDS", 600.0)


@pytest.fixture
def pending_pulls(monkeypatch: pytest.MonkeyPatch) -> list[PendingPulls]:
    """Return the waiting pulls of each router that the test starts."""
    made: list[PendingPulls] = []

    def make() -> PendingPulls:
        made.append(PendingPulls())
        return made[-1]

    monkeypatch.setattr(app, "PendingPulls", make)
    return made
