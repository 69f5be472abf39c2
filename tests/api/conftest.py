from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable, Iterator

import pytest
import shoal

from tests.api.clients import AnyClient, AsyncSide, BlockingSide
from tests.api.fake_router import FakeRouter, serving


@pytest.fixture
def router() -> Iterator[FakeRouter]:
    with serving(FakeRouter()) as running:
        yield running


@pytest.fixture
def other_router() -> Iterator[FakeRouter]:
    with serving(FakeRouter()) as running:
        yield running


@pytest.fixture
def nobody() -> Iterator[str]:
    """An address where nothing listens, and nothing can begin to."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{held.getsockname()[1]}"


Connect = Callable[..., AnyClient]


@pytest.fixture(params=["blocking", "asyncio"])
async def connect(request: pytest.FixtureRequest) -> AsyncIterator[Connect]:
    """Makes clients of either kind; what follows holds for both."""
    made: list[AnyClient] = []

    def make(address: str, **options: object) -> AnyClient:
        if request.param == "blocking":
            made.append(BlockingSide(shoal.Client(address, **options)))  # type: ignore[arg-type]
        else:
            made.append(AsyncSide(shoal.AsyncClient(address, **options)))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for client in made:
        await asyncio.wait_for(client.close(), 10)
