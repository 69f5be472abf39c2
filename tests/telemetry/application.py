"""`python -m tests.telemetry.application ADDRESSES MODEL TEXTS`: an application with traces of its
own that asks a mesh once.

Prints the id of its trace, and the reason if the call failed.
"""

from __future__ import annotations

import sys

from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from shoal import Client, ShoalError

from tests.support.texts import texts


def main() -> None:
    addresses, model, count = sys.argv[1:]
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(OTLPSpanExporter()))
    trace.set_tracer_provider(provider)
    with (
        trace.get_tracer("application").start_as_current_span("search") as span,
        Client(addresses, timeout=120.0) as client,
    ):
        print(f"{span.get_span_context().trace_id:032x}")
        try:
            client.encode(model, texts(int(count), 60, 80, seed=5))
        except ShoalError as error:
            print(error.reason)
    provider.shutdown()


if __name__ == "__main__":
    main()
