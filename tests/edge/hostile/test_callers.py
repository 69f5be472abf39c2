"""The cache of callers that routers have identified."""

from __future__ import annotations

import asyncio

import pytest
from shoal.errors import CannotConnect, Unauthenticated

from services.edge.intake.callers import (
    FRESH_SECONDS,
    MAX_CALLERS,
    MAX_LOOKUPS,
    MAX_REFUSED_CALLERS,
    MAX_STALE_SECONDS,
    REFUSAL_TTL_SECONDS,
    Callers,
)
from services.edge.messages.base import HttpError
from tests.edge.hostile.test_intake import FakeClock, FakeRouter, caller
from tests.edge.test_server import until


async def test_concurrent_lookups_of_one_caller_are_shared() -> None:
    router, clock = FakeRouter(), FakeClock()
    callers = Callers(router.tenant, clock)
    router.go.clear()
    asking = [asyncio.create_task(callers.tenant(caller("a", str(number)))) for number in range(20)]
    await asyncio.sleep(0)
    asking[0].cancel()
    router.go.set()
    assert await asyncio.gather(*asking[1:]) == ["a"] * 19
    assert len(router.asked) == 1
    assert router.asked[0]["x-request-id"] not in map(str, range(20)), "a request's id is its own"
    assert await callers.tenant(caller("a")) == "a"
    assert len(router.asked) == 1


async def test_stale_caller_is_used_while_it_is_refreshed() -> None:
    router, clock = FakeRouter(), FakeClock()
    callers = Callers(router.tenant, clock)
    await callers.tenant(caller("a"))
    clock.seconds += FRESH_SECONDS
    router.go.clear()
    assert await callers.tenant(caller("a")) == "a"
    router.error = CannotConnect("no router")
    router.go.set()
    await until(lambda: not callers._asking)
    assert len(router.asked) == 2
    assert await callers.tenant(caller("a")) == "a", "a missing router is not a refusal"
    clock.seconds += MAX_STALE_SECONDS
    with pytest.raises(HttpError) as raised:
        await callers.tenant(caller("a"))
    assert raised.value.status == 503


async def test_refusals_are_cached_briefly() -> None:
    router, clock = FakeRouter(), FakeClock()
    callers = Callers(router.tenant, clock)
    router.error = Unauthenticated("unknown token")
    for _ in range(3):
        with pytest.raises(HttpError, match="unknown token") as raised:
            await callers.tenant(caller("a"))
        assert raised.value.status == 401
    assert len(router.asked) == 1
    router.error = None
    clock.seconds += REFUSAL_TTL_SECONDS
    assert await callers.tenant(caller("a")) == "a"


async def test_cached_callers_are_limited() -> None:
    router = FakeRouter()
    callers = Callers(router.tenant, FakeClock())
    for number in range(MAX_CALLERS + 5):
        await callers.tenant(caller(str(number)))
    assert len(callers._known) == MAX_CALLERS
    await callers.tenant(caller(str(MAX_CALLERS)))
    assert len(router.asked) == MAX_CALLERS + 5


async def test_refused_callers_evict_no_accepted_caller() -> None:
    router = FakeRouter()
    callers = Callers(router.tenant, FakeClock())
    await callers.tenant(caller("accepted"))
    router.error = Unauthenticated("unknown token")
    for number in range(MAX_CALLERS):
        with pytest.raises(HttpError):
            await callers.tenant(caller(f"made-up-{number}"))
    assert len(callers._refused) == MAX_REFUSED_CALLERS
    assert callers.knows(caller("accepted"))
    assert await callers.tenant(caller("accepted")) == "accepted"
    assert len(router.asked) == 1 + MAX_CALLERS


async def test_one_address_cannot_take_all_lookups() -> None:
    router = FakeRouter()
    callers = Callers(router.tenant, FakeClock())
    router.go.clear()
    asking = [
        asyncio.create_task(callers.tenant(caller(f"made-up-{number}"), "10.0.0.1"))
        for number in range(2 * MAX_LOOKUPS)
    ]
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert len(router.asked) < MAX_LOOKUPS
    other = asyncio.create_task(callers.tenant(caller("other"), "10.0.0.2"))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert router.asked[-1]["authorization"] == "other"
    router.go.set()
    assert await other == "other"
    done = await asyncio.gather(*asking, return_exceptions=True)
    refused = [one for one in done if isinstance(one, HttpError)]
    assert {problem.reason for problem in refused} == {"QUEUE_FULL"}
    assert all("from this address" in str(problem) for problem in refused)
    assert await callers.tenant(caller("late"), "10.0.0.1") == "late", (
        "answered lookups do not count any more"
    )


async def test_revoked_caller_is_removed() -> None:
    router, clock = FakeRouter(), FakeClock()
    callers = Callers(router.tenant, clock)
    await callers.tenant(caller("a"))
    router.error = Unauthenticated("revoked token")
    clock.seconds += FRESH_SECONDS
    await callers.tenant(caller("a"))
    await until(lambda: not callers._asking)
    with pytest.raises(HttpError, match="revoked"):
        await callers.tenant(caller("a"))
    assert not callers.knows(caller("a"))
