"""Bounds the memory of arriving requests: those of unauthenticated callers, and those of small
methods.

gRPC buffers a whole message before it checks its length (1.75; grpc/grpc#43012), so a length limit
does not bound arriving bytes, but a call can be cut off. The process's memory is therefore watched
while such requests arrive.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Final

from libs.errors import DeadlinePassed, NoCapacity
from libs.memory import resident_bytes, trim

ARRIVAL_SECONDS: Final = 10.0
"""Time limit for the arrival of a request."""
ARRIVALS_POLL_SECONDS: Final = 0.002
RECOVERY_SECONDS: Final = 5.0
"""Time for which the baseline is kept after requests were cut off. Halfway, their memory is
returned to the system.
"""
GROWTH_BYTES: Final = 8 * 1024 * 1024
"""Maximum growth of the process while requests arrive, from the first of them on."""


class Arrivals:
    """Reads requests, and cuts off arriving ones once memory has grown beyond their needs.

    Args:
        resident: Returns the resident bytes of the process.
        growth_bytes: Maximum growth of the process while requests arrive.
    """

    def __init__(
        self, resident: Callable[[], int] = resident_bytes, growth_bytes: int = GROWTH_BYTES
    ) -> None:
        self._resident = resident
        self._growth_bytes = growth_bytes
        # Mutable state: timeouts of the arriving requests, those that were arriving at the last
        # poll, and the next poll.
        self._arriving: set[asyncio.Timeout] = set()
        self._seen: set[asyncio.Timeout] = set()
        self._next_poll: asyncio.TimerHandle | None = None
        # The baseline, and until when to keep it. Freed memory stays resident until it is returned
        # to the system, so a new baseline for each wave of calls would begin where the last wave
        # ended.
        self._before = 0
        self._counts_until = 0.0
        self._trimming: asyncio.TimerHandle | None = None

    async def read(self, context: Any, seconds: float | None = None) -> object:
        """Return the next message of a call, or `grpc.aio.EOF`.

        Raises DeadlinePassed if the message does not arrive in time, and NoCapacity if it was cut
        off.

        Args:
            seconds: Time limit for the message; by default ARRIVAL_SECONDS.
        """
        seconds = ARRIVAL_SECONDS if seconds is None else seconds
        limit = asyncio.timeout(seconds)
        try:
            async with limit:
                self._enter(limit)
                return await context.read()
        except TimeoutError:
            if limit not in self._arriving:
                raise NoCapacity(
                    "too many bytes are arriving at once for requests of this method: retry later"
                ) from None
            raise DeadlinePassed(f"the request did not arrive within {seconds:g} s") from None
        finally:
            self._arriving.discard(limit)

    def _enter(self, limit: asyncio.Timeout) -> None:
        self._arriving.add(limit)
        if self._next_poll is None:
            loop = asyncio.get_running_loop()
            if loop.time() >= self._counts_until:
                self._before = self._resident()
            self._next_poll = loop.call_later(ARRIVALS_POLL_SECONDS, self._poll)

    def _poll(self) -> None:
        """Check memory, and cut off requests that were also arriving at the last poll.

        Most requests arrive with their call, before any poll. Once no slow one is left, a new
        baseline begins: under a steady load some request is always arriving.
        """
        resident, slow = self._resident(), self._seen & self._arriving
        if self._seen and not slow and asyncio.get_running_loop().time() >= self._counts_until:
            self._before = resident
        elif resident > self._before + self._growth_bytes:
            self._cut(slow)
        self._seen = set(self._arriving)
        self._next_poll = (
            asyncio.get_running_loop().call_later(ARRIVALS_POLL_SECONDS, self._poll)
            if self._arriving
            else None
        )

    def _cut(self, arriving: set[asyncio.Timeout]) -> None:
        loop = asyncio.get_running_loop()
        now = loop.time()
        self._arriving -= arriving
        for limit in arriving:
            limit.reschedule(now)
            self._counts_until = now + RECOVERY_SECONDS
        if arriving and self._trimming is None:
            self._trimming = loop.call_later(RECOVERY_SECONDS / 2, self._trim)

    def _trim(self) -> None:
        self._trimming = None
        asyncio.get_running_loop().run_in_executor(None, trim)
