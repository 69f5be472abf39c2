"""The edge's gRPC client: one channel per router address, with failover for calls that no router
has accepted.

Requests are serialised bytes; replies are protobuf messages. A call that a router has accepted is
never repeated: HTTP clients retry, and two layers of retries multiply an overload.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing, suppress
from types import TracebackType
from typing import Any, Final, TypeVar

from shoal.errors import CannotConnect, Draining, ShoalError
from shoal.transport.addresses import RouterAddresses
from shoal.transport.aio import AsyncTransport
from shoal.transport.methods import GET_CALLER, GET_MESH, HEALTH, LIST_MODELS, WATCH_MESH, Method
from shoal.transport.trust import Tls
from shoal.transport.wire import Metadata
from shoal.v1 import caller_pb2, mesh_pb2, models_pb2

INFERENCE: Final = "shoal.v1.InferenceService"
PROBE_SECONDS: Final = 2.0
IDENTIFY_SECONDS: Final = 10.0
"""The time limit for identifying a caller. An overloaded router may take as long to refuse a
request.
"""

PROBE_ID: Final = "edge-asks-whether-routers-authenticate"
"""The request id of the call by `accepts_anonymous`, which operators see in logs of routers."""

R = TypeVar("R")


class Routers:
    """The routers of one edge. A call goes to the address that responded last.

    Args:
        addresses: The addresses of the routers, host:port.
        tls: Certificates for the connections; None: without TLS.
    """

    def __init__(self, addresses: Sequence[str], tls: Tls | None) -> None:
        self._addresses = RouterAddresses(tuple(addresses))
        self._transport = AsyncTransport(tls)
        # The state: gRPC methods that take serialised requests, by path.
        self._methods: dict[str, Method[bytes, Any]] = {}

    async def __aenter__(self) -> Routers:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._transport.close()

    async def ask(
        self, method: Method[Any, R], body: bytes, *, seconds: float, metadata: Metadata
    ) -> R:
        """Return the reply to a serialised request. Cancelling the task cancels the call. Raises
        shoal.errors.ShoalError.
        """
        return (await self.ask_sized(method, body, seconds=seconds, metadata=metadata))[0]

    async def ask_sized(
        self, method: Method[Any, R], body: bytes, *, seconds: float, metadata: Metadata
    ) -> tuple[R, int]:
        """Return the reply and its size in bytes, as `ask` does."""
        as_bytes = self._methods.get(method.path)
        if as_bytes is None:
            as_bytes = self._methods[method.path] = Method(method.path, bytes, _sized(method.parse))
        tries = max(2, len(self._addresses))
        while True:
            address = self._addresses.current
            tries -= 1
            try:
                reply: tuple[R, int] = await self._transport.send(
                    address, as_bytes, body, timeout=seconds, metadata=metadata
                )
                return reply
            except (CannotConnect, Draining) as error:
                self._addresses.failed(address)
                if tries <= 0 or self._is_taken(error):
                    raise

    async def stream(
        self, method: Method[Any, R], body: bytes, *, seconds: float, metadata: Metadata
    ) -> AsyncGenerator[R]:
        """Yield the replies to a serialised request. Routers are tried in turn until one has
        replied. Closing the generator cancels the call. Raises ShoalError.
        """
        as_bytes: Method[bytes, R] = Method(method.path, bytes, method.parse)
        tries, has_begun = max(2, len(self._addresses)), False
        while True:
            address = self._addresses.current
            tries -= 1
            try:
                replies = self._transport.stream(
                    address, as_bytes, body, timeout=seconds, metadata=metadata
                )
                async with aclosing(replies):
                    async for reply in replies:
                        has_begun = True
                        yield reply
                return
            except (CannotConnect, Draining) as error:
                self._addresses.failed(address)
                if has_begun or tries <= 0 or self._is_taken(error):
                    raise

    def _is_taken(self, error: ShoalError) -> bool:
        """Return whether a failed call must not be sent to another router: the router may have
        accepted it, or no other router exists.
        """
        return isinstance(error, CannotConnect) and (error.was_sent or len(self._addresses) == 1)

    async def watch(
        self, metadata: Metadata, interval_seconds: float = 1.0
    ) -> AsyncGenerator[mesh_pb2.WatchMeshResponse]:
        """Yield the mesh once per interval from one router until it ends the stream. Raises
        ShoalError.
        """
        address = self._addresses.current
        request = mesh_pb2.WatchMeshRequest(interval_seconds=interval_seconds)
        try:
            looks = self._transport.stream(address, WATCH_MESH, request, metadata=metadata)
            async with aclosing(looks):
                async for look in looks:
                    yield look
        except (CannotConnect, Draining):
            self._addresses.failed(address)
            raise

    async def tenant(self, metadata: Metadata) -> str:
        """Return the caller's tenant. Raises the ShoalError with which a router refuses the
        caller.
        """
        body = caller_pb2.GetCallerRequest().SerializeToString()
        return (
            await self.ask(GET_CALLER, body, seconds=IDENTIFY_SECONDS, metadata=metadata)
        ).tenant

    async def may_watch(self, metadata: Metadata) -> None:
        """Raise the router's ShoalError if this caller may not watch the mesh."""
        await self.ask(
            GET_MESH,
            mesh_pb2.GetMeshRequest().SerializeToString(),
            seconds=PROBE_SECONDS,
            metadata=metadata,
        )

    async def is_serving(self) -> bool:
        """Return whether a router accepts inference requests now."""
        for _ in range(len(self._addresses)):
            address = self._addresses.current
            with suppress(ShoalError):
                if await self._transport.send(
                    address, HEALTH, INFERENCE, timeout=PROBE_SECONDS, metadata=()
                ):
                    return True
            self._addresses.failed(address)
        return False

    async def accepts_anonymous(self) -> bool:
        """Return whether routers accept a caller with a token that was never issued, that is, do
        not authenticate callers. Raises ShoalError if no router responds.
        """
        metadata = (("authorization", "Bearer unknown"), ("x-request-id", PROBE_ID))
        try:
            await self.ask(
                LIST_MODELS,
                models_pb2.ListModelsRequest().SerializeToString(),
                seconds=PROBE_SECONDS,
                metadata=metadata,
            )
        except ShoalError as error:
            if error.code in ("UNAUTHENTICATED", "PERMISSION_DENIED"):
                return False
            raise
        return True


def _sized(parse: Callable[[bytes], R]) -> Callable[[bytes], tuple[R, int]]:
    return lambda reply: (parse(reply), len(reply))
