"""The gRPC connections to the routers, with failover. Any router serves a worker; the last one that
replied is called first.

All of the worker's calls to WorkerService are made here. A router may die or restart at any time; a
call is then sent to the next.
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
import time
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Final, TypeVar

import grpc
from google.protobuf.message import Message
from shoal.transport.channels import Channels
from shoal.transport.methods import Method
from shoal.transport.multiplex import Streams
from shoal.transport.trust import Trust
from shoal.v1 import multiplex_pb2, worker_pb2

from libs.errors import InternalError, NoCapacity
from libs.telemetry.logs import fields
from libs.telemetry.traces import TRACEPARENT
from services.worker.mesh.clock import MeshClock

log = logging.getLogger(__name__)

COMPLETE_SECONDS: Final = 10.0
HEARTBEAT_SECONDS: Final = 5.0
PULL_MARGIN_SECONDS: Final = 5.0
"""A pull times out this much later than its expected empty reply: its router disappeared without
closing the connection.
"""

_OPTIONS: Final[tuple[tuple[str, int], ...]] = (
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    ("grpc.keepalive_time_ms", 20_000),
    # As clients and servers: a router on a busy machine may be late, and closing its connection
    # fails all calls. Calls to a router that has disappeared end by their own timeouts.
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    # Reconnect to a restarted router within a second; give up on an address that drops packets
    # after two.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 2_000),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    ("grpc.use_local_subchannel_pool", 1),
)
_NOT_RETRIABLE: Final = (
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.UNIMPLEMENTED,
    grpc.StatusCode.NOT_FOUND,
    grpc.StatusCode.OUT_OF_RANGE,
)
"""Statuses that any other router would also return: the call does not fail over."""

_UNAUTHORISED: Final = (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED)
"""Authentication or authorisation failed. Retried as if the router were down: the token or
certificate may be renewed here, or registered there.
"""
REFUSED_LOG_SECONDS: Final = 60.0
"""Minimum interval between log lines about refused credentials."""

_Request = TypeVar("_Request", bound=Message)
_Response = TypeVar("_Response")


class Backoff:
    """Exponential backoff with jitter: 0.1, 0.2 ... 1 s, less up to half of it at random."""

    def __init__(self) -> None:
        self._failures = 0

    def next(self) -> float:
        self._failures += 1
        longest: float = min(1.0, 0.05 * 2 ** min(self._failures, 10))
        return longest * random.uniform(0.5, 1.0)  # noqa: S311

    def reset(self) -> None:
        self._failures = 0


_Message = TypeVar("_Message", bound=Message)
_Reply = TypeVar("_Reply", bound=Message)


def _method(path: str, request: type[_Message], response: type[_Reply]) -> Method[_Message, _Reply]:
    return Method(path, request.SerializeToString, response.FromString)


_SERVICE: Final = "/shoal.v1.WorkerService"
_HEARTBEAT: Final = _method(
    f"{_SERVICE}/Heartbeat", worker_pb2.HeartbeatRequest, worker_pb2.HeartbeatResponse
)
_CONNECT: Final = _method(
    f"{_SERVICE}/Connect", worker_pb2.ConnectRequest, worker_pb2.ConnectResponse
)
_MULTIPLEX: Final = _method(
    f"{_SERVICE}/Multiplex", multiplex_pb2.MultiplexRequest, multiplex_pb2.MultiplexResponse
)
# Calls on the stream, by the field of MultiplexedCall.
_PULL: Final = _method("pull", worker_pb2.PullRequest, worker_pb2.PullResponse)
_COMPLETE: Final = _method("complete", worker_pb2.CompleteRequest, worker_pb2.CompleteResponse)
_DELTAS: Final = _method("deltas", worker_pb2.DeltasRequest, worker_pb2.DeltasResponse)


@dataclass(frozen=True, slots=True)
class WorkerIdentity:
    """The worker's identity in calls to routers. `epoch` is new at each process start."""

    worker_id: str
    epoch: str
    pool: str


class Link:
    """WorkerService on any router. Calls raise NoCapacity if no router replies, InternalError if
    the call is refused.

    Args:
        identity: Names this worker in calls.
        trust: The certificates and the token, read again when their files change. Calls in flight
            keep their connection.
    """

    def __init__(
        self, identity: WorkerIdentity, addresses: Sequence[str], trust: Trust | None = None
    ) -> None:
        self.identity = identity
        self.clock = MeshClock()
        self._addresses = tuple(addresses)
        self._trust = trust or Trust()
        self._channels = Channels(self._open, self._trust.tls)
        # Workers start at different routers, which balances the load.
        self._current = zlib.crc32(identity.worker_id.encode()) % len(self._addresses)
        self._streams = Streams(_MULTIPLEX)
        self._answered = asyncio.Event()
        self._down: set[int] = set()
        self._refusal_logged_at = -math.inf

    async def __aenter__(self) -> Link:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._streams.close()
        for channel in self._channels.close():
            await channel.close()

    def _open(self, address: str, credentials: grpc.ChannelCredentials | None) -> grpc.aio.Channel:
        options: list[tuple[str, str | int]] = [*_OPTIONS]
        if self._trust.tls is not None and self._trust.tls.server_name:
            options.append(("grpc.ssl_target_name_override", self._trust.tls.server_name))
        if credentials is None:
            return grpc.aio.insecure_channel(address, options)
        return grpc.aio.secure_channel(address, credentials, options)

    def try_next(self) -> None:
        """Switch to the next router: the current one replies but does not long-poll (it is shutting
        down).
        """
        self._current = (self._current + 1) % len(self._addresses)

    async def pull(self, request: worker_pb2.PullRequest) -> worker_pb2.PullResponse:
        sent_at = time.monotonic()
        response = await self._call(_PULL, request, request.wait_seconds + PULL_MARGIN_SECONDS)
        self.clock.synchronise(response.now_unix_ms, sent_at, time.monotonic())
        return response

    async def heartbeat(self, request: worker_pb2.HeartbeatRequest) -> worker_pb2.HeartbeatResponse:
        return await self._call(_HEARTBEAT, request, HEARTBEAT_SECONDS)

    async def complete(
        self, request: worker_pb2.CompleteRequest, until_unix: float, traceparent: str = ""
    ) -> int | None:
        """Send answers, retrying with backoff until a router accepts the call or `until_unix`, when
        they have expired.

        Return how many answers were accepted, or None if no router accepted the call.

        Args:
            traceparent: Trace context of the call.
        """
        backoff = Backoff()
        while True:
            try:
                response = await self._call(_COMPLETE, request, COMPLETE_SECONDS, traceparent)
            except NoCapacity:
                pause = min(backoff.next(), until_unix - time.time())
                if pause <= 0:
                    return None
                await self._next_answer(pause)
            except InternalError:
                return None
            else:
                return response.accepted

    async def send_deltas(self, request: worker_pb2.DeltasRequest) -> worker_pb2.DeltasResponse:
        """Send texts on the stream of the current router. Raises NoCapacity on failure."""
        address = self._addresses[self._current]
        try:
            return await self._send(address, _DELTAS, request, COMPLETE_SECONDS)
        except grpc.aio.AioRpcError as error:
            raise NoCapacity(f"{address}: {error.code().name} {error.details()}") from error

    async def connect(self, request: worker_pb2.ConnectRequest) -> None:
        """Keep a stream open until its router ends it. Raises NoCapacity if it breaks,
        InternalError if the router refuses it.
        """
        index = self._current
        address = self._addresses[index]
        pooled = self._channels.acquire(address)
        try:
            async for _ in pooled.stream(_CONNECT)(request, metadata=self._trust.metadata()):
                pass
        except grpc.aio.AioRpcError as error:
            if error.code() in _NOT_RETRIABLE:
                raise InternalError(f"{address}: {error.details()}") from error
            self._fail_over(index, error)
            raise NoCapacity(f"{address}: {error.code().name} {error.details()}") from error
        finally:
            for channel in self._channels.release(pooled):
                await channel.close()

    async def _next_answer(self, seconds: float) -> None:
        """Wait until any call succeeds, at most `seconds`."""
        self._answered.clear()
        try:
            async with asyncio.timeout(seconds):
                await self._answered.wait()
        except TimeoutError:
            return

    async def _call(
        self,
        method: Method[_Request, _Response],
        request: _Request,
        timeout: float,
        traceparent: str = "",
    ) -> _Response:
        reasons = []
        for _ in self._addresses:
            index = self._current
            address = self._addresses[index]
            try:
                response = await self._send(address, method, request, timeout, traceparent)
            except grpc.aio.AioRpcError as error:
                if error.code() in _NOT_RETRIABLE:
                    log.error(
                        "a router refused a call",
                        extra=fields({"router": address, "reason": error.details()}),
                    )
                    raise InternalError(f"{address}: {error.details()}") from error
                reasons.append(f"{address}: {error.code().name} {error.details()}")
                self._fail_over(index, error)
                if isinstance(request, worker_pb2.PullRequest):
                    request.asked_again = True  # the lost reply may have had a batch
            else:
                self._answered.set()
                self._down.discard(index)
                return response
        raise NoCapacity(f"no router replied: {'; '.join(reasons)}")

    async def _send(
        self,
        address: str,
        method: Method[_Request, _Response],
        request: _Request,
        timeout: float,
        traceparent: str = "",
    ) -> _Response:
        """Send a heartbeat as a unary call, other calls on a stream. Raises AioRpcError."""
        pooled = self._channels.acquire(address)
        metadata = self._trust.metadata()
        group = self._streams.enter(pooled, metadata)
        try:
            if method is _HEARTBEAT:
                response: _Response = await pooled.method(method)(
                    request, timeout=timeout, metadata=metadata
                )
                return response
            stream = self._streams.find(group) or self._streams.open(pooled, group)
            trace = ((TRACEPARENT, traceparent),)
            body = await stream.call(method.path, method.serialize(request), timeout, trace)
            return method.parse(body)
        finally:
            self._streams.leave(pooled, group)
            for channel in self._channels.release(pooled):
                await channel.close()

    def _fail_over(self, index: int, error: grpc.aio.AioRpcError) -> None:
        if self._current == index:
            self._current = (index + 1) % len(self._addresses)
        reason = f"{error.code().name} {error.details()}"
        if error.code() in _UNAUTHORISED:
            self._log_refusal(self._addresses[index], reason)
        elif index not in self._down:
            self._down.add(index)
            outcome = {"router": self._addresses[index], "reason": reason}
            log.warning("a router does not respond; switching to the next", extra=fields(outcome))

    def _log_refusal(self, address: str, reason: str) -> None:
        if time.monotonic() >= self._refusal_logged_at + REFUSED_LOG_SECONDS:
            self._refusal_logged_at = time.monotonic()
            log.error(
                "a router refuses this worker's token or certificate: renew it, or register "
                "it at the router",
                extra=fields({"router": address, "reason": reason}),
            )
