"""Requests that anybody may send, while they arrive.

gRPC takes a message into memory whole before it looks at how long it is (1.75; grpc/grpc#43012): what comes is not bounded by a
limit of length, but can be cut off. So while such requests arrive, the process's memory is looked at.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Final

from libs.errors import DeadlinePassed, NoCapacity
from libs.memory import TIDY_SECONDS, resident_bytes

ARRIVAL_SECONDS: Final = 10.0
"""How long one may take."""
LOOK_SECONDS: Final = 0.002
GROWTH_BYTES: Final = 8 * 1024 * 1024
"""So much more than before the first of those that are arriving the process may hold."""


class Arrivals:
    """Reads requests of a few bytes, and cuts off all that are arriving once memory has grown by more than they could need.

    `resident`: bytes that the process holds.
    """

    def __init__(self, resident: Callable[[], int] = resident_bytes) -> None:
        self._resident = resident
        # The state: what ends each one that is arriving, those that were there at the last look, and when the next one is.
        self._arriving: set[asyncio.Timeout] = set()
        self._seen: set[asyncio.Timeout] = set()
        self._looking: asyncio.TimerHandle | None = None
        # The memory before them, and until when that counts: what was freed stays resident until it is given back (`memory.tidy`),
        # and each wave of calls would begin where the last one ended.
        self._before = 0
        self._counts_until = 0.0

    async def read(self, context: Any) -> object:
        """The next message of a call, or `grpc.aio.EOF`. Raises DeadlinePassed; NoCapacity if it was cut off."""
        limit = asyncio.timeout(ARRIVAL_SECONDS)
        try:
            async with limit:
                self._enter(limit)
                return await context.read()
        except TimeoutError:
            if limit not in self._arriving:
                raise NoCapacity("more is arriving at once than such requests need, which are a few bytes each") from None
            raise DeadlinePassed(f"the request did not arrive within {ARRIVAL_SECONDS:g} s") from None
        finally:
            self._arriving.discard(limit)

    def _enter(self, limit: asyncio.Timeout) -> None:
        self._arriving.add(limit)
        if self._looking is None:
            loop = asyncio.get_running_loop()
            if loop.time() >= self._counts_until:
                self._before = self._resident()
            self._looking = loop.call_later(LOOK_SECONDS, self._look)

    def _look(self) -> None:
        """Most requests come with their call and are gone by now; one that came since the last look is left for the next."""
        if self._resident() > self._before + GROWTH_BYTES:
            self._cut(self._seen & self._arriving)
        self._seen = set(self._arriving)
        self._looking = asyncio.get_running_loop().call_later(LOOK_SECONDS, self._look) if self._arriving else None

    def _cut(self, arriving: set[asyncio.Timeout]) -> None:
        self._arriving -= arriving
        now = asyncio.get_running_loop().time()
        for limit in arriving:
            limit.reschedule(now)
            self._counts_until = now + 2 * TIDY_SECONDS
