"""The gRPC server of every process of Shoal: health, reflection, limits, one interceptor, and
graceful shutdown.

Limits on transport level are set here: connections, handshakes, headers, concurrent calls.
Admission control of requests is the router's concern.
"""

from __future__ import annotations

import asyncio
import logging
import resource
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Final

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from libs.errors import NoCapacity
from libs.serving.calls.decode import (
    MAX_REQUEST_BYTES,
    SMALL_REQUEST_BYTES,
    SMALL_TRANSPORT_BYTES,
    TRANSPORT_LIMIT_BYTES,
)
from libs.serving.calls.guard import Guard
from libs.serving.calls.interceptor import Interceptor
from libs.serving.reflection import add_reflection
from libs.serving.security.authentication import Authenticator
from libs.serving.security.settings import Security, check_exposure, is_loopback
from libs.telemetry.logs import fields

log = logging.getLogger(__name__)

# gRPC's DEBUG line for a call that was cancelled corrupts memory (grpcio 1.75.0 and 1.80.0, Python
# 3.11.7): the process dies a little later, in the garbage collector. With it
# tests/worker/test_link.py, twelve times over, died in 6 of 6 runs; without, never.
logging.getLogger("grpc").setLevel(logging.INFO)

OVERALL: Final = ""
"""The health name that stands for the whole server."""
LIVENESS: Final = "liveness"
"""The health name for liveness probes: serving as long as the event loop answers. Other names may
depend on Redis.
"""

_HANG_UP_SECONDS: Final = 1.0
"""After the drain: time to send the last answers, and to end streams and long polls."""

MAX_METADATA_BYTES: Final = 16 * 1024
"""All of a call's headers, the token included. Above it some calls are refused."""
MAX_METADATA_HARD_BYTES: Final = 32 * 1024
"""Above it all are."""
HANDSHAKE_SECONDS: Final = 10
"""How long a connection may take for the handshakes of TLS and HTTP/2."""
MAX_CONNECTION_CALLS: Final = 10_000
"""Calls at a time of one connection, so that no single one takes all of a server's
(`calls/bounds.py`).
"""

OPTIONS: Final[tuple[tuple[str, int], ...]] = (
    # With SO_REUSEPORT two servers on one port would silently share its connections.
    ("grpc.so_reuseport", 0),
    ("grpc.max_send_message_length", -1),
    # Only uncompressed requests are accepted (1: identity): gRPC decompresses a request before it
    # checks its length.
    ("grpc.compression_enabled_algorithms_bitset", 1),
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    # The defaults, 300 s and two hours while no call is open, reject every client with a shorter
    # keepalive (`too_many_pings`).
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
    ("grpc.http2.max_ping_strikes", 2),
    # A connection that does not finish the TLS and HTTP/2 handshake is closed; by default only
    # after two minutes.
    ("grpc.server_handshake_timeout_ms", HANDSHAKE_SECONDS * 1000),
    ("grpc.max_metadata_size", MAX_METADATA_BYTES),
    ("grpc.absolute_max_metadata_size", MAX_METADATA_HARD_BYTES),
    ("grpc.max_concurrent_streams", MAX_CONNECTION_CALLS),
)

CONNECTION_GRACE_SECONDS: Final = 75.0
"""How long calls may go on after their connection got GOAWAY: longer than a call without a deadline
may take (60 s).
"""

_KEPT_FILES: Final = 128
"""File descriptors that are reserved from client connections: for Redis, files, and health
probes.
"""


@dataclass(frozen=True, slots=True)
class Service:
    """One gRPC service of a server.

    name: `package.Service`. add_to: registers its servicer, such as
    `partial(add_WorkerServiceServicer_to_server, servicer)`. is_internal: keeps answering while the
    server drains, because requests in flight need it. request_bytes: the most bytes of one request;
    method_bytes: the same for methods (`Pull`) that have a limit of their own.
    """

    name: str
    add_to: Callable[[grpc.aio.Server], None]
    is_internal: bool = False
    request_bytes: int = MAX_REQUEST_BYTES
    method_bytes: Mapping[str, int] = field(default_factory=dict)

    @property
    def limits(self) -> dict[str, int]:
        """Request limits, by the service's name and by `/package.Service/Method`."""
        return {
            self.name: self.request_bytes,
            **{f"/{self.name}/{name}": most for name, most in self.method_bytes.items()},
        }


class Server:
    """A listening server. `address` has the port that was really bound."""

    def __init__(
        self, server: grpc.aio.Server, interceptor: Interceptor, names: Sequence[str]
    ) -> None:
        self.address = ""
        self.health_address = ""
        self._server = server
        self._probed: grpc.aio.Server | None = None
        self._interceptor = interceptor
        self._health = health.aio.HealthServicer()
        # The state: the health of each name.
        self._serving: dict[str, bool] = dict.fromkeys(names, False)

    async def set_health(self, is_serving: bool, *names: str) -> None:
        """Sets the health of `names` (default: of all); the whole server serves while all of them
        do.
        """
        wanted = dict.fromkeys(names or self._serving, is_serving)
        changed = {
            name: value for name, value in wanted.items() if self._serving.get(name) != value
        }
        if not changed:
            return
        self._serving.update(changed)
        for name in changed:
            await self._publish(name, is_serving)
        await self._publish(OVERALL, all(self._serving.values()))
        log.info(
            "health changed", extra=fields({"is_serving": is_serving, "names": ", ".join(changed)})
        )

    async def start(self, address: str, security: Security) -> None:
        """Listens. Raises NoCapacity if an address cannot be bound, InvalidInput for TLS files that
        cannot be used.
        """
        credentials = security.tls.credentials() if security.tls is not None else None
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        for name in (*self._serving, OVERALL):
            await self._publish(name, False)
        await self._publish(LIVENESS, True)
        self.address = listen(self._server, address, credentials)
        if security.health_address:
            self._probed = guarded_server(Guard(), SMALL_TRANSPORT_BYTES)
            health_pb2_grpc.add_HealthServicer_to_server(self._health, self._probed)
            self.health_address = listen(self._probed, security.health_address, None)
            await self._probed.start()
        await self._server.start()
        log.info(
            "listening",
            extra=fields({"address": self.address, "health_address": self.health_address}),
        )

    async def drain(self, grace_seconds: float) -> None:
        """Sets health to NOT_SERVING, refuses new calls, and waits for those in flight, at most
        `grace_seconds`.
        """
        await self._health.enter_graceful_shutdown()
        self._interceptor.drain()
        log.info("draining", extra=fields({"grace_seconds": grace_seconds}))
        try:
            async with asyncio.timeout(grace_seconds):
                await self._interceptor.idle()
        except TimeoutError:
            log.warning("calls were cut off at the end of the grace time")

    async def stop(self) -> None:
        await self._server.stop(_HANG_UP_SECONDS)
        if self._probed is not None:
            await self._probed.stop(None)
        log.info("stopped", extra=fields({"address": self.address}))

    async def _publish(self, name: str, is_serving: bool) -> None:
        status = (
            health_pb2.HealthCheckResponse.SERVING
            if is_serving
            else health_pb2.HealthCheckResponse.NOT_SERVING
        )
        await self._health.set(name, status)


@asynccontextmanager
async def serving(
    address: str,
    services: Sequence[Service],
    *,
    security: Security | None = None,
    health: Sequence[str] = (),
    grace_seconds: float = 25.0,
    connection_seconds: float = 0.0,
    on_drained: Callable[[], None] = lambda: None,
) -> AsyncIterator[Server]:
    """Serves on `address` (`host:port`, port 0 for any, or `unix:path`) until the context ends,
    then drains.

    security: TLS and authentication; without it everybody may call, on loopback only. health: names
    besides those of `services` to answer health checks for. LIVENESS serves at once; the others
    begin as NOT_SERVING, and so does the whole server: see Server.set_health. connection_seconds:
    the maximum connection age (0: none), after which clients reconnect and so find new routers;
    calls in flight go on. on_drained: called once only internal calls are left, to end those.

    Raises NoCapacity if the address is taken, InvalidInput for one beyond loopback that `security`
    does not protect (a server without services answers only health checks, and may listen
    anywhere).
    """
    security = security or Security()
    if services:
        check_exposure(address, security)
    if services and security.allow_insecure and not is_loopback(address):
        log.warning(
            "listening beyond this machine, as SHOAL_ALLOW_INSECURE says",
            extra=fields({"address": address}),
        )
    names = [service.name for service in services]
    authenticator = Authenticator(security)
    interceptor = Interceptor(
        [service.name for service in services if service.is_internal],
        authenticator,
        {name: most for service in services for name, most in service.limits.items()},
    )
    server = Server(
        _grpc_server(services, interceptor, connection_seconds), interceptor, [*names, *health]
    )
    await server.start(address, security)
    async with AsyncExitStack() as stack:
        if security.takes_tokens:
            await stack.enter_async_context(_in_background(authenticator.watch()))
        try:
            yield server
        finally:
            await server.drain(grace_seconds)
            on_drained()
            await server.stop()


def guarded_server(
    guard: Guard, transport_bytes: int, *, connection_seconds: float = 0.0
) -> grpc.aio.Server:
    """Construct a gRPC server, on which no method takes memory for what its caller has only begun
    to send.

    It is the only place that constructs one (tests/checks/test_guarded_servers.py), so that no port
    lacks the guard and the limits.

    Args:
        guard: wraps every method. transport_bytes: gRPC's limit for a message, which it checks once
        the message has arrived. connection_seconds: the maximum age of a connection; 0 for none.
    """
    options = [
        *OPTIONS,
        ("grpc.max_receive_message_length", transport_bytes),
        *_limits(connection_seconds),
    ]
    return grpc.aio.server(interceptors=[guard], options=options)


def _grpc_server(
    services: Sequence[Service], interceptor: Interceptor, connection_seconds: float
) -> grpc.aio.Server:
    server = guarded_server(
        interceptor, _transport_bytes(services), connection_seconds=connection_seconds
    )
    for service in services:
        service.add_to(server)
    add_reflection([*(service.name for service in services), "grpc.health.v1.Health"], server)
    return server


@asynccontextmanager
async def _in_background(work: Coroutine[None, None, None]) -> AsyncIterator[None]:
    async with asyncio.TaskGroup() as group:
        task = group.create_task(work)
        try:
            yield
        finally:
            task.cancel()


def _transport_bytes(services: Sequence[Service]) -> int:
    is_small = all(service.request_bytes <= SMALL_REQUEST_BYTES for service in services)
    return SMALL_TRANSPORT_BYTES if is_small else TRANSPORT_LIMIT_BYTES


def _limits(connection_seconds: float) -> list[tuple[str, int]]:
    limits = []
    open_files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if open_files != resource.RLIM_INFINITY:
        limits.append(("grpc.max_allowed_incoming_connections", max(64, open_files - _KEPT_FILES)))
    if connection_seconds:
        limits += [
            ("grpc.max_connection_age_ms", round(connection_seconds * 1000)),
            ("grpc.max_connection_age_grace_ms", round(CONNECTION_GRACE_SECONDS * 1000)),
        ]
    return limits


def listen(
    server: grpc.aio.Server, address: str, credentials: grpc.ServerCredentials | None
) -> str:
    """Add the address to the server, and return it with the port that was really bound. Raises
    NoCapacity.
    """
    try:
        port = (
            server.add_secure_port(address, credentials)
            if credentials is not None
            else server.add_insecure_port(address)
        )
    except RuntimeError as error:
        raise NoCapacity(f"cannot listen on {address}: is another process there?") from error
    return _bound(address, port)


def _bound(address: str, port: int) -> str:
    if address.startswith("unix:"):
        return address
    return f"{address.rpartition(':')[0]}:{port}"
