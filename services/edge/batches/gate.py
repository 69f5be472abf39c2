"""Limits the requests of batches in flight."""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

from shoal.bulk.flow import FlowControl

MAX_FLOWS: Final = 10_000
"""The maximum number of tenants and models with an adapted limit; idle ones are forgotten."""
REFUSED: Final = (429, 503)
"""The statuses of requests that were refused because of an overload."""
Sender = tuple[str, str]
"""A tenant's key and a model."""


class Gate:
    """Limits the requests of all batches in flight.

    1. All together have a maximum.
    2. Those of a tenant to a model have a limit that adapts to refusals, so that neither another
       tenant's limits nor another model's overload slows them down.
    3. If several may send, the tenant with the fewest requests in flight does.
    """

    def __init__(self, maximum: int) -> None:
        self._maximum = maximum
        # The state: the flow of each sender, oldest first, the numbers of requests in flight, also
        # of senders and of tenants, and those that wait.
        self._flows: dict[Sender, FlowControl] = {}
        self._total = 0
        self._running: Counter[Sender] = Counter()
        self._tenants: Counter[str] = Counter()
        self._waiting: dict[Sender, deque[asyncio.Future[None]]] = {}

    @property
    def in_flight(self) -> int:
        """The number of requests that were sent and are not answered."""
        return self._total

    def limit(self, sender: Sender) -> int:
        """Return how many requests a sender may have in flight."""
        return self._flow(sender).limit

    @asynccontextmanager
    async def enter(self, sender: Sender) -> AsyncIterator[None]:
        """Wait until a request may be sent."""
        if sender in self._waiting or not self._may_send(sender):
            waiter = asyncio.get_running_loop().create_future()
            self._waiting.setdefault(sender, deque()).append(waiter)
            try:
                await waiter
            except asyncio.CancelledError:
                if waiter.done() and not waiter.cancelled():
                    self._leave(sender)
                raise
        else:
            self._start(sender)
        try:
            yield
        finally:
            self._leave(sender)

    def report(self, sender: Sender, status: int, sent_at: float, now: float) -> None:
        """Adapt the limit to the status of a request that was sent at `sent_at`."""
        if status in (*REFUSED, 504):
            self._flow(sender).overloaded(sent_at, now)
        elif status < 500:
            self._flow(sender).succeeded()

    def _may_send(self, sender: Sender) -> bool:
        is_free = self._total < self._maximum
        return is_free and self._running[sender] < self.limit(sender)

    def _start(self, sender: Sender) -> None:
        self._total += 1
        self._running[sender] += 1
        self._tenants[sender[0]] += 1

    def _leave(self, sender: Sender) -> None:
        self._total -= 1
        self._running[sender] -= 1
        if not self._running[sender]:
            del self._running[sender]
        self._tenants[sender[0]] -= 1
        if not self._tenants[sender[0]]:
            del self._tenants[sender[0]]
        while self._total < self._maximum:
            # Few senders wait, because few batches run, and each has few models.
            senders = [waiting for waiting in self._waiting if self._may_send(waiting)]
            if not senders:
                break
            first = min(senders, key=lambda one: (self._tenants[one[0]], self._running[one]))
            waiters = self._waiting[first]
            waiter = waiters.popleft()
            if not waiters:
                del self._waiting[first]
            if not waiter.done():
                self._start(first)
                waiter.set_result(None)

    def _flow(self, sender: Sender) -> FlowControl:
        found = self._flows.get(sender)
        if found is None:
            if len(self._flows) >= MAX_FLOWS:
                busy = self._running.keys() | self._waiting.keys()
                idle = next((one for one in self._flows if one not in busy), None)
                if idle is not None:
                    del self._flows[idle]
            found = self._flows[sender] = FlowControl(self._maximum)
        return found
