"""Traces over OpenTelemetry, where the standard variables ask for them; else no span is recorded or
sent.

One request is one trace (semantic conventions for RPC and messaging):

    client           shoal.v1.InferenceService/Encode   CLIENT    libs/api/shoal/calls/traces.py; over HTTP, of an edge:
                     POST /v1/embeddings                SERVER    services/edge/asgi.py
    └ router         shoal.v1.InferenceService/Encode   SERVER    libs/serving/calls/interceptor.py
      └ router       send <lane>                        PRODUCER  services/router/service.py; its context is in every job
        ├ worker     wait <lane>                        INTERNAL  from enqueued to pulled   services/worker/jobs/spans.py
        └ worker     process <lane>                     CONSUMER  from pulled to answered
          ├ worker   prepare                            INTERNAL
          ├ worker   forward                            INTERNAL  one for a batch: with its first job, linked with all of them
          ├ worker   finish                             INTERNAL
          └ router   shoal.v1.WorkerService/Complete    SERVER    whichever router takes the answer

A batch of requests (services/edge/batches/runner.py) is a trace, and each of its requests another:

    edge             run batch                          INTERNAL  for each edge that runs it; linked with the request that created it
    └ edge           run chunk                          INTERNAL  linked both ways with the SERVER spans of its requests

Variables: OTEL_EXPORTER_OTLP_ENDPOINT (or ..._TRACES_ENDPOINT) turns traces on; further
OTEL_EXPORTER_OTLP_*, OTEL_TRACES_SAMPLER and its argument, OTEL_BSP_*, OTEL_SERVICE_NAME,
OTEL_RESOURCE_ATTRIBUTES, OTEL_SDK_DISABLED, OTEL_TRACES_EXPORTER (none) as the SDK reads them. A
thread of the SDK exports spans, and drops them if the collector is unavailable: a request never
waits for its trace.
"""  # noqa: E501

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Final

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import INVALID_SPAN, Link, Span, SpanKind, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from opentelemetry.util.types import AttributeValue
from shoal.version import VERSION

from libs.errors import InvalidInput, ShoalError

TRACEPARENT: Final = "traceparent"
TRACESTATE: Final = "tracestate"
NONE: Final[Span] = INVALID_SPAN
"""The span of whatever is not traced."""
_UNTRACED: Final = nullcontext(NONE)

EXPORT_SECONDS: Final = 2.0

_PROTOCOLS: Final = ("", "grpc")
_PROPAGATOR: Final = TraceContextTextMapPropagator()
_TRACER: Final = trace.get_tracer("shoal", VERSION)
Attributes = Mapping[str, AttributeValue]

_exporting = False
"""Whether `start` has started to export spans. Else none need be made of calls that no caller
traces.
"""


def start(service: str, instance: str, environ: Mapping[str, str]) -> bool:
    """Start to export this process' spans as the environment configures it. False: it does not.
    Raises InvalidInput.
    """
    if not is_wanted(environ):
        return False
    # Imported only here: a mesh without traces does not pay for the SDK's import.
    from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import OTELResourceDetector, Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    # OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES, if set, override ours.
    resource = {
        "service.namespace": "shoal",
        "service.name": f"shoal-{service}",
        "service.instance.id": instance,
        "service.version": VERSION,
        **OTELResourceDetector().detect().attributes,
    }
    provider = TracerProvider(resource=Resource.create(resource), shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    trace.set_tracer_provider(provider)
    global _exporting  # noqa: PLW0603
    _exporting = True
    return True


def is_wanted(environ: Mapping[str, str]) -> bool:
    """Return True if the environment enables traces. Raises InvalidInput for an unsupported
    protocol.
    """
    if (
        environ.get("OTEL_SDK_DISABLED", "").lower() == "true"
        or environ.get("OTEL_TRACES_EXPORTER") == "none"
    ):
        return False
    if not (
        environ.get("OTEL_EXPORTER_OTLP_ENDPOINT")
        or environ.get("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
    ):
        return False
    name = (
        "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL"
        if environ.get("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL")
        else "OTEL_EXPORTER_OTLP_PROTOCOL"
    )
    if environ.get(name, "") not in _PROTOCOLS:
        raise InvalidInput(f"{name} must be grpc, not {environ[name]!r}", field=name)
    return True


def stop() -> None:
    """Export the remaining spans. Blocks for at most EXPORT_SECONDS, so that no process waits for
    an unavailable collector.
    """
    shutdown = getattr(trace.get_tracer_provider(), "shutdown", None)
    if shutdown is not None:
        last = threading.Thread(target=shutdown, name="last spans", daemon=True)
        last.start()
        last.join(EXPORT_SECONDS)


def parse_traceparent(traceparent: str) -> Context | None:
    """Return the trace context of a header; None if it has none, or one that is not sampled: then
    no spans are made.
    """
    if not traceparent:
        return None
    context = _PROPAGATOR.extract({TRACEPARENT: traceparent})
    found = trace.get_current_span(context).get_span_context()
    return context if found.is_valid and found.trace_flags.sampled else None


def format_traceparent(span: Span) -> str:
    """Return the `traceparent` header for a span; empty for one that is not sampled."""
    if span is NONE:
        return ""
    context = span.get_span_context()
    if not (context.is_valid and context.trace_flags.sampled):
        return ""
    return f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"


def exemplar(span: Span) -> dict[str, str] | None:
    """Return the span, as a histogram's exemplar; None if it is not sampled."""
    context = span.get_span_context()
    if not (context.is_valid and context.trace_flags.sampled):
        return None
    return {"trace_id": f"{context.trace_id:032x}", "span_id": f"{context.span_id:016x}"}


def rpc(method: str, parent: Mapping[str, str], attributes: Attributes) -> Span:
    """Return the SERVER span of one call; `parent`: the call's metadata. NONE if neither this
    process nor the caller traces. The caller of this function ends it.
    """
    if not _exporting and not parent.get(TRACEPARENT):
        return NONE
    service, _, name = method.lstrip("/").partition("/")
    known: dict[str, AttributeValue] = {
        "rpc.system": "grpc",
        "rpc.service": service,
        "rpc.method": name,
    }
    context = _PROPAGATOR.extract(parent)
    return _TRACER.start_span(
        f"{service}/{name}", context, SpanKind.SERVER, known | dict(attributes)
    )


def http(method: str, route: str, parent: Mapping[str, str], chunk: Span = NONE) -> Span:
    """Return the SERVER span of one HTTP request. NONE if neither this process nor the caller
    traces. The caller of this function ends it.

    Args:
        parent: The headers.
        chunk: The span of the chunk of a batch that has the request.
    """
    if not _exporting and not parent.get(TRACEPARENT):
        return NONE
    attributes = {"http.request.method": method, "http.route": route}
    context = _PROPAGATOR.extract(parent)
    links = [Link(chunk.get_span_context())] if format_traceparent(chunk) else []
    span = _TRACER.start_span(f"{method} {route}", context, SpanKind.SERVER, attributes, links)
    if links and format_traceparent(span):
        chunk.add_link(span.get_span_context())
    return span


def entered(span: Span) -> AbstractContextManager[object]:
    """Make the span the current one, without ending it or recording errors: `failed` does the
    latter.
    """
    if span is NONE:
        return _UNTRACED
    return trace.use_span(
        span, end_on_exit=False, record_exception=False, set_status_on_exception=False
    )


@contextmanager
def background(
    name: str, attributes: Attributes, *, cause: str = "", is_root: bool = False
) -> Iterator[Span]:
    """Make an INTERNAL span for work that no call waits for the current one; NONE if this process
    does not trace.

    Args:
        cause: The `traceparent` of the request that caused the work, to which the span is linked.
        is_root: Whether the span begins a trace. Otherwise it is a child of the current span.
    """
    if not _exporting:
        yield NONE
        return
    caused_by = parse_traceparent(cause)
    links = () if caused_by is None else (trace.get_current_span(caused_by),)
    span = begin(name, Context() if is_root else current(), attributes=attributes, links=links)
    try:
        with entered(span):
            yield span
    except Exception as error:
        # The message may quote a location.
        span.set_attribute("error.type", type(error).__name__)
        span.set_status(Status(StatusCode.ERROR, type(error).__name__))
        raise
    finally:
        span.end()


def current() -> Span:
    """Return the current span; NONE if there is none."""
    return trace.get_current_span()


def sending(lane: str) -> AbstractContextManager[Span]:
    """Make a PRODUCER span for a request's jobs, a child of the current span, the current one;
    NONE if that is not sampled.
    """
    return _sending(lane) if format_traceparent(trace.get_current_span()) else _UNTRACED


@contextmanager
def _sending(lane: str) -> Iterator[Span]:
    known = messaging(lane, "send")
    span = _TRACER.start_span(f"send {lane}", kind=SpanKind.PRODUCER, attributes=known)
    try:
        with entered(span):
            yield span
    except ShoalError as error:
        failed(span, error)
        raise
    finally:
        span.end()


def begin(
    name: str,
    parent: Context | Span,
    *,
    kind: SpanKind = SpanKind.INTERNAL,
    attributes: Attributes | None = None,
    links: Iterable[Span] = (),
    start_ns: int | None = None,
) -> Span:
    """Return a span that began at `start_ns` (Unix nanoseconds; None: now). The caller ends it."""
    context = trace.set_span_in_context(parent) if isinstance(parent, Span) else parent
    linked = [Link(one.get_span_context()) for one in links]
    return _TRACER.start_span(name, context, kind, attributes, linked, start_ns)


def failed(span: Span, error: ShoalError) -> None:
    """Record the error that ends a span, by its reason only: messages may quote input."""
    span.set_attribute("error.type", error.reason)
    span.set_status(Status(StatusCode.ERROR, error.reason))


def lane_name(pool: str, model: str, adapter: str) -> str:
    """Return the name of a lane in spans."""
    return f"{pool}/{model}+{adapter}" if adapter else f"{pool}/{model}"


def messaging(lane: str, operation: str) -> dict[str, AttributeValue]:
    """Messaging attributes of an operation on a lane, with Redis as the broker."""
    return {
        "messaging.system": "redis",
        "messaging.destination.name": lane,
        "messaging.operation.name": operation,
        "messaging.operation.type": operation,
    }
