"""Redis' clock, by which all processes of a mesh judge deadlines and leases, so that their clocks
need not agree.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from redis.asyncio import Redis

from libs.queue.connection.client import translated


class RedisClock:
    """Estimates Redis' clock, in Unix milliseconds, without a round trip each time. `fixed`
    replaces it in tests.
    """

    def __init__(self, redis: Redis, fixed: Callable[[], int] | None = None) -> None:
        self._redis = redis
        self._fixed = fixed
        # The state: the offset of Redis' clock from our monotonic clock; until measured, that of
        # this machine's wall clock.
        self._ahead_ms = (time.time() - time.monotonic()) * 1000

    async def measure(self) -> int:
        """Measure the offset in one round trip, and return the time. Raises NoCapacity while Redis
        is away.
        """
        if self._fixed is None:
            begin = time.monotonic()
            with translated():
                seconds, microseconds = await self._redis.time()
            self._ahead_ms = seconds * 1000 + microseconds / 1000 - (begin + time.monotonic()) * 500
        return self.now_ms()

    def now_ms(self) -> int:
        """Return the time by the last measured offset."""
        return self._fixed() if self._fixed else round(time.monotonic() * 1000 + self._ahead_ms)

    def argument(self) -> int:
        """Return the time to pass to scripts. Below 0: they read Redis' clock."""
        return self._fixed() if self._fixed else -1
