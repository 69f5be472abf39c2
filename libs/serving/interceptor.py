"""The first and the last to touch a call: parses the request, names the call, maps errors to one status, logs one line.

This is the one place where errors become gRPC statuses. Health and reflection (`/grpc.*`) pass untouched.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from contextlib import asynccontextmanager
from typing import Final, Protocol, TypeAlias, TypeVar, cast

import grpc
from google.protobuf.message import Message

from libs.errors import Draining, InternalError, ShoalError
from libs.serving.call import (
    DEFAULT_TENANT,
    REQUEST_ID_HEADER,
    TENANT_HEADER,
    Call,
    checked_id,
    enter_call,
    header,
    new_request_id,
)
from libs.serving.decode import MAX_REQUEST_BYTES, TRANSPORT_LIMIT_BYTES, parse, request_type
from libs.serving.status import DETAILS_HEADER, to_status
from libs.telemetry.logs import MODEL, REQUEST_ID, fields

log = logging.getLogger(__name__)

Context: TypeAlias = grpc.aio.ServicerContext[Message, Message]
Unary: TypeAlias = Callable[[Message, Context], Awaitable[Message]]
Streaming: TypeAlias = Callable[[Message, Context], AsyncIterator[Message]]

_Request = TypeVar("_Request")
_Response = TypeVar("_Response")

_FOREIGN: Final = "/grpc."


class _Handler(Protocol):
    """What of grpc.RpcMethodHandler is read here; its own types know only the synchronous server."""

    request_streaming: bool
    response_streaming: bool
    unary_unary: Unary
    unary_stream: Streaming
    response_serializer: Callable[[Message], bytes]


class Interceptor(grpc.aio.ServerInterceptor):
    """Wraps every handler of ours. Also knows what is in flight, so that a server can be drained.

    internal: names of services (`shoal.v1.WorkerService`) that keep answering while the server drains, because the requests in
    flight need them; their calls are logged at DEBUG.
    """

    def __init__(self, internal: Collection[str] = ()) -> None:
        self._internal = frozenset(internal)
        self._wrapped: dict[str, grpc.RpcMethodHandler[Message, Message]] = {}
        # The state: calls of services that are not internal, and whether new ones are refused.
        self._in_flight = 0
        self._is_draining = False
        self._is_idle = asyncio.Event()
        self._is_idle.set()

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[_Request, _Response] | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[_Request, _Response] | None:
        handler = await continuation(handler_call_details)
        method = handler_call_details.method
        if handler is None or method.startswith(_FOREIGN):
            return handler
        if method not in self._wrapped:
            self._wrapped[method] = self._wrap(method, cast(_Handler, handler))
        return cast("grpc.RpcMethodHandler[_Request, _Response]", self._wrapped[method])

    def drain(self) -> None:
        """From now on new calls are refused with Draining; internal services still answer."""
        self._is_draining = True

    async def idle(self) -> None:
        """Returns when no call is in flight but those of internal services."""
        await self._is_idle.wait()

    def _wrap(self, method: str, handler: _Handler) -> grpc.RpcMethodHandler[Message, Message]:
        kind = request_type(method)
        if kind is None or handler.request_streaming:
            raise TypeError(f"{method}: only declared methods with a single request can be served")
        behaviour = _Behaviour(self, method, kind, handler)
        if handler.response_streaming:
            return grpc.unary_stream_rpc_method_handler(behaviour.stream, None, handler.response_serializer)
        return grpc.unary_unary_rpc_method_handler(behaviour.unary, None, handler.response_serializer)

    @asynccontextmanager
    async def admitted(self, method: str) -> AsyncIterator[None]:
        """One call in flight. Raises Draining."""
        if self.is_internal(method):
            yield
            return
        if self._is_draining:
            raise Draining("this server is stopping; another one answers")
        self._in_flight += 1
        self._is_idle.clear()
        try:
            yield
        finally:
            self._in_flight -= 1
            if not self._in_flight:
                self._is_idle.set()

    def is_internal(self, method: str) -> bool:
        return method[1 : method.rfind("/")] in self._internal


class _Behaviour:
    """One method's handler between bytes and status."""

    def __init__(self, interceptor: Interceptor, method: str, kind: type[Message], handler: _Handler) -> None:
        self._interceptor = interceptor
        self._method = method
        self._kind = kind
        self._handler = handler
        self._limit = TRANSPORT_LIMIT_BYTES if interceptor.is_internal(method) else MAX_REQUEST_BYTES
        self._level = logging.DEBUG if interceptor.is_internal(method) else logging.INFO

    async def unary(self, body: bytes, context: Context) -> Message:
        async with self._answering(context):
            request = self._enter(body, context)
            async with self._interceptor.admitted(self._method):
                return await self._handler.unary_unary(request, context)

    async def stream(self, body: bytes, context: Context) -> AsyncIterator[Message]:
        # A stream has no end of its own: it does not hold up a drain, and is cut when the server stops.
        async with self._answering(context):
            request = self._enter(body, context)
            async for response in self._handler.unary_stream(request, context):
                yield response

    def _enter(self, body: bytes, context: Context) -> Message:
        metadata = context.invocation_metadata() or ()
        request_id = checked_id(header(metadata, REQUEST_ID_HEADER), REQUEST_ID.get(), REQUEST_ID_HEADER)
        REQUEST_ID.set(request_id)
        context.set_trailing_metadata(((REQUEST_ID_HEADER, request_id),))
        tenant = checked_id(header(metadata, TENANT_HEADER), DEFAULT_TENANT, TENANT_HEADER)
        enter_call(Call(self._method, request_id, tenant, body))
        request = parse(self._kind, body, self._limit)
        MODEL.set(str(getattr(request, "model", ""))[:256])
        return request

    @asynccontextmanager
    async def _answering(self, context: Context) -> AsyncIterator[None]:
        """Turns what is raised inside into a status, and logs the call."""
        REQUEST_ID.set(new_request_id())
        begin = time.perf_counter()
        outcome = "CANCELLED"
        try:
            yield
            outcome = "OK"
        except ShoalError as error:
            outcome = error.reason
            if isinstance(error, InternalError):
                log.exception("call failed", extra=fields({"method": self._method}))
            await _abort(context, error)
        except Exception:
            outcome = InternalError.reason
            log.exception("call failed", extra=fields({"method": self._method}))
            await _abort(context, InternalError("unexpected error"))
        finally:
            # Once the answer is on its way: writing a line takes a tenth of a millisecond.
            asyncio.get_running_loop().call_soon(self._log, outcome, time.perf_counter() - begin)

    def _log(self, outcome: str, seconds: float) -> None:
        if log.isEnabledFor(self._level):
            log.log(self._level, "call", extra=fields({"method": self._method, "outcome": outcome, "seconds": round(seconds, 6)}))


async def _abort(context: Context, error: ShoalError) -> None:
    status = to_status(error, REQUEST_ID.get())
    trailing = ((REQUEST_ID_HEADER, REQUEST_ID.get()), (DETAILS_HEADER, status.details))
    await context.abort(status.code, status.message, trailing)
