"""An OTLP receiver over gRPC, as a collector is, that keeps the spans it receives."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as pb
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc
from opentelemetry.proto.common.v1.common_pb2 import KeyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span as Sent

Value = str | int | float | bool


@dataclass(frozen=True)
class Seen:
    """One span. Ids as hex; times in seconds, Unix."""

    name: str
    kind: str
    trace: str
    id: str
    parent: str
    links: frozenset[str]
    """Ids of spans."""
    attributes: Mapping[str, Value]
    resource: Mapping[str, Value]
    events: tuple[Mapping[str, Value], ...]
    is_error: bool
    began: float
    ended: float

    @property
    def service(self) -> Value:
        return self.resource["service.name"]

    @property
    def instance(self) -> Value:
        return self.resource["service.instance.id"]


class Receiver(trace_service_pb2_grpc.TraceServiceServicer):
    """Keeps `spans` in order of arrival, from any process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._spans: list[Seen] = []

    def Export(
        self, request: pb.ExportTraceServiceRequest, context: grpc.ServicerContext
    ) -> pb.ExportTraceServiceResponse:
        with self._lock:
            for group in request.resource_spans:
                resource = _values(group.resource.attributes)
                self._spans += [
                    _seen(span, resource) for scope in group.scope_spans for span in scope.spans
                ]
        return pb.ExportTraceServiceResponse()

    @property
    def spans(self) -> list[Seen]:
        with self._lock:
            return list(self._spans)

    def of_trace(self, trace: str) -> list[Seen]:
        return [span for span in self.spans if span.trace == trace]


@contextmanager
def receiving() -> Iterator[tuple[Receiver, str]]:
    """A receiver and its endpoint, as OTEL_EXPORTER_OTLP_ENDPOINT takes it."""
    receiver, server = Receiver(), grpc.server(ThreadPoolExecutor(4))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(receiver, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield receiver, f"http://127.0.0.1:{port}"
    finally:
        server.stop(None)


def _seen(span: Sent, resource: Mapping[str, Value]) -> Seen:
    return Seen(
        span.name,
        Sent.SpanKind.Name(span.kind).removeprefix("SPAN_KIND_"),
        span.trace_id.hex(),
        span.span_id.hex(),
        span.parent_span_id.hex(),
        frozenset(link.span_id.hex() for link in span.links),
        _values(span.attributes),
        resource,
        tuple({"name": event.name, **_values(event.attributes)} for event in span.events),
        span.status.code == 2,
        span.start_time_unix_nano / 1e9,
        span.end_time_unix_nano / 1e9,
    )


def _values(attributes: Iterable[KeyValue]) -> dict[str, Value]:
    found: dict[str, Value] = {}
    for one in attributes:
        kind = one.value.WhichOneof("value")
        if kind is not None:
            found[one.key] = getattr(one.value, kind)
    return found
