"""Steps of a call in the interceptor: the credential before the request, request ids, errors as a
status, and the limit of calls.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import grpc
import pytest

from libs.errors import QueueFull
from libs.serving import Security
from libs.serving.calls import interceptor
from libs.serving.calls.call import REQUEST_ID_HEADER
from tests.router.parts import refused, until
from tests.serving.parts import (
    CLIENT,
    GET_MESH,
    HEALTH,
    HEARTBEAT,
    LIST,
    LOAD,
    WATCH,
    Calls,
    connected,
    running_server,
    write_tokens,
)

CODES = grpc.StatusCode


@pytest.fixture
def tokens(tmp_path: Path) -> Path:
    return write_tokens(tmp_path / "tokens.yaml")


async def test_unauthorised_call_is_refused_before_its_request_is_read(tokens: Path) -> None:
    async with running_server(Calls(), Security(tokens=tokens)) as server:
        for token, expected in (("", CODES.UNAUTHENTICATED), (CLIENT, CODES.PERMISSION_DENIED)):
            async with connected(server.address, token=token) as caller:
                # One that never arrives, and one with more bytes than are ever read.
                assert await caller.without_request(LOAD).code() == expected
                assert await caller.code(LOAD, bytes(200 * 1024 * 1024)) == expected


async def test_call_without_a_request_is_refused() -> None:
    async with running_server(Calls()) as server, connected(server.address) as caller:
        call = caller.without_request(LIST)
        await call.done_writing()
        assert (await call.code(), await call.details()) == (
            CODES.INVALID_ARGUMENT,
            "the call has no request",
        )


async def test_request_id_is_generated_or_the_callers() -> None:
    async with running_server(Calls()) as server, connected(server.address) as caller:
        call = caller.start(LIST)
        await call
        generated = (await call.trailing_metadata())[REQUEST_ID_HEADER]
        assert (await call.initial_metadata())[REQUEST_ID_HEADER] == generated
        caller.metadata.append((REQUEST_ID_HEADER, "mine"))
        call = caller.start(LIST)
        await call
        assert (await call.trailing_metadata())[REQUEST_ID_HEADER] == "mine"
        assert REQUEST_ID_HEADER not in (await call.initial_metadata())
        caller.metadata[-1] = (REQUEST_ID_HEADER, "x" * 129)
        refusal = await refused(caller.call(LIST))
        assert (refusal.code, refusal.field) == (CODES.INVALID_ARGUMENT, REQUEST_ID_HEADER)


class FailingCalls(Calls):
    def __init__(self, error: Exception) -> None:
        super().__init__()
        self._error = error

    def note(self) -> None:
        raise self._error


@pytest.mark.parametrize(
    ("error", "code", "reason"),
    [
        (QueueFull("the lane is full", retry_after=2.0), CODES.RESOURCE_EXHAUSTED, "QUEUE_FULL"),
        (ValueError("a client's text"), CODES.INTERNAL, "INTERNAL"),
    ],
)
async def test_error_of_a_handler_becomes_a_status(
    error: Exception, code: grpc.StatusCode, reason: str
) -> None:
    async with running_server(FailingCalls(error)) as server, connected(server.address) as caller:
        refusal = await refused(caller.call(LIST))
        assert (refusal.code, refusal.reason) == (code, reason)
        assert "a client's text" not in refusal.message
        assert await caller.call(HEALTH) == b"\x08\x01", "the server continues"


async def test_call_limit_does_not_block_health_checks_and_workers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(interceptor, "MAX_CALLS", 10)
    calls = Calls()
    async with running_server(calls) as server, connected(server.address) as caller:
        for _ in range(3):
            watches = [caller.stream(WATCH) for _ in range(10)]
            await asyncio.gather(*(watch.read() for watch in watches))
            for _ in range(20):
                refusal = await refused(caller.call(GET_MESH))
                assert (refusal.code, refusal.reason) == (
                    grpc.StatusCode.UNAVAILABLE,
                    "NO_CAPACITY",
                )
                assert refusal.retry_seconds > 0
            assert await caller.call(HEALTH) == b"\x08\x01"
            beat = caller.start(HEARTBEAT)
            await until(lambda: calls.waiting == 11)
            calls.go.set()
            await beat
            for watch in watches:
                assert [await watch.read(), await watch.read()] == [b"", grpc.aio.EOF]
            await caller.call(GET_MESH)
            calls.waiting = 0
            calls.go.clear()
