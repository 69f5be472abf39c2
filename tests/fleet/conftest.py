"""The registry as two routers see it, as Redis' ACL lets them."""

from __future__ import annotations

import pytest
from redis.asyncio import Redis

from libs.fleet import Fleet


@pytest.fixture
def fleet(as_router: Redis) -> Fleet:
    return Fleet(as_router)


@pytest.fixture
def other(as_router: Redis) -> Fleet:
    """Another router's view."""
    return Fleet(as_router)
