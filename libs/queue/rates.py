"""How fast a tenant may ask, counted over all routers: requests and tokens a second, by the generic cell rate algorithm (GCRA,
ITU-T I.371; the virtual scheduling form).

Of each rate Redis keeps one number: when the tenant's debt will be paid, if nothing more comes. A request puts that off by its cost
/ rate; it passes if the debt then reaches no further ahead than the burst. One that costs more than a whole burst passes once
nothing is owed, and is paid for afterwards.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from urllib.parse import quote

from redis.asyncio import Redis

from libs.queue.scripts import Reply, script


@dataclass(frozen=True, slots=True)
class Rate:
    """What a tenant may ask for. Requests and tokens a second, 0: as many as it likes; `burst_seconds`: how much of a rate that
    was not used may come at once."""

    requests_per_second: float = 0.0
    tokens_per_second: float = 0.0
    burst_seconds: float = 5.0

    def __str__(self) -> str:
        limits = (("requests", self.requests_per_second), ("tokens", self.tokens_per_second))
        return " and ".join(f"{most:g} {what} a second" for what, most in limits if most > 0) or "as much as it likes"

    @property
    def is_limited(self) -> bool:
        return self.requests_per_second > 0 or self.tokens_per_second > 0


class Rates:
    """The debts of all tenants. `clock` (Unix seconds) replaces Redis' clock in tests. Raises NoCapacity while Redis is away."""

    def __init__(self, redis: Redis, *, clock: Callable[[], float] = lambda: -1.0) -> None:
        self._redis = redis
        self._clock = clock

    async def take(self, tenant: str, rate: Rate, tokens: int) -> float:
        """Charges one request of so many tokens and answers 0.0; or charges nothing, and answers in how many seconds it would pass.

        One round trip. Not to be called for a tenant without limits.
        """
        return await self._charge(tenant, rate, 1, tokens)

    async def give_back(self, tenant: str, rate: Rate, tokens: int) -> None:
        """Undoes `take` for a request that was refused after all."""
        await self._charge(tenant, rate, -1, -tokens)

    async def _charge(self, tenant: str, rate: Rate, requests: int, tokens: int) -> float:
        reply = await charge(
            self._redis,
            [key_of(tenant)],
            now=self._clock(),
            requests_per_second=rate.requests_per_second,
            tokens_per_second=rate.tokens_per_second,
            burst=rate.burst_seconds,
            requests=requests,
            tokens=tokens,
        )
        return float(reply)


def key_of(tenant: str) -> str:
    """HASH: `requests` and `tokens`, when their debts will be paid (Unix seconds); expires when nothing is owed any more."""
    return f"v1:rates:{quote(tenant, safe='')}"


@script("debts", prologue="rates")
async def charge(
    *, now: float, requests_per_second: float, tokens_per_second: float, burst: float, requests: int, tokens: int
) -> Reply: ...
