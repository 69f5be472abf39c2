"""Health and reflection (`/grpc.*`), which need no credential: bounds the resources of
unauthenticated callers.
"""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from typing import Any, Final, TypeAlias

import grpc
from google.protobuf.message import Message

from libs.errors import DeadlinePassed, InvalidInput, ShoalError
from libs.serving.calls.arrivals import Arrivals
from libs.serving.calls.bounds import Bound
from libs.serving.calls.decode import parse, request_type

REQUEST_BYTES: Final = 4096
"""Sufficient for the name of a service, file or symbol."""
MAX_STREAMS: Final = 1_000
"""Maximum streams of both services together."""

Refuse: TypeAlias = Callable[[Any, ShoalError], Awaitable[None]]
Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"


class Public:
    """Wraps the handlers of these services.

    Args:
        refuse: Ends a call (its gRPC context) with the status of an error.
    """

    def __init__(self, refuse: Refuse) -> None:
        self.refuse = refuse
        self.streams = Bound(MAX_STREAMS, "streams of health and reflection")
        self.arrivals = Arrivals()

    def wrap(self, method: str, handler: Handler) -> Handler:
        """Return a handler that serves the method with a request stream, because gRPC reads the
        message of a unary method before any limit is checked. Raises TypeError for a method that no
        service declares.
        """
        kind = request_type(method)
        if kind is None:
            raise TypeError(f"{method}: only declared methods can be served")
        behaviour = _Behaviour(self, kind, handler)
        if handler.response_streaming:
            return grpc.stream_stream_rpc_method_handler(
                behaviour.stream, None, handler.response_serializer
            )
        return grpc.stream_unary_rpc_method_handler(
            behaviour.unary, None, handler.response_serializer
        )


class _Behaviour:
    """The handler of one method, with the limits applied."""

    def __init__(self, public: Public, kind: type[Message], handler: Any) -> None:
        self._public = public
        self._kind = kind
        self._handler = handler

    async def unary(self, _: object, context: Any) -> Any:
        try:
            return await self._handler.unary_unary(await self._one(context), context)
        except ShoalError as error:
            await self._public.refuse(context, error)

    async def stream(self, _: object, context: Any) -> AsyncIterator[Any]:
        answer: Any = self._handler.stream_stream or self._handler.unary_stream
        try:
            with self._public.streams:
                request = (
                    self._many(context)
                    if self._handler.request_streaming
                    else await self._one(context)
                )
                if inspect.isasyncgenfunction(answer):
                    async for response in answer(request, context):
                        yield response
                else:  # the handler writes by itself
                    await answer(request, context)
        except ShoalError as error:
            await self._public.refuse(context, error)

    async def _one(self, context: Any) -> Message:
        """Read the only request. Raises InvalidInput, and the errors of `Arrivals.read`."""
        body = await self._public.arrivals.read(context)
        if not isinstance(body, bytes):  # the client closed the stream without a message
            raise InvalidInput("the call has no request")
        return self._parsed(body)

    async def _many(self, context: Any) -> AsyncIterator[Message]:
        """Read the requests of a stream, which ends if the next one does not arrive in time. Raises
        InvalidInput, NoCapacity.
        """
        with suppress(DeadlinePassed):
            while isinstance(body := await self._public.arrivals.read(context), bytes):
                yield self._parsed(body)

    def _parsed(self, body: bytes) -> Message:
        if len(body) > REQUEST_BYTES:
            raise InvalidInput(
                f"the request has {len(body):,} bytes; at most {REQUEST_BYTES:,} are allowed"
            )
        return parse(self._kind, body)
