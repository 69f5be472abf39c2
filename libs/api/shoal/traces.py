"""The span of a call, where the application uses OpenTelemetry (`pip install "shoal[otel]"`); else nothing is made.

One CLIENT span for a call with all its tries: each try that failed is an event in it, and every router that was asked is under it.
The application's own tracer provider and sampler decide what becomes of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from shoal.errors import ShoalError
from shoal.transport import Metadata
from shoal.version import VERSION

if TYPE_CHECKING:
    from opentelemetry.trace import Span

try:
    from opentelemetry import trace
    from opentelemetry.trace import SpanKind, Status, StatusCode
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    HAS_OPENTELEMETRY = True
except ImportError:
    HAS_OPENTELEMETRY = False


class CallSpan:
    """One call's. Without OpenTelemetry it carries nothing."""

    def __init__(self, span: Span | None, metadata: Metadata) -> None:
        self._span = span
        self.metadata = metadata
        """What tells the router of it."""

    def failed(self, error: ShoalError, address: str) -> None:
        """One try, at one router."""
        if self._span is not None:
            self._span.add_event("try failed", {"error.type": error.reason, "server.address": address})

    def ended(self, error: ShoalError) -> None:
        """By this error, after the last try."""
        if self._span is not None:
            self._span.set_attribute("error.type", error.reason)
            self._span.set_status(Status(StatusCode.ERROR, error.reason))


@contextmanager
def calling(path: str, request_id: str) -> Iterator[CallSpan]:
    """`path`: of the method, /package.Service/Method. The span is a child of the application's current one."""
    if not HAS_OPENTELEMETRY:
        yield CallSpan(None, ())
        return
    service, _, name = path.lstrip("/").partition("/")
    attributes = {"rpc.system": "grpc", "rpc.service": service, "rpc.method": name, "shoal.request_id": request_id}
    span = trace.get_tracer("shoal", VERSION).start_span(f"{service}/{name}", kind=SpanKind.CLIENT, attributes=attributes)
    headers: dict[str, str] = {}
    TraceContextTextMapPropagator().inject(headers, trace.set_span_in_context(span))
    call = CallSpan(span, tuple(headers.items()))
    try:
        yield call
    except ShoalError as error:
        call.ended(error)
        raise
    finally:
        span.end()
