"""Limits the concurrent calls of a server.

gRPC has such a limit, `maximum_concurrent_rpcs`, but it counts wrongly (1.75): each refused call raises the limit by one, and the
first call after the limit was reached is refused even if no other is in flight. It counts health checks, too.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from libs.errors import NoCapacity

MOST_CALLS: Final = 20_000
"""Far above what a router admits, so that its own admission control, with its more specific errors, refuses first."""


class Bound:
    """A concurrency limit for things called `what`."""

    def __init__(self, most: int, what: str) -> None:
        self._most = most
        self._what = what
        # The state: how many there are.
        self._count = 0

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Takes one place within the context. Raises NoCapacity if none is free."""
        if self._count >= self._most:
            raise NoCapacity(f"this server has {self._most:,} {self._what} at a time and takes no more; another one may")
        self._count += 1
        try:
            yield
        finally:
            self._count -= 1
