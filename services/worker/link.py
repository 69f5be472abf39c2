"""The gRPC connections to the routers: any of them will do, and the one that answered last is asked first.

Between the worker's parts and WorkerService. A router may die or restart at any time; what a call needs is then asked of the next.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Final, TypeVar

import grpc
from shoal.v1 import worker_pb2

from libs.errors import InternalError, NoCapacity
from libs.telemetry.logs import fields

log = logging.getLogger(__name__)

COMPLETE_SECONDS: Final = 10.0
HEARTBEAT_SECONDS: Final = 5.0
PULL_MARGIN_SECONDS: Final = 5.0
"""A pull is given up so much later than it should have come back empty: its router is gone without a word."""

_OPTIONS: Final[tuple[tuple[str, int], ...]] = (
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    # A router that restarts is found again within two seconds, and an address that swallows packets is left as soon.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 2_000),
    ("grpc.max_reconnect_backoff_ms", 2_000),
    ("grpc.use_local_subchannel_pool", 1),
)
_PREFIX: Final = "/shoal.v1.WorkerService/"
_OUR_FAULT: Final = (
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.UNIMPLEMENTED,
    grpc.StatusCode.PERMISSION_DENIED,
    grpc.StatusCode.UNAUTHENTICATED,
    grpc.StatusCode.NOT_FOUND,
    grpc.StatusCode.OUT_OF_RANGE,
)
"""What every other router would say as well."""

_Request = TypeVar("_Request")
_Response = TypeVar("_Response")


class Backoff:
    """Seconds to wait after one failure, two, three ...: 0.1, 0.2 ... 1, and up to half of that less, so that workers spread."""

    def __init__(self) -> None:
        self._failures = 0

    def next(self) -> float:
        self._failures += 1
        longest: float = min(1.0, 0.05 * 2 ** min(self._failures, 10))
        return longest * random.uniform(0.5, 1.0)  # noqa: S311

    def reset(self) -> None:
        self._failures = 0


@dataclass(frozen=True, slots=True)
class _Router:
    address: str
    channel: grpc.aio.Channel
    pull: grpc.aio.UnaryUnaryMultiCallable[worker_pb2.PullRequest, worker_pb2.PullResponse]
    complete: grpc.aio.UnaryUnaryMultiCallable[worker_pb2.CompleteRequest, worker_pb2.CompleteResponse]
    heartbeat: grpc.aio.UnaryUnaryMultiCallable[worker_pb2.HeartbeatRequest, worker_pb2.HeartbeatResponse]


def _router(address: str) -> _Router:
    channel = grpc.aio.insecure_channel(address, options=_OPTIONS)
    return _Router(
        address,
        channel,
        channel.unary_unary(
            f"{_PREFIX}Pull",
            request_serializer=worker_pb2.PullRequest.SerializeToString,
            response_deserializer=worker_pb2.PullResponse.FromString,
        ),
        channel.unary_unary(
            f"{_PREFIX}Complete",
            request_serializer=worker_pb2.CompleteRequest.SerializeToString,
            response_deserializer=worker_pb2.CompleteResponse.FromString,
        ),
        channel.unary_unary(
            f"{_PREFIX}Heartbeat",
            request_serializer=worker_pb2.HeartbeatRequest.SerializeToString,
            response_deserializer=worker_pb2.HeartbeatResponse.FromString,
        ),
    )


class Link:
    """WorkerService on whichever router answers. Calls raise NoCapacity if none does, InternalError if the call is refused."""

    def __init__(self, addresses: Sequence[str], worker_id: str) -> None:
        self._addresses = tuple(addresses)
        self._routers: list[_Router] = []
        # Workers begin at different routers, so that routers share them.
        self._current = zlib.crc32(worker_id.encode()) % len(self._addresses)
        self._answered = asyncio.Event()
        self._down: set[int] = set()

    async def __aenter__(self) -> Link:
        self._routers = [_router(address) for address in self._addresses]
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for router in self._routers:
            await router.channel.close()

    def try_next(self) -> None:
        """Ask another router from now on: the present one answers, but has no patience with us (it is stopping)."""
        self._current = (self._current + 1) % len(self._routers)

    async def pull(self, request: worker_pb2.PullRequest) -> worker_pb2.PullResponse:
        return await self._call(lambda router: router.pull, request, request.wait_seconds + PULL_MARGIN_SECONDS)

    async def heartbeat(self, request: worker_pb2.HeartbeatRequest) -> worker_pb2.HeartbeatResponse:
        return await self._call(lambda router: router.heartbeat, request, HEARTBEAT_SECONDS)

    async def complete(self, request: worker_pb2.CompleteRequest, until_unix: float) -> bool:
        """Tries until a router accepts or the time has passed when nobody wants the answers any more. True: accepted."""
        backoff = Backoff()
        while True:
            try:
                await self._call(lambda router: router.complete, request, COMPLETE_SECONDS)
            except NoCapacity:
                pause = min(backoff.next(), until_unix - time.time())
                if pause <= 0:
                    return False
                await self._next_answer(pause)
            except InternalError:
                return False
            else:
                return True

    async def _next_answer(self, seconds: float) -> None:
        """Wait until any call succeeds, at most so long."""
        self._answered.clear()
        try:
            async with asyncio.timeout(seconds):
                await self._answered.wait()
        except TimeoutError:
            return

    async def _call(
        self,
        method: Callable[[_Router], grpc.aio.UnaryUnaryMultiCallable[_Request, _Response]],
        request: _Request,
        timeout: float,
    ) -> _Response:
        reasons = []
        for _ in self._routers:
            index = self._current
            router = self._routers[index]
            try:
                response = await method(router)(request, timeout=timeout)
            except grpc.aio.AioRpcError as error:
                if error.code() in _OUR_FAULT:
                    log.error("a router refused a call", extra=fields({"router": router.address, "reason": error.details()}))
                    raise InternalError(f"{router.address}: {error.details()}") from error
                reasons.append(f"{router.address}: {error.code().name} {error.details()}")
                self._leave(index, error)
            else:
                self._answered.set()
                self._down.discard(index)
                return response
        raise NoCapacity(f"no router answers: {'; '.join(reasons)}")

    def _leave(self, index: int, error: grpc.aio.AioRpcError) -> None:
        if self._current == index:
            self._current = (index + 1) % len(self._routers)
        if index not in self._down:
            self._down.add(index)
            reason = f"{error.code().name} {error.details()}"
            log.warning("a router does not answer", extra=fields({"router": self._addresses[index], "reason": reason}))
