"""A gRPC server as every process of Shoal runs it: health, reflection, limits, one interceptor, and a drain before the end."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Final

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from libs.errors import NoCapacity
from libs.serving.decode import TRANSPORT_LIMIT_BYTES
from libs.serving.interceptor import Interceptor
from libs.telemetry.logs import fields

log = logging.getLogger(__name__)

OVERALL: Final = ""
"""The health name that stands for the whole server."""

_HANG_UP_SECONDS: Final = 1.0
"""After the drain: time for the last answers to leave and for streams and long polls to be told."""

OPTIONS: Final[tuple[tuple[str, int], ...]] = (
    # Two servers on one port would share its connections in silence.
    ("grpc.so_reuseport", 0),
    ("grpc.max_receive_message_length", TRANSPORT_LIMIT_BYTES),
    ("grpc.max_send_message_length", -1),
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    # The default of 300 s turns every client with a shorter keepalive away with `too_many_pings`.
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 10_000),
    ("grpc.http2.max_ping_strikes", 2),
)


@dataclass(frozen=True, slots=True)
class Service:
    """What a server answers.

    name: `package.Service`. add_to: registers its servicer, such as `partial(add_WorkerServiceServicer_to_server, servicer)`.
    is_internal: keeps answering while the server drains, because requests in flight need it.
    """

    name: str
    add_to: Callable[[grpc.aio.Server], None]
    is_internal: bool = False


class Server:
    """A server that listens. `address` has the port that was really bound."""

    def __init__(self, server: grpc.aio.Server, interceptor: Interceptor, names: Sequence[str]) -> None:
        self.address = ""
        self._server = server
        self._interceptor = interceptor
        self._health = health.aio.HealthServicer()
        # The state: which names serve.
        self._serving: dict[str, bool] = dict.fromkeys(names, False)

    async def set_health(self, is_serving: bool, *names: str) -> None:
        """Sets the health of `names` (default: of all); the whole server serves while all of them do."""
        wanted = dict.fromkeys(names or self._serving, is_serving)
        changed = {name: value for name, value in wanted.items() if self._serving.get(name) != value}
        if not changed:
            return
        self._serving.update(changed)
        for name in changed:
            await self._publish(name, is_serving)
        await self._publish(OVERALL, all(self._serving.values()))
        log.info("health changed", extra=fields({"is_serving": is_serving, "names": ", ".join(changed)}))

    async def start(self, address: str) -> None:
        """Listens. Raises NoCapacity if the address cannot be had."""
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        for name in (*self._serving, OVERALL):
            await self._publish(name, False)
        try:
            port = self._server.add_insecure_port(address)
        except RuntimeError as error:
            raise NoCapacity(f"cannot listen on {address}: is another process there?") from error
        await self._server.start()
        self.address = _bound(address, port)
        log.info("listening", extra=fields({"address": self.address}))

    async def drain(self, grace_seconds: float) -> None:
        """Health turns NOT_SERVING, new calls are refused, those in flight finish (at most `grace_seconds`)."""
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
        log.info("stopped", extra=fields({"address": self.address}))

    async def _publish(self, name: str, is_serving: bool) -> None:
        status = health_pb2.HealthCheckResponse.SERVING if is_serving else health_pb2.HealthCheckResponse.NOT_SERVING
        await self._health.set(name, status)


@asynccontextmanager
async def serving(
    address: str,
    services: Sequence[Service],
    *,
    health: Sequence[str] = (),
    grace_seconds: float = 25.0,
    on_drained: Callable[[], None] = lambda: None,
) -> AsyncIterator[Server]:
    """Serves on `address` (`host:port`, port 0 for any, or `unix:path`) until the context ends, then drains.

    health: more names than those of `services` to answer health checks for. All begin as NOT_SERVING, and so does the whole
    server; see Server.set_health. on_drained: called once nothing but internal calls is left, to end those.
    Raises NoCapacity if the address is taken.
    """
    names = [service.name for service in services]
    interceptor = Interceptor([service.name for service in services if service.is_internal])
    plain = grpc.aio.server(interceptors=[interceptor], options=OPTIONS)
    for service in services:
        service.add_to(plain)
    reflection.enable_server_reflection([*names, "grpc.health.v1.Health", reflection.SERVICE_NAME], plain)
    server = Server(plain, interceptor, [*names, *health])
    await server.start(address)
    try:
        yield server
    finally:
        await server.drain(grace_seconds)
        on_drained()
        await server.stop()


def _bound(address: str, port: int) -> str:
    if address.startswith("unix:"):
        return address
    return f"{address.rpartition(':')[0]}:{port}"
