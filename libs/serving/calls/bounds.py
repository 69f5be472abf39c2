"""Counts and limits the concurrent calls of a server.

gRPC's limit, `maximum_concurrent_rpcs`, counts wrongly (1.75): each refused call raises the limit
by one, the first call after the limit was reached is refused even if no other is in flight, and
health checks count.
"""

from __future__ import annotations

import asyncio
from typing import Final

from libs.errors import Draining, NoCapacity

MAX_CALLS: Final = 20_000
"""Far above a router's admission limits, which refuse first with more specific errors."""


class Bound:
    """A concurrency limit: each `with` block occupies one slot. Entering raises NoCapacity if none
    is free.

    Args:
        most: Number of slots.
        what: The plural name of the limited things, for error messages.
    """

    def __init__(self, most: int, what: str) -> None:
        self._most = most
        self._what = what
        # Mutable state: occupied slots.
        self._count = 0

    def __enter__(self) -> None:
        if self._count >= self._most:
            raise NoCapacity(
                f"this server is at its limit of {self._most:,} {self._what}: "
                "retry on another server"
            )
        self._count += 1

    def __exit__(self, *_: object) -> None:
        self._count -= 1


class InFlight:
    """Counts the calls in flight, for which a graceful shutdown waits: each `with` block is one
    call. After `drain`, entering raises Draining.
    """

    def __init__(self) -> None:
        self.none = asyncio.Event()
        """Set while no calls are in flight."""
        self.none.set()
        # Mutable state: the count, and whether new calls are refused.
        self._count = 0
        self._is_draining = False

    def drain(self) -> None:
        """Refuse new calls from now on. `none` is set when the last call has ended."""
        self._is_draining = True

    def __enter__(self) -> None:
        if self._is_draining:
            raise Draining("this server is stopping: retry on another server")
        self._count += 1
        self.none.clear()

    def __exit__(self, *_: object) -> None:
        self._count -= 1
        if not self._count:
            self.none.set()
