"""Counts and limits the concurrent calls of a server.

gRPC has such a limit, `maximum_concurrent_rpcs`, but it counts wrongly (1.75): each refused call
raises the limit by one, and the first call after the limit was reached is refused even if no other
is in flight. It counts health checks, too.
"""

from __future__ import annotations

import asyncio
from typing import Final

from libs.errors import Draining, NoCapacity

MAX_CALLS: Final = 20_000
"""Far above what a router admits, so that its own admission control, with its more specific errors,
refuses first.
"""


class Bound:
    """A concurrency limit for things called `what`: a context takes one place. Entering it raises
    NoCapacity if none is free.
    """

    def __init__(self, most: int, what: str) -> None:
        self._most = most
        self._what = what
        # The state: how many there are.
        self._count = 0

    def __enter__(self) -> None:
        if self._count >= self._most:
            raise NoCapacity(
                f"this server has {self._most:,} {self._what} at a time and takes no more; another one may"
            )
        self._count += 1

    def __exit__(self, *_: object) -> None:
        self._count -= 1


class InFlight:
    """The calls that a drain waits for: a context counts one. Entering it raises Draining once
    `drain` was called.
    """

    def __init__(self) -> None:
        self.none = asyncio.Event()
        """Set while there are none."""
        self.none.set()
        # The state: how many there are, and whether new ones are refused.
        self._count = 0
        self._is_draining = False

    def drain(self) -> None:
        self._is_draining = True

    def __enter__(self) -> None:
        if self._is_draining:
            raise Draining("this server is stopping; another one answers")
        self._count += 1
        self.none.clear()

    def __exit__(self, *_: object) -> None:
        self._count -= 1
        if not self._count:
            self.none.set()
