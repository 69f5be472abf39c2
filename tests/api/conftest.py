from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import shoal
from shoal.cli import main
from typer.testing import CliRunner

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
        await asyncio.wait_for(client.close(), 60)


class Ran:
    """Exit code and output of a command."""

    def __init__(self, code: int, out: str, err: str) -> None:
        self.code, self.out, self.err = code, out, err

    def json(self) -> Any:
        return json.loads(self.out)


Run = Callable[..., Ran]


@pytest.fixture
def run(router: FakeRouter, monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.setenv("SHOAL_ADDRESS", router.address)
    monkeypatch.setenv("COLUMNS", "200")

    def invoke(*arguments: str | Path, stdin: str = "") -> Ran:
        result = CliRunner().invoke(
            main.build(), [str(argument) for argument in arguments], input=stdin
        )
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        return Ran(result.exit_code, result.stdout, result.stderr)

    return invoke
