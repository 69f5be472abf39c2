"""The gRPC server of every Shoal process: health, reflection, limits, one interceptor, and graceful
shutdown.

Transport limits are set here: connections, handshakes, headers, concurrent calls. The router
handles admission control of requests.
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
from libs.serving.calls.multiplex import StreamCall
from libs.serving.reflection import add_reflection
from libs.serving.security.authentication import Authenticator
from libs.serving.security.settings import Security, check_exposure, is_loopback
from libs.telemetry.logs import fields

log = logging.getLogger(__name__)

# gRPC's DEBUG line for a cancelled call corrupts memory (grpcio 1.75.0 and 1.80.0, Python 3.11.7):
# the process later dies in the garbage collector. With it, 6 of 6 runs of
# tests/worker/test_link.py, repeated twelve times, died; without it, none.
logging.getLogger("grpc").setLevel(logging.INFO)

OVERALL: Final = ""
"""The health name of the whole server."""
LIVENESS: Final = "liveness"
"""The health name for liveness probes: serving as long as the event loop runs. Other names may
depend on Redis.
"""

_HANG_UP_SECONDS: Final = 1.0
"""Time after the drain to send the last answers, and to end streams and long polls."""

MAX_METADATA_BYTES: Final = 16 * 1024
"""Size of all of a call's headers, including the token, above which some calls are refused."""
MAX_METADATA_HARD_BYTES: Final = 32 * 1024
"""Size above which all are refused."""
HANDSHAKE_SECONDS: Final = 10
"""Time limit for the TLS and HTTP/2 handshakes of a connection."""
MAX_CONNECTION_CALLS: Final = 10_000
"""Concurrent calls of one connection, so that no connection uses up a server's total
(`calls/bounds.py`).
"""

OPTIONS: Final[tuple[tuple[str, int], ...]] = (
    # With SO_REUSEPORT two servers on one port would silently share its connections.
    ("grpc.so_reuseport", 0),
    ("grpc.max_send_message_length", -1),
    # Accept only uncompressed requests (1: identity): gRPC decompresses a request before it checks
    # its length.
    ("grpc.compression_enabled_algorithms_bitset", 1),
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    # The defaults (300 s; two hours without calls) reject clients with a shorter keepalive
    # (`too_many_pings`).
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
    ("grpc.http2.max_ping_strikes", 2),
    # Close connections that do not finish the handshakes; the default is two minutes.
    ("grpc.server_handshake_timeout_ms", HANDSHAKE_SECONDS * 1000),
    ("grpc.max_metadata_size", MAX_METADATA_BYTES),
    ("grpc.absolute_max_metadata_size", MAX_METADATA_HARD_BYTES),
    ("grpc.max_concurrent_streams", MAX_CONNECTION_CALLS),
)

CONNECTION_GRACE_SECONDS: Final = 75.0
"""Time for which calls may continue after their connection got GOAWAY: longer than a call without a
deadline (60 s).
"""

_KEPT_FILES: Final = 128
"""File descriptors reserved for Redis, files, and health probes rather than client connections."""


@dataclass(frozen=True, slots=True)
class Service:
    """One gRPC service of a server."""

    name: str
    """The name, as `package.Service`."""
    add_to: Callable[[grpc.aio.Server], None]
    """Registers its servicer, such as `partial(add_WorkerServiceServicer_to_server, servicer)`."""
    is_internal: bool = False
    """Whether it keeps serving while the server drains, because requests in flight need it."""
    request_bytes: int = MAX_REQUEST_BYTES
    """Maximum bytes of a request."""
    method_bytes: Mapping[str, int] = field(default_factory=dict)
    """Maximum bytes of a request, for methods and calls (`Pull`) with a separate limit."""
    stream_calls: Mapping[str, StreamCall] = field(default_factory=dict)
    """The calls that its method `Multiplex` carries, by the field of MultiplexedCall."""

    @property
    def limits(self) -> dict[str, int]:
        """Return request limits, by the service's name and by `/package.Service/Method`."""
        return {
            self.name: self.request_bytes,
            **{f"/{self.name}/{name}": most for name, most in self.method_bytes.items()},
        }


class GrpcServer:
    """A listening server. `address` has the bound port."""

    def __init__(
        self, server: grpc.aio.Server, interceptor: Interceptor, names: Sequence[str]
    ) -> None:
        self.address = ""
        self.health_address = ""
        self._server = server
        self._probed: grpc.aio.Server | None = None
        self._interceptor = interceptor
        self._health = health.aio.HealthServicer()
        # Mutable state: the health of each name.
        self._serving: dict[str, bool] = dict.fromkeys(names, False)

    async def set_health(self, is_serving: bool, *names: str) -> None:
        """Set the health of `names` (default: all). The whole server serves while all names do."""
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
        """Listen. Raises NoCapacity if an address cannot be bound, InvalidInput for unusable TLS
        files.
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
        """Set health to NOT_SERVING, refuse new calls, and wait up to `grace_seconds` for those in
        flight.
        """
        await self._health.enter_graceful_shutdown()
        self._interceptor.drain()
        log.info("draining", extra=fields({"grace_seconds": grace_seconds}))
        try:
            async with asyncio.timeout(grace_seconds):
                await self._interceptor.idle()
        except TimeoutError:
            log.warning("the grace period ended with calls in flight; cutting them off")

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
) -> AsyncIterator[GrpcServer]:
    """Serve on `address` (`host:port`, port 0 for any, or `unix:path`) until the context ends, then
    drain.

    Args:
        security: TLS and authentication. Without it any caller is accepted, on loopback only.
        health: Health-check names in addition to those of `services`. LIVENESS serves immediately;
            the others and the whole server begin as NOT_SERVING (see GrpcServer.set_health).
        connection_seconds: Maximum connection age (0: none). Clients then reconnect and so find new
            routers; calls in flight continue.
        on_drained: Called when only internal calls are left, to end those.

    Raises NoCapacity if the address is in use, InvalidInput for one beyond loopback that `security`
    does not protect. A server without services only answers health checks, and may listen on any
    address.
    """
    security = security or Security()
    if services:
        check_exposure(address, security)
    if services and security.allow_insecure and not is_loopback(address):
        log.warning(
            "listening beyond this machine because of SHOAL_ALLOW_INSECURE",
            extra=fields({"address": address}),
        )
    names = [service.name for service in services]
    authenticator = Authenticator(security)
    interceptor = Interceptor(
        [service.name for service in services if service.is_internal],
        authenticator,
        {name: most for service in services for name, most in service.limits.items()},
        {f"/{one.name}/Multiplex": one.stream_calls for one in services if one.stream_calls},
    )
    server = GrpcServer(
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
    """Construct a gRPC server that does not buffer requests before they are read.

    All servers must be made here (tests/checks/test_guarded_servers.py), so that every port has the
    guard and the limits.

    Args:
        guard: Wraps every method.
        transport_bytes: gRPC's limit for a message, which it checks after the message has arrived.
        connection_seconds: Maximum age of a connection; 0 for none.
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
    """Add the address to the server, and return it with the bound port. Raises NoCapacity."""
    try:
        port = (
            server.add_secure_port(address, credentials)
            if credentials is not None
            else server.add_insecure_port(address)
        )
    except RuntimeError as error:
        raise NoCapacity(f"cannot listen on {address}: is it in use by another process?") from error
    return _bound(address, port)


def _bound(address: str, port: int) -> str:
    if address.startswith("unix:"):
        return address
    return f"{address.rpartition(':')[0]}:{port}"
