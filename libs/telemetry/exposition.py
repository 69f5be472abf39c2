"""`/metrics` for Prometheus: the series of `metrics.py` over plain HTTP, as text or OpenMetrics
(with exemplars) by negotiation.

Every scrape reads memory in a separate thread, so that neither it nor the event loop waits for the
other.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from itertools import chain

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import Metric

from libs.errors import InvalidInput, NoCapacity
from libs.telemetry.metrics import REGISTRY, ReadCollector


@asynccontextmanager
async def serving_metrics(
    address: str, read: Callable[[], Iterable[Metric]], *, with_own: bool = True
) -> AsyncIterator[str]:
    """Serve `http://address/metrics` until the context ends: the series that `read` returns and, if
    `with_own`, this process's.

    Yields the address with the port that was bound (port 0: any). For an empty address nothing is
    served, and "" is yielded. Raises InvalidInput for an address that is not host:port, NoCapacity
    if it is taken.
    """
    if not address:
        yield ""
        return
    host, port = parse_address(address)
    registry = CollectorRegistry(auto_describe=False)
    registry.register(ReadCollector(lambda: chain(REGISTRY.collect() if with_own else (), read())))
    try:
        server, thread = start_http_server(port, host, registry)
    except OSError as error:
        raise NoCapacity(
            f"cannot listen on {address} for metrics: is another process there?"
        ) from error
    try:
        yield f"{host}:{server.server_port}"
    finally:
        await asyncio.to_thread(server.shutdown)
        server.server_close()
        await asyncio.to_thread(thread.join)


def parse_address(address: str) -> tuple[str, int]:
    """Split `host:port`. Raises InvalidInput if the address has another form."""
    host, _, port = address.rpartition(":")
    number = int(port) if port.isascii() and port.isdigit() else math.inf
    if not host or not 0 <= number <= 65_535:
        raise InvalidInput(
            f"{address!r} is not of the form host:port", field="SHOAL_METRICS_ADDRESS"
        )
    return host.strip("[]"), int(number)
