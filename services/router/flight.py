"""Memory accounting of requests in flight in this process, and the limit beyond which new ones are
refused.

A request counts from when its handler begins until its answer has been sent, not until it is ready:
a client that does not read holds its answer here, until it reads or its connection ends (a peer
that is gone or frozen by the server's keepalive, after 40 s).
"""

from __future__ import annotations

from collections import Counter
from typing import Any, Final, TypeAlias

import grpc

from libs.errors import QueueFull

COPIES: Final = 5
"""Copies of a request or an answer in memory at once: as bytes, parsed, in jobs, and on its way in
or out. Measured: 4.0 to 5.2, and 4.6 where jobs repeat a long query as often as they may."""
STREAMED_COPIES: Final = 3
"""Copies of a job's answer that is streamed: parsed; its numbers as bytes while it is sent, and a
message on its way out.
"""
PART_BYTES: Final = 256
"""Memory that each item takes beside its bytes: its message, price and size. Measured: 210."""
MIN_BYTES: Final = 16 * 1024
"""Memory that an empty request takes: its asyncio task, its call, its places in the maps."""
TENANT_SHARE: Final = 0.5
"""Of the limit: one tenant alone must not keep all others out."""


Rpc: TypeAlias = grpc.aio.ServicerContext[Any, Any]


class InFlightMemory:
    """All requests in flight of this router. `held_bytes` is what they take now."""

    def __init__(self, *, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        # The state: sums of all that is held.
        self.held_bytes = 0
        self._by_tenant: Counter[str] = Counter()

    def enter(self, size: int, tenant: str, rpc: Rpc, parts: int = 0) -> Held:
        """Admits a request of `size` bytes with so many items. Raises QueueFull, but never while no
        other is in flight.
        """
        cost = COPIES * size + PART_BYTES * parts + MIN_BYTES
        own = self._by_tenant.get(tenant, 0)
        if self.held_bytes and self.held_bytes + cost > self._limit_bytes:
            message = f"requests in flight at this router hold {self.held_bytes:,} bytes; at most {self._limit_bytes:,} are allowed"
            raise QueueFull(message)
        if own and own + cost > self._limit_bytes * TENANT_SHARE:
            message = f"requests in flight of this tenant hold {own:,} bytes, and all may take {self._limit_bytes:,} of this router"
            raise QueueFull(message)
        held = Held(self, tenant)
        held.take(cost)
        rpc.add_done_callback(held.release)  # type: ignore[arg-type]  # the stubs ask for a class of theirs
        return held

    def count(self, tenant: str, size: int) -> None:
        self.held_bytes += size
        self._by_tenant[tenant] += size
        if not self._by_tenant[tenant]:
            del self._by_tenant[tenant]


class Held:
    """The memory that one request holds."""

    def __init__(self, flight: InFlightMemory, tenant: str) -> None:
        self._flight = flight
        self._tenant = tenant
        # The state: what it holds, 0 once the call has ended.
        self._bytes = 0
        self._has_ended = False

    def take(self, size: int) -> None:
        if not self._has_ended:
            self._bytes += size
            self._flight.count(self._tenant, size)

    def answered(self, size: int) -> None:
        """The answer to one of its jobs has come."""
        self.take(COPIES * size)

    def kept(self, size: int) -> None:
        """The answer to one of its jobs has come, to be streamed by itself."""
        self.take(STREAMED_COPIES * size)

    def sent(self, size: int) -> None:
        """That answer has been written, and is no longer in memory."""
        self.take(-STREAMED_COPIES * size)

    def sending(self, size: int) -> None:
        """All that is left is the answer of `size` bytes, on its way out."""
        self.take(MIN_BYTES + size - self._bytes)

    def release(self, context: Rpc) -> None:
        """The call has ended."""
        self.take(-self._bytes)
        self._has_ended = True
