"""How many calls a server answers at a time.

gRPC has such a limit, `maximum_concurrent_rpcs`, but it counts wrongly (1.75): each call that it refuses raises the limit by one,
and the first call after a full moment is refused though nothing is under way. It counts health checks, too.
"""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import grpc

from libs.errors import NoCapacity

MOST_CALLS: Final = 20_000
"""Far above what a router admits, so that its own refusals, which know what they refuse, come first."""
MOST_WATCHES: Final = 1_000
"""Streams of health and reflection, which need no credential."""


class Bound:
    """A number of things at a time."""

    def __init__(self, most: int, what: str) -> None:
        self._most = most
        self._what = what
        # The state: how many there are.
        self._count = 0

    @contextmanager
    def entered(self) -> Iterator[None]:
        """One of them. Raises NoCapacity."""
        if self._count >= self._most:
            raise NoCapacity(f"this server has {self._most:,} {self._what} at a time and takes no more; another one may")
        self._count += 1
        try:
            yield
        finally:
            self._count -= 1


def bounded(
    handler: grpc.RpcMethodHandler[Any, Any], bound: Bound, refuse: Callable[[Any, NoCapacity], Awaitable[None]]
) -> grpc.RpcMethodHandler[Any, Any]:
    """A handler of gRPC's own services whose streams count; one that answers at once stays as it is. `refuse` aborts a call."""
    if not handler.response_streaming:
        return handler
    answer: Any = handler.stream_stream if handler.request_streaming else handler.unary_stream

    async def counted(request: Any, context: Any) -> AsyncIterator[Any]:
        try:
            with bound.entered():
                if inspect.isasyncgenfunction(answer):
                    async for response in answer(request, context):
                        yield response
                else:  # writes by itself
                    await answer(request, context)
        except NoCapacity as error:
            await refuse(context, error)

    make: Any = grpc.stream_stream_rpc_method_handler if handler.request_streaming else grpc.unary_stream_rpc_method_handler
    made: grpc.RpcMethodHandler[Any, Any] = make(counted, handler.request_deserializer, handler.response_serializer)
    return made
