"""The trace span of a call, if OpenTelemetry is installed (`pip install "shoal[otel]"`); else
nothing is done.

One CLIENT span covers a request with all its tries: each failed try is an event of it, and the
spans of all routers that were asked are its children. The application's own tracer provider and
sampler decide whether it is recorded.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from shoal.errors import ShoalError
from shoal.transport.wire import Metadata
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
    """The span of one request; empty without OpenTelemetry."""

    def __init__(self, span: Span | None, metadata: Metadata) -> None:
        self._span = span
        self.metadata = metadata
        """The headers that pass the trace context to the router."""

    def try_failed(self, error: ShoalError, address: str) -> None:
        """Record one failed try, at one router."""
        if self._span is not None:
            self._span.add_event(
                "try failed", {"error.type": error.reason, "server.address": address}
            )

    def call_failed(self, error: ShoalError) -> None:
        """Record the error of the last try."""
        if self._span is not None:
            self._span.set_attribute("error.type", error.reason)
            self._span.set_status(Status(StatusCode.ERROR, error.reason))


@contextmanager
def call_span(path: str, request_id: str) -> Iterator[CallSpan]:
    """Open a span of a call of `path` (/package.Service/Method), a child of the current span."""
    if not HAS_OPENTELEMETRY:
        yield CallSpan(None, ())
        return
    service, _, name = path.lstrip("/").partition("/")
    attributes = {
        "rpc.system": "grpc",
        "rpc.service": service,
        "rpc.method": name,
        "shoal.request_id": request_id,
    }
    span = trace.get_tracer("shoal", VERSION).start_span(
        f"{service}/{name}", kind=SpanKind.CLIENT, attributes=attributes
    )
    headers: dict[str, str] = {}
    TraceContextTextMapPropagator().inject(headers, trace.set_span_in_context(span))
    call = CallSpan(span, tuple(headers.items()))
    try:
        yield call
    except ShoalError as error:
        call.call_failed(error)
        raise
    finally:
        span.end()
