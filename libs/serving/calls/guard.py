"""The guard of every gRPC server: no request is read before its handler, or the guard, asks for it.

gRPC buffers the whole request of a single-request method before it calls the handler or checks the
length. So every method is served with a request stream. A server made by
`libs.serving.server.guarded_server` has no other methods.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Final, TypeAlias, cast

import grpc

from libs.errors import ShoalError
from libs.serving.calls.call import REQUEST_ID_HEADER
from libs.serving.calls.public import Public
from libs.serving.calls.status import DETAILS_HEADER, to_status
from libs.telemetry.logs import REQUEST_ID

GRPC_SERVICES: Final = "/grpc."
"""Health and reflection, which need no credential."""

Find: TypeAlias = Callable[[Any], Awaitable[Any]]
"""Returns the handler of a grpc.HandlerCallDetails, None for an unknown method."""
Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"


class Guard(grpc.aio.ServerInterceptor):
    """Bounds health and reflection, and refuses methods with requests that gRPC would buffer.

    A subclass wraps the other methods. Here their handlers must take a request stream and read it
    through `Arrivals`.
    """

    def __init__(self) -> None:
        self._public = Public(abort)
        # Mutable state: wrapped handlers by method.
        self._wrapped: dict[str, Handler] = {}

    async def intercept_service(
        self, continuation: Find, handler_call_details: grpc.HandlerCallDetails
    ) -> Any:
        """Return the guarded handler. Raises TypeError for one that takes a single request."""
        method = handler_call_details.method
        wrapped = self._wrapped.get(method)
        if wrapped is None:
            handler = await continuation(handler_call_details)
            if handler is None:
                return None
            if method.startswith(GRPC_SERVICES):
                wrapped = self._public.wrap(method, handler)
            else:
                wrapped = await self._wrap(method, handler)
            if not cast(Any, wrapped).request_streaming:
                raise TypeError(
                    f"{method}: gRPC would buffer its request; serve it with a request stream"
                )
            self._wrapped[method] = wrapped
        return wrapped

    async def _wrap(self, method: str, handler: Handler) -> Handler:
        """Return the handler that serves the method in place of `handler`."""
        return handler


async def abort(context: Any, error: ShoalError) -> None:
    """End the call with the error's status."""
    status = to_status(error, REQUEST_ID.get())
    trailing = ((REQUEST_ID_HEADER, REQUEST_ID.get()), (DETAILS_HEADER, status.details))
    await context.abort(status.code, status.message, trailing)
