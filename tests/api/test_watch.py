"""`watch` of both clients, against real gRPC servers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import ExitStack
from itertools import islice

import grpc
import pytest
import shoal
from shoal import errors
from shoal.status import Mesh

from tests.api.fake_router import FakeRouter, Refusal, serving
from tests.support.waiting import wait_until

LOOKS_SECONDS = 60.0
"""A look takes milliseconds; a loaded machine makes it seconds."""
Client = shoal.Client | shoal.AsyncClient
Make = Callable[[str], Client]


@pytest.fixture(params=[shoal.Client, shoal.AsyncClient])
def make(request: pytest.FixtureRequest) -> Make:
    kind: Make = request.param
    return kind


async def looks(client: Client, count: int) -> list[Mesh]:
    """The first looks of one watch, which is then left. Fails if they do not arrive."""
    if isinstance(client, shoal.Client):
        watching = asyncio.create_task(
            asyncio.to_thread(lambda: list(islice(client.watch(0.2), count)))
        )
        done, _ = await asyncio.wait([watching], timeout=LOOKS_SECONDS)
        if not done:
            client.close()  # which ends the watch, so that no thread is left
            await asyncio.wait([watching])
            pytest.fail(
                f"no {count} looks in {LOOKS_SECONDS} s; the watch ended with "
                f"{watching.exception()!r}"
            )
        return watching.result()
    found = []
    async with asyncio.timeout(LOOKS_SECONDS):
        async for mesh in client.watch(0.2):
            found.append(mesh)
            if len(found) == count:
                break
    return found


async def close(client: Client) -> None:
    closing = client.close()
    if closing is not None:
        await closing


async def test_watch_repeats_and_ends_with_its_caller(make: Make, router: FakeRouter) -> None:
    client = make(router.address)
    seen = await looks(client, 3)
    assert [mesh.router_id for mesh in seen] == ["router-1"] * 3
    assert [(pool.pool, pool.desired_workers) for pool in seen[0].pools] == [("cpu", 2)]
    assert seen[0].lanes[0].oldest_seconds == 2.5
    (call,) = router.calls
    assert (call.method, len(call.request_id)) == ("WatchMesh", 32)
    await close(client)


async def test_watch_fails_over_to_another_router(make: Make) -> None:
    with serving(FakeRouter()) as left, ExitStack() as stack:
        going = stack.enter_context(serving(FakeRouter()))
        client = make(f"{going.address},{left.address}")
        while not going.calls:  # it begins with either
            await looks(client, 1)
            client._caller._addresses.failed(client._caller._addresses.current)
        client._caller._addresses.failed(left.address)
        stack.close()
        with pytest.raises(errors.CannotConnect) as caught:
            await looks(client, 1)
        assert going.address in caught.value.message
        assert caught.value.request_id
        before = len(left.calls)
        assert len(await looks(client, 1)) == 1
        assert len(left.calls) == before + 1
        await close(client)


async def test_refusal_is_raised(make: Make, router: FakeRouter) -> None:
    router.refusals = [
        Refusal(grpc.StatusCode.PERMISSION_DENIED, "PERMISSION_DENIED", "not for clients")
    ]
    client = make(router.address)
    with pytest.raises(errors.PermissionDenied, match="not for clients"):
        await looks(client, 1)
    await close(client)


def test_abandoned_watch_is_ended(router: FakeRouter) -> None:
    with shoal.Client(router.address) as client:
        watch = client.watch(0.2)
        next(watch)
        assert router.calls[0].method == "WatchMesh"
        watch.close()
        assert next(client.watch(0.2)).router_id == "router-1"
        wait_until(lambda: len(router.calls) == 2, what="the second watch")
