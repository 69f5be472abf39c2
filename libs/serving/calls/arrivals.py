"""Bounds the memory that unauthenticated requests take while they arrive.

gRPC buffers a whole message before it checks its length (1.75; grpc/grpc#43012): a length limit does not bound what arrives, but a
call can be cut off. So the process's memory is watched while such requests arrive.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Final

from libs.errors import DeadlinePassed, NoCapacity
from libs.memory import TIDY_SECONDS, resident_bytes

ARRIVAL_SECONDS: Final = 10.0
"""How long one request may take to arrive."""
LOOK_SECONDS: Final = 0.002
GROWTH_BYTES: Final = 8 * 1024 * 1024
"""How much the process may grow while requests arrive, from the first of them on."""


class Arrivals:
    """Reads requests of a few bytes, and cuts off those that are arriving once memory has grown by more than they could need.

    `resident`: returns the resident bytes of the process.
    """

    def __init__(self, resident: Callable[[], int] = resident_bytes) -> None:
        self._resident = resident
        # The state: the timeouts of the requests that are arriving, those that arrived already at the last look, the next look.
        self._arriving: set[asyncio.Timeout] = set()
        self._seen: set[asyncio.Timeout] = set()
        self._looking: asyncio.TimerHandle | None = None
        # The memory before they began, and until when that baseline holds: freed memory stays resident until `memory.tidy` returns
        # it to the system, so a new baseline for each wave of calls would begin where the last wave ended.
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
        """Checks memory, and cuts off requests that were arriving at the last look, too. Most arrive with their call, before
        any."""
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
