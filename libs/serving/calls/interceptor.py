"""The interceptor around every call: authentication and authorisation, reading and parsing the
request, mapping errors to a status, and the report of the call (`reports.py`).

A call without permission is refused before a byte of its request is read. gRPC would buffer the
whole message first, so every method is served with a request stream, of which one message is read,
or all if the method is declared so. Only here do errors become gRPC statuses. Health and reflection
(`/grpc.*`) need no credential; the number of their streams is limited.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Collection, Mapping
from contextlib import aclosing, nullcontext
from contextvars import Context as Variables
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final, Protocol, TypeAlias, TypeVar, cast

import grpc
from google.protobuf.message import Message

from libs.errors import DeadlinePassed, InternalError, InvalidInput, ShoalError
from libs.names import is_model_id
from libs.serving.calls.arrivals import Arrivals
from libs.serving.calls.bounds import MAX_CALLS, Bound, InFlight
from libs.serving.calls.call import (
    ANSWER_HEADER,
    REQUEST_ID_HEADER,
    TENANT_HEADER,
    Call,
    checked_id,
    enter_call,
    first_values,
    new_request_id,
    parse_answer_bytes,
)
from libs.serving.calls.decode import MAX_REQUEST_BYTES, SMALL_REQUEST_BYTES, parse, request_type
from libs.serving.calls.guard import Guard, Handler, abort
from libs.serving.calls.multiplex import MultiplexedRpc, Multiplexer, StreamCall
from libs.serving.calls.reports import CallRecord, Reporter
from libs.serving.security import authentication
from libs.serving.security.audit import Audit
from libs.serving.security.authentication import Authenticator, Metadata
from libs.serving.security.identity import Identity, is_printable
from libs.serving.security.roles import check_allowed
from libs.serving.security.settings import Security
from libs.telemetry import traces
from libs.telemetry.logs import MODEL, REQUEST_ID, fields

log = logging.getLogger(__name__)

Context: TypeAlias = grpc.aio.ServicerContext[Message, Message]
Unary: TypeAlias = Callable[[Message, Context], Awaitable[Message]]
Streaming: TypeAlias = Callable[[Any, Context], AsyncGenerator[Message]]
"""Takes one message, or an iterator over the messages of a request stream."""

_Response = TypeVar("_Response")

_UNCOUNTED: Final = nullcontext()

ANSWERS: Final = frozenset(
    {"/shoal.v1.InferenceService/EncodeStream", "/shoal.v1.InferenceService/ExtractStream"}
)
"""Streams that end with the answer to their request. Like unary calls they have a span and a
latency, and count as in flight. Other streams never end by themselves: a drain does not wait for
them, and they are cut when the server stops.
"""

REQUEST_SECONDS: Final = 60.0
"""Time limit for the arrival of a request, so that a client that trickles bytes cannot hold a call
open.
"""

PARSE_IN_THREAD_BYTES: Final = 64 * 1024
"""Larger requests are parsed in a thread; for smaller ones the hand-over takes longer than
parsing.
"""


PARSE_STREAMED_IN_THREAD_BYTES: Final = 1024 * 1024
"""The same for messages of streams: those only wrap the requests, which are then parsed."""


class _Handler(Protocol):
    """The attributes of grpc.RpcMethodHandler used here. Its type stubs only cover the synchronous
    server.
    """

    request_streaming: bool
    response_streaming: bool
    unary_unary: Unary
    unary_stream: Streaming
    stream_stream: Streaming
    response_serializer: Callable[[Message], bytes]


class Interceptor(Guard):
    """Wraps every handler, and counts calls in flight, so that a server can be drained.

    Args:
        authenticator: Identifies callers. Without one every caller is anonymous.
        internal: Names of services (`shoal.v1.WorkerService`) that keep serving while the server
            drains, because the requests in flight need them. Their calls are logged at DEBUG.
        limits: Request sizes in bytes for services (`shoal.v1.WorkerService`) and methods
            (`/shoal.v1.WorkerService/Connect`) that differ from MAX_REQUEST_BYTES.
        streams: The calls that a stream carries, by its method (`/package.Service/Multiplex`)
            and the field of MultiplexedCall.
    """

    def __init__(
        self,
        internal: Collection[str] = (),
        authenticator: Authenticator | None = None,
        limits: Mapping[str, int] = MappingProxyType({}),
        streams: Mapping[str, Mapping[str, StreamCall]] = MappingProxyType({}),
    ) -> None:
        super().__init__()
        self.authenticator = authenticator or Authenticator(Security())
        self.audit = Audit(_later)
        self.calls = Bound(MAX_CALLS, "calls")
        self._internal = frozenset(internal)
        self._limits = limits
        self._streams = streams
        self.arrivals = Arrivals()
        """The arrivals of methods with small requests."""
        self.in_flight = InFlight()

    def drain(self) -> None:
        """Refuse new calls with Draining. Internal services keep serving."""
        self.in_flight.drain()

    async def idle(self) -> None:
        """Wait until no calls are in flight except those of internal services."""
        await self.in_flight.none.wait()

    async def _wrap(self, method: str, handler: Any) -> Handler:
        if (calls := self._streams.get(method)) is not None:
            handler = Multiplexer(
                {kind: self._behaviour(method, call).unary for kind, call in calls.items()}
            )
        kind = request_type(method)
        if kind is None or (handler.request_streaming and not handler.response_streaming):
            raise TypeError(
                f"{method}: only declared methods with a single request, or with streams both "
                "ways, can be served"
            )
        behaviour = _Behaviour(self, method, kind, handler)
        if handler.response_streaming:
            return grpc.stream_stream_rpc_method_handler(
                behaviour.stream, None, handler.response_serializer
            )
        return grpc.stream_unary_rpc_method_handler(
            behaviour.unary, None, handler.response_serializer
        )

    def _behaviour(self, stream: str, call: StreamCall) -> _Behaviour:
        """Return the behaviour of a call that the stream carries."""
        handler: Any = grpc.unary_unary_rpc_method_handler(call.handle)
        path = f"/{_service_name(stream)}/{call.name}"
        return _Behaviour(self, path, call.request, handler)

    def is_internal(self, method: str) -> bool:
        return _service_name(method) in self._internal

    def limit(self, method: str) -> int:
        """Return the maximum bytes of a request."""
        return self._limits.get(method) or self._limits.get(
            _service_name(method), MAX_REQUEST_BYTES
        )


@dataclass(frozen=True, slots=True)
class _Admitted:
    """An authorised caller, and the tenant that it acts for."""

    caller: Identity
    tenant: str
    answer_bytes: int


class _Behaviour:
    """The handler of one method, wrapped: from request bytes to status."""

    def __init__(
        self, interceptor: Interceptor, method: str, kind: type[Message], handler: _Handler
    ) -> None:
        self._interceptor = interceptor
        self._method = method
        self._kind = kind
        self._handler = handler
        self._limit = interceptor.limit(method)
        # Internal calls are never refused because of load: requests in flight need them.
        self._bound = (
            Bound(sys.maxsize, "calls") if interceptor.is_internal(method) else interceptor.calls
        )
        self._is_internal = interceptor.is_internal(method)
        self._parse_in_thread_bytes = (
            PARSE_STREAMED_IN_THREAD_BYTES if handler.request_streaming else PARSE_IN_THREAD_BYTES
        )
        self._has_end = not handler.response_streaming or method in ANSWERS
        self._counts = self._has_end and not self._is_internal
        self._reporter = Reporter(
            interceptor.audit, method, is_internal=self._is_internal, has_end=self._has_end
        )

    async def unary(self, _: object, context: Context) -> Message | None:
        return await self._handle(context, self._handler.unary_unary)

    async def stream(self, _: object, context: Context) -> None:
        await self._handle(context, self._write_all)

    async def _write_all(self, request: Message | AsyncIterator[Message], context: Context) -> None:
        # Writes explicitly: a generator that gRPC iterates is left to the garbage collector when
        # the client disconnects.
        respond = (
            self._handler.stream_stream
            if self._handler.request_streaming
            else self._handler.unary_stream
        )
        async with aclosing(respond(request, context)) as responses:
            async for response in responses:
                await _write(context, response)

    async def _handle(
        self, context: Context, respond: Callable[[Any, Context], Awaitable[_Response]]
    ) -> _Response | None:
        """Authenticate and authorise the caller, read the request, respond, turn errors into a
        status, and report the call.

        One coroutine without further context managers: this is the hottest code of a router (`make
        bench-cost`).
        """
        record = CallRecord()
        try:
            metadata = cast(Metadata, context.invocation_metadata() or ())
            headers = first_values(metadata)
            record.caller = self._identify(metadata, headers, context)
            record.span = self._reporter.span(headers)
            with self._bound, traces.entered(record.span):
                admitted = self._admit(record.caller, headers)
                if self._handler.request_streaming or (
                    not self._is_internal and REQUEST_ID.get() != headers.get(REQUEST_ID_HEADER)
                ):
                    # Also as a header, for proxies and clients that only read those. Not for a
                    # caller that chose the ID itself: it takes a seventh of the CPU of an empty
                    # call. Clients and workers write to a stream only once it has headers.
                    await context.send_initial_metadata(((REQUEST_ID_HEADER, REQUEST_ID.get()),))
                if self._handler.request_streaming:
                    request: Message | AsyncIterator[Message] = self._read_all(admitted, context)
                else:
                    request = await self._read(admitted, context)
                record.span.set_attribute("shoal.model", MODEL.get())
                with self._interceptor.in_flight if self._counts else _UNCOUNTED:
                    response = await respond(request, context)
            record.outcome = "OK"
            return response
        except ShoalError as error:
            record.fail(error)
            if isinstance(error, InternalError):
                log.exception("call failed", extra=fields({"method": self._method}))
            await abort(context, error)
        except Exception:
            record.outcome = InternalError.reason
            log.exception("call failed", extra=fields({"method": self._method}))
            await abort(context, InternalError("unexpected error"))
        finally:
            self._reporter.report(record, context)
        return None  # Never reached: an abort raises.

    def _identify(
        self, metadata: Metadata, headers: Mapping[str, str], context: Context
    ) -> Identity:
        """Set the request ID, and authenticate the caller. Raises Unauthenticated."""
        claimed = headers.get(REQUEST_ID_HEADER)
        request_id = claimed if claimed is not None and is_printable(claimed) else new_request_id()
        REQUEST_ID.set(request_id)
        context.set_trailing_metadata(((REQUEST_ID_HEADER, request_id),))
        return self._interceptor.authenticator.identify(metadata, context.auth_context)

    def _admit(self, caller: Identity, headers: Mapping[str, str]) -> _Admitted:
        """Authorise the call and its tenant. Raises PermissionDenied, InvalidInput."""
        check_allowed(caller, self._method)
        tenant = caller.tenant_for(checked_id(headers.get(TENANT_HEADER, ""), "", TENANT_HEADER))
        claimed = headers.get(REQUEST_ID_HEADER, "")
        if claimed != REQUEST_ID.get():
            checked_id(claimed, "", REQUEST_ID_HEADER)
        return _Admitted(caller, tenant, parse_answer_bytes(headers.get(ANSWER_HEADER, "")))

    async def _read(self, admitted: _Admitted, context: Context) -> Message:
        """Read and parse the request. Raises InvalidInput; DeadlinePassed if it does not arrive in
        time; NoCapacity if it is much larger than expected.
        """
        if isinstance(rpc := cast(object, context), MultiplexedRpc):
            body: object = rpc.body
        elif self._limit <= SMALL_REQUEST_BYTES:
            body = await self._interceptor.arrivals.read(context, REQUEST_SECONDS)
        else:
            body = await _read_large(context)
        if not isinstance(body, bytes):  # end of the stream
            raise InvalidInput("the call has no request")
        enter_call(
            Call(
                self._method,
                REQUEST_ID.get(),
                admitted.tenant,
                body,
                admitted.caller,
                admitted.answer_bytes,
            )
        )
        request = await self._parsed(body)
        # Not validated yet: only a model ID may go into logs, spans and the audit, no other
        # caller's text.
        model = str(getattr(request, "model", ""))
        MODEL.set(model if is_model_id(model) else "")
        return request

    async def _read_all(self, admitted: _Admitted, context: Context) -> AsyncIterator[Message]:
        """Read and parse the messages of a request stream, without a time limit.

        Authenticates the caller again at the interval at which token files are polled. Raises
        InvalidInput, Unauthenticated, PermissionDenied.
        """
        enter_call(Call(self._method, REQUEST_ID.get(), admitted.tenant, b"", admitted.caller))
        metadata, checked_at = cast(Metadata, context.invocation_metadata() or ()), time.monotonic()
        while isinstance(body := cast(object, await context.read()), bytes):
            if time.monotonic() > checked_at + authentication.POLL_SECONDS:
                admitted = self._admit(
                    self._interceptor.authenticator.identify(metadata, context.auth_context),
                    first_values(metadata),
                )
                enter_call(
                    Call(self._method, REQUEST_ID.get(), admitted.tenant, b"", admitted.caller)
                )
                checked_at = time.monotonic()
            message = [await self._parsed(body)]
            del body
            yield message.pop()  # No reference is left while waiting for the next message.

    async def _parsed(self, body: bytes) -> Message:
        # Scanning a large request, or searching for its error, takes up to a tenth of a second, in
        # which the loop serves others.
        if len(body) > self._parse_in_thread_bytes:
            return await asyncio.to_thread(parse, self._kind, body, self._limit)
        return parse(self._kind, body, self._limit)


async def _read_large(context: Context) -> object:
    try:
        async with asyncio.timeout(REQUEST_SECONDS):
            return cast(object, await context.read())
    except TimeoutError:
        raise DeadlinePassed(f"the request did not arrive within {REQUEST_SECONDS:g} s") from None


async def _write(context: Context, response: Message) -> None:
    """Write a response at the client's flow-control rate. Raises CancelledError if the client is
    gone.
    """
    try:
        await context.write(response)
    except grpc.aio.InternalError:  # The client is gone; gRPC cancels the task a little later.
        raise asyncio.CancelledError from None


def _later(seconds: float, call: Callable[[], None]) -> None:
    # In an empty context instead of the current request's.
    asyncio.get_running_loop().call_later(seconds, call, context=Variables())


def _service_name(method: str) -> str:
    """Return `package.Service` of `/package.Service/Method`."""
    return method[1 : method.rfind("/")]
