"""TEI's gRPC API at separate addresses: server reflection, health, and all methods of `tei.v1` as
mesh calls.

Credentials go on to the router, as over HTTP. Messages of a stream that arrive during a call share
the next call.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any, Final, TypeVar, cast
from urllib.parse import unquote

import grpc
from google.protobuf.message import Message
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from shoal.errors import ShoalError
from shoal.transport.wire import Metadata

from libs.errors import DeadlinePassed, InvalidInput, NoCapacity
from libs.serving import Security
from libs.serving.calls.arrivals import Arrivals
from libs.serving.calls.bounds import Bound
from libs.serving.calls.call import new_request_id
from libs.serving.calls.decode import parse
from libs.serving.calls.guard import Guard
from libs.serving.reflection import add_reflection
from libs.serving.security.authentication import read_uris
from libs.serving.server import guarded_server, listen
from libs.telemetry import metrics, traces
from libs.telemetry.logs import REQUEST_ID, fields
from services.edge.activity.cost import truncated_inputs
from services.edge.asgi import State
from services.edge.credentials import (
    CallerTrust,
    read_request_id,
    read_timeout,
    router_metadata,
    trace_metadata,
)
from services.edge.dialects.tei_v1 import CODES, SERVICES, BatchedMethod
from services.edge.intake.reading import UNIDENTIFIED_BODY_BYTES, BodyIntake, Payer
from services.edge.messages.base import TRUNCATED_INPUTS_HEADER, HttpError, MeshCall, Received
from services.edge.messages.names import AliasNames
from services.edge.routers import Routers

log = logging.getLogger(__name__)

T = TypeVar("T")
Context = grpc.aio.ServicerContext[Any, Any]
MAX_TOGETHER: Final = 256
"""The maximum number of a stream's messages per call."""
MAX_WAITING: Final = 1024
"""The maximum number of a stream's messages that are read ahead; then its client waits."""
AHEAD_BYTES: Final = 4 << 20
"""The maximum bytes of a stream that are read ahead."""
MESSAGE_BYTES: Final = 16 << 20
"""The maximum bytes of a message, and of all messages of RerankStream."""
MESSAGE_SECONDS: Final = 60.0
"""The time limit for a message to arrive. In a stream it applies only to the first one."""
ARRIVING_BYTES: Final = 2 * MESSAGE_BYTES
"""The maximum growth of the process while messages arrive; above it the arriving messages are
aborted.
"""
MAX_TEI_CALLS: Final = 1000
_MAX_ERROR_CHARACTERS: Final = 1000
"""The maximum length of an error's text: statuses travel in headers of 8 KiB."""
_COLLECTED: Final = "/tei.v1.Rerank/RerankStream"
_CERTIFICATE: Final = "x509_pem_cert"


class TeiServer:
    """One listening address.

    Args:
        model: The model of its calls; empty to use the aliases.
        intake: Identifies a caller before a message is read, and charges its tenant for messages.
        default_seconds: The deadline of calls without one.
    """

    def __init__(
        self,
        routers: Routers,
        names: Callable[[], AliasNames],
        state: State,
        *,
        intake: BodyIntake,
        model: str = "",
        trust: CallerTrust | None = None,
        default_seconds: float = 60.0,
        longest_seconds: float = 600.0,
    ) -> None:
        self.address = ""
        self._routers = routers
        self._names = names
        self._state = state
        self._model = model
        self._trust = trust or CallerTrust()
        self._intake = intake
        self._default_seconds = default_seconds
        self._longest_seconds = longest_seconds
        self._health = health.aio.HealthServicer()
        self._calls = Bound(MAX_TEI_CALLS, "calls")
        self._arrivals = Arrivals(growth_bytes=ARRIVING_BYTES)
        self._server = guarded_server(Guard(), MESSAGE_BYTES)

    async def start(self, address: str, security: Security) -> None:
        """Listen. Raises NoCapacity if the address cannot be bound, InvalidInput for unusable TLS
        files.
        """
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        for service, methods in SERVICES.items():
            handlers = {
                name: self._handler(f"/{service}/{name}", batch) for name, batch in methods.items()
            }
            self._server.add_generic_rpc_handlers(
                (grpc.method_handlers_generic_handler(service, handlers),)
            )
        add_reflection([*SERVICES, "grpc.health.v1.Health"], self._server)
        credentials = security.tls.credentials() if security.tls is not None else None
        self.address = listen(self._server, address, credentials)
        await self._server.start()
        log.info(
            "listening",
            extra=fields(
                {"address": self.address, "tls": credentials is not None, "protocol": "tei.v1"}
            ),
        )

    async def stop(self, grace_seconds: float) -> None:
        """Accept no more calls, and wait for those in flight for at most `grace_seconds`."""
        await self._health.enter_graceful_shutdown()
        await self._server.stop(grace_seconds)

    async def set_health(self, is_serving: bool) -> None:
        """Set the health of the server and of each service."""
        status = (
            health_pb2.HealthCheckResponse.SERVING
            if is_serving
            else health_pb2.HealthCheckResponse.NOT_SERVING
        )
        for name in ("", *SERVICES):
            await self._health.set(name, status)

    def _handler(self, path: str, batch: BatchedMethod) -> grpc.RpcMethodHandler[Any, Any]:
        async def unary(_: object, context: Context) -> bytes:
            call = _Call(path, context)
            return await self._answered(call, lambda: self._one(call, batch))

        async def collected(_: object, context: Context) -> bytes:
            call = _Call(path, context)
            return await self._answered(call, lambda: self._all(call, batch))

        async def streamed(_: object, context: Context) -> None:
            call = _Call(path, context)
            await self._answered(call, lambda: self._stream(call, batch))

        if path == _COLLECTED:
            return grpc.stream_unary_rpc_method_handler(collected, None, None)
        if path.endswith("Stream"):
            return grpc.stream_stream_rpc_method_handler(streamed, None, None)
        return grpc.stream_unary_rpc_method_handler(unary, None, None)

    async def _one(self, call: _Call, batch: BatchedMethod) -> bytes:
        """Return the reply to the call's single message. Raises HttpError, InvalidInput,
        NoCapacity, DeadlinePassed.
        """
        body = await self._arrivals.read(call.context, MESSAGE_SECONDS)
        if not isinstance(body, bytes):  # the end
            raise InvalidInput("the call ended before its request arrived: send one message")
        await call.hold(len(body))
        return (await self._ask(call, batch, [_parsed(batch, body)]))[0]

    async def _all(self, call: _Call, batch: BatchedMethod) -> bytes:
        """Return the single reply to all messages of a stream. Raises HttpError, InvalidInput."""
        requests = []
        async for body in self._bodies(call):
            await call.hold(len(body))
            if call.held > MESSAGE_BYTES:
                raise HttpError(
                    "TOO_LARGE",
                    f"the stream exceeds the limit of {MESSAGE_BYTES:,} bytes",
                )
            requests.append(_parsed(batch, body))
        return (await self._ask(call, batch, requests))[0]

    async def _stream(self, call: _Call, batch: BatchedMethod) -> None:
        """Answer a stream in order; messages that arrive during a call share the next call. Raises
        HttpError, InvalidInput.
        """
        waiting: asyncio.Queue[bytes | None] = asyncio.Queue(MAX_WAITING)
        has_room = asyncio.Event()

        async def read() -> None:
            async for body in self._bodies(call):
                await call.hold(len(body))
                await waiting.put(body)
                while call.held > AHEAD_BYTES:
                    has_room.clear()
                    await has_room.wait()
            await waiting.put(None)

        async with asyncio.TaskGroup() as group:
            group.create_task(read())
            held: list[tuple[Message, int]] = []
            is_done = False
            while held or not is_done:
                while not is_done and len(held) < MAX_TOGETHER and not (held and waiting.empty()):
                    body = await waiting.get()
                    is_done = body is None
                    if body is not None:
                        held.append((_parsed(batch, body), len(body)))
                if not held:
                    break
                together = _together(batch, held)
                for reply in await self._ask(
                    call, batch, [message for message, _ in held[:together]]
                ):
                    await call.context.write(reply)
                call.release(sum(size for _, size in held[:together]))
                has_room.set()
                del held[:together]

    async def _bodies(self, call: _Call) -> AsyncIterator[bytes]:
        """Yield the messages of a request stream. After the first one they have no time limit.

        Raises NoCapacity, DeadlinePassed.
        """
        is_first = True
        with suppress(grpc.aio.UsageError):  # the call is over
            while True:
                if is_first:
                    body = await self._arrivals.read(call.context, MESSAGE_SECONDS)
                else:
                    body = cast(object, await call.context.read())
                if not isinstance(body, bytes):
                    return
                yield body
                is_first = False

    async def _ask(
        self, call: _Call, batch: BatchedMethod, requests: Sequence[Message]
    ) -> list[bytes]:
        """Return the serialised replies, one per message. Raises HttpError."""
        received = Received(b"", self._names(), self._model, request_id=call.request_id)
        step: Any = batch.ask(requests, received)
        while isinstance(step, MeshCall):
            seconds = call.seconds_left(self._default_seconds, self._longest_seconds)
            try:
                body = step.message.SerializeToString()
                reply, size = await self._routers.ask_sized(
                    step.method, body, seconds=seconds, metadata=call.metadata
                )
            except ShoalError as error:
                raise HttpError.from_error(error, step) from None
            call.note_truncated(reply)
            step = (
                await asyncio.to_thread(step.convert, reply)
                if size > UNIDENTIFIED_BODY_BYTES
                else step.convert(reply)
            )
        return list(step.body)

    async def _answered(self, call: _Call, work: Callable[[], Awaitable[T]]) -> T:
        """Return the result of `work`. Errors become a status, and the call is reported."""
        try:
            call.begin()
            with self._calls:
                if self._state.is_open:
                    raise HttpError(
                        "NOT_READY",
                        (
                            "routers accept anonymous calls, so this edge does not serve beyond "
                            "its "
                            "machine"
                        ),
                    )
                await call.identify(self._intake, self._trust)
                found = await work()
            call.outcome = "OK"
            return found
        except Exception as error:
            problem = _problem(call, error)
            call.outcome = CODES.get(problem.reason, "INTERNAL")
            await call.context.abort(
                grpc.StatusCode[call.outcome], problem.message[:_MAX_ERROR_CHARACTERS]
            )
        finally:
            call.report()


class _Call:
    """The state of one call."""

    def __init__(self, path: str, context: Context) -> None:
        self.path = path
        self.context = context
        self.held = 0
        self.metadata: Metadata = ()
        """Metadata for the router; empty before `identify`."""
        self._payer: Payer | None = None
        self.outcome = "CANCELLED"
        self.request_id = new_request_id()
        self._begin = time.monotonic()
        self._headers: dict[str, str] = {}
        self._truncated = 0

    def begin(self) -> None:
        """Parse the headers. Raises HttpError for invalid ones."""
        given = self.context.invocation_metadata() or ()
        self._headers = {key.lower(): value for key, value in given if isinstance(value, str)}
        REQUEST_ID.set(self.request_id)
        self.request_id = read_request_id(self._headers, self.request_id)
        REQUEST_ID.set(self.request_id)

    async def identify(self, intake: BodyIntake, trust: CallerTrust) -> None:
        """Ask a router for the caller's tenant. Raises HttpError for a refused caller."""
        certificate = _certificate(self.context) if trust.certificates else None
        metadata = router_metadata(self._headers, self.request_id, certificate, trust)
        self._payer = intake.payer(_address(self.context.peer()), metadata)
        self.metadata = metadata + trace_metadata(self._headers, "")
        await self._payer.identify()

    def note_truncated(self, reply: Any) -> None:
        """Report texts that were cut in the call's trailing metadata, as HTTP does in a header."""
        cut = truncated_inputs(reply)
        if cut:
            self._truncated += cut
            name = TRUNCATED_INPUTS_HEADER.decode()
            self.context.set_trailing_metadata(((name, str(self._truncated)),))

    async def hold(self, size: int) -> None:
        """Charge a message's memory like that of HTTP bodies. Raises HttpError."""
        if self._payer is None:
            raise TypeError("the caller must be identified before its messages are held")
        await self._payer.take(size)
        self.held += size

    def release(self, size: int) -> None:
        if self._payer is not None:
            self._payer.give(size)
        self.held -= size

    def seconds_left(self, default: float, longest: float) -> float:
        """Return the seconds until the deadline. Raises HttpError if it is exceeded."""
        left = cast("float | None", self.context.time_remaining())
        if left is None:
            left = read_timeout(self._headers, default, longest) - (time.monotonic() - self._begin)
        if left <= 0:
            raise HttpError(
                "DEADLINE_PASSED", "deadline exceeded before the call was sent to a router"
            )
        return min(left, longest)

    def report(self) -> None:
        """Count and log the outcome."""
        if self._payer is not None:
            self._payer.close()
        seconds = time.monotonic() - self._begin
        metrics.HTTP_REQUESTS.labels(self.path, self.outcome).inc()
        metrics.HTTP_REQUEST_SECONDS.labels(self.path).observe(
            seconds, traces.exemplar(traces.NONE)
        )
        if log.isEnabledFor(logging.INFO):
            log.info(
                "call",
                extra=fields(
                    {"method": self.path, "status": self.outcome, "seconds": round(seconds, 6)}
                ),
            )


@asynccontextmanager
async def serving_tei(
    servers: Mapping[str, TeiServer], security: Security, *, grace_seconds: float
) -> AsyncIterator[Sequence[TeiServer]]:
    """Serve each server at its address until the context ends, then drain. Raises NoCapacity,
    InvalidInput.
    """
    started: list[TeiServer] = []
    try:
        for address, server in servers.items():
            await server.start(address, security)
            started.append(server)
        yield started
    finally:
        await asyncio.gather(*(server.stop(grace_seconds) for server in started))


def _parsed(batch: BatchedMethod, body: bytes) -> Message:
    """Parse a message. Raises InvalidInput."""
    return parse(batch.request, body)


def _together(batch: BatchedMethod, held: Sequence[tuple[Message, int]]) -> int:
    """Return how many of the first messages, each with its bytes, can share a call; at least
    one.
    """
    if not batch.agree:
        return 1
    first, size = batch.key(held[0][0]), 0
    for index, (message, message_bytes) in enumerate(held):
        size += message_bytes
        if index and (size > batch.together_bytes or batch.key(message) != first):
            return index
    return len(held)


def _problem(call: _Call, error: BaseException) -> HttpError:
    """Return the error of a failed call. Raises CancelledError if its client disconnected."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    if isinstance(error, HttpError):
        return error
    if isinstance(error, (InvalidInput, NoCapacity, DeadlinePassed)):
        return HttpError(error.reason, error.message, field=error.field)
    if isinstance(error, grpc.aio.InternalError):
        raise asyncio.CancelledError from None
    log.error("call failed", extra=fields({"method": call.path}), exc_info=error)
    return HttpError("INTERNAL", f"unexpected error; see request {call.request_id} in the log")


def _address(peer: str) -> str:
    """Return the IP address of a gRPC peer such as ipv4:10.0.0.1:5000 or ipv6:[::1]:5000; empty for
    others.
    """
    kind, _, address = unquote(peer).partition(":")
    return address.rpartition(":")[0].strip("[]") if kind in ("ipv4", "ipv6") else ""


def _certificate(context: Context) -> Mapping[str, Any] | None:
    """Return the caller's certificate in the form of ssl.SSLObject.getpeercert."""
    pems = context.auth_context().get(_CERTIFICATE, ())
    uris = [uri.decode() for pem in pems for uri in read_uris(pem)]
    return {"subjectAltName": [("URI", uri) for uri in uris]} if uris else None
