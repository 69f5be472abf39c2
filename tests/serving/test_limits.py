"""Limits on clients without calls: many connections, silent connections, and connection age.

SHOAL_CONNECTIONS=10000 opens that many instead of 2,000. Each needs two open files: `ulimit -n`
must be more than twice the number.
"""

from __future__ import annotations

import asyncio
import os
import resource
import socket
from collections.abc import Iterator
from contextlib import AsyncExitStack, contextmanager, suppress

import grpc
import pytest

from libs.serving import Security
from libs.serving import server as serving_module
from libs.serving.calls import public
from libs.serving.process import _allow_connections
from tests.router.parts import until
from tests.serving.parts import GET_MESH, HEALTH, HEARTBEAT, WATCH, Calls, connected, running_server

CONNECTIONS = int(os.environ.get("SHOAL_CONNECTIONS", "2000"))
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0"
"""The first bytes of an HTTP/2 client, with an empty SETTINGS frame."""


GOAWAY = 7
PING_TYPE = 6
PING = b"\0\0\x08\6\0\0\0\0\0" + bytes(8)


@contextmanager
def opened(address: str, count: int, said: bytes = b"") -> Iterator[list[socket.socket]]:
    """Open connections that send `said` and then nothing."""
    host, _, port = address.rpartition(":")
    made: list[socket.socket] = []
    try:
        for _ in range(count):
            connection = socket.create_connection((host, int(port)), 30)
            made.append(connection)
            connection.sendall(said)
            connection.setblocking(False)
        yield made
    finally:
        for connection in made:
            connection.close()


def is_open(connection: socket.socket) -> bool:
    """Return whether the server keeps the connection; discards received bytes."""
    try:
        while connection.recv(65_536):
            pass
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def frames(said: bytearray, connection: socket.socket) -> list[int]:
    """Return the types of the complete HTTP/2 frames received so far. `said` accumulates the
    bytes.
    """
    with suppress(BlockingIOError):
        said += connection.recv(65_536)
    found, at = [], 0
    while at + 9 <= len(said):
        found.append(said[at + 3])
        at += 9 + int.from_bytes(said[at : at + 3])
    return found


@pytest.fixture
def files() -> Iterator[None]:
    """Raise the limit of open files as a serving process does."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    _allow_connections()
    allowed, wanted = resource.getrlimit(resource.RLIMIT_NOFILE)[0], 2 * CONNECTIONS + 1000
    if allowed < wanted:
        pytest.skip(
            f"{CONNECTIONS} connections with both ends here need {wanted} open files; "
            f"{allowed} are allowed"
        )
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.mark.usefixtures("files")
async def test_thousands_of_idle_connections_do_not_stop_service() -> None:
    async with running_server(Calls()) as server, connected(server.address) as caller:
        await caller.call(GET_MESH)
        with (
            opened(server.address, CONNECTIONS, PREFACE) as idle,
            opened(server.address, 200) as silent,
        ):
            # Each received a greeting: the server accepted it, and keeps it.
            greeted = 0
            for connection in idle:
                await asyncio.get_running_loop().sock_recv(connection, 9)
                greeted += 1
            assert greeted == CONNECTIONS
            for _ in range(20):
                await caller.call(GET_MESH)
                async with connected(server.address) as late:
                    await late.call(HEALTH)
            assert all(is_open(connection) for connection in idle)
            assert len(silent) == 200


async def test_silent_connections_are_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    shorter = [
        (name, 500 if name == "grpc.server_handshake_timeout_ms" else value)
        for name, value in serving_module.OPTIONS
    ]
    monkeypatch.setattr(serving_module, "OPTIONS", tuple(shorter))
    async with running_server(Calls()) as server, connected(server.address) as caller:
        # Waits: on a busy machine its first connections may count as silent, too.
        await caller.call(GET_MESH, wait_for_ready=True)
        for said in (b"", PREFACE[:10], PREFACE[:24]):
            with opened(server.address, 20, said) as silent:
                await until(
                    lambda silent=silent: not any(is_open(connection) for connection in silent)  # type: ignore[misc]
                )
        await caller.call(GET_MESH)


async def test_idle_client_may_ping(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients keep idle connections alive; gRPC's default rejects them after the third ping in two
    hours.
    """
    shorter = [
        (name, 10 if "min_ping_interval" in name else value)
        for name, value in serving_module.OPTIONS
    ]
    monkeypatch.setattr(serving_module, "OPTIONS", tuple(shorter))
    async with running_server(Calls()) as server:
        with opened(server.address, 1, PREFACE) as [connection]:
            said = bytearray()
            for count in range(1, 7):
                await asyncio.sleep(0.05)  # longer than the server's minimum
                connection.sendall(PING)
                await until(lambda count=count: frames(said, connection).count(PING_TYPE) == count)  # type: ignore[misc]
            assert GOAWAY not in frames(said, connection)


async def test_connections_beyond_the_limit_are_closed_and_probes_still_work(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(serving_module, "_KEPT_FILES", 1 << 40)  # selects the minimum, 64
    async with (
        running_server(Calls(), Security(health_address="127.0.0.1:0")) as server,
        connected(server.address) as caller,
    ):
        await caller.call(GET_MESH)
        with opened(server.address, 100, PREFACE) as idle:
            await until(lambda: sum(not is_open(connection) for connection in idle) == 100 - 63)
            await caller.call(GET_MESH)
            async with connected(server.health_address) as probe:
                await probe.call(HEALTH)
            async with connected(server.address) as late:
                assert await late.code(GET_MESH) == grpc.StatusCode.UNAVAILABLE
        async with connected(server.address) as late:

            async def served() -> bool:
                return await late.code(GET_MESH) == grpc.StatusCode.OK

            await until(served)


async def test_health_watches_are_limited_but_checks_are_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(public, "MAX_STREAMS", 3)
    async with running_server(Calls()) as server, connected(server.address) as caller:
        watches = [caller.stream("/grpc.health.v1.Health/Watch") for _ in range(3)]
        assert [await watch.read() for watch in watches] == [b"\x08\x01"] * 3
        late = caller.stream("/grpc.health.v1.Health/Watch")
        assert await late.code() == grpc.StatusCode.UNAVAILABLE
        assert await caller.call(HEALTH) == b"\x08\x01"
        await server.set_health(False)
        assert [await watch.read() for watch in watches] == [b"\x08\x02"] * 3
        for watch in watches:
            watch.cancel()

        async def has_room() -> bool:
            watch = caller.stream("/grpc.health.v1.Health/Watch")
            try:
                return bool(await watch.read() == b"\x08\x02")
            except grpc.aio.AioRpcError as error:
                if error.code() != grpc.StatusCode.UNAVAILABLE:
                    raise
                return False
            finally:
                watch.cancel()

        await until(has_room)


async def test_old_connection_ends_without_breaking_its_calls() -> None:
    calls = Calls()
    async with running_server(calls, connection_seconds=0.3) as server, AsyncExitStack() as stack:
        caller = await stack.enter_async_context(connected(server.address))
        beat = caller.start(HEARTBEAT)
        watch = caller.stream(WATCH)
        await watch.read()
        await until(lambda: calls.waiting == 2)
        with opened(server.address, 1, PREFACE) as other:
            # By the time that a younger connection gets GOAWAY, that of the heartbeat has, too.
            said = bytearray()
            await until(lambda: GOAWAY in frames(said, other[0]))
        for _ in range(200):  # while connections are replaced
            await caller.call(GET_MESH)
        calls.go.set()
        await beat
        assert await watch.read() is not grpc.aio.EOF
        assert await watch.read() is grpc.aio.EOF


async def test_header_size_is_limited() -> None:
    async with running_server(Calls()) as server, connected(server.address) as caller:
        caller.metadata.append(("x-other", "x" * 8_000))
        assert await caller.code(GET_MESH) == grpc.StatusCode.OK
        caller.metadata.append(("x-more", "x" * 30_000))
        assert await caller.code(GET_MESH) == grpc.StatusCode.RESOURCE_EXHAUSTED
        assert await caller.code(HEALTH) == grpc.StatusCode.RESOURCE_EXHAUSTED
