"""Rate limits of tenants over all routers, in requests and tokens per second, by the generic cell
rate algorithm (GCRA, ITU-T I.371; the virtual scheduling form).

For each rate Redis keeps one number: the time at which the tenant's debt is paid if no more
requests arrive. A request moves that time ahead by its cost / rate, and conforms if it is then at
most one burst ahead of now. A request that costs more than a whole burst conforms once no debt is
left, and is paid for afterwards.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from urllib.parse import quote

from redis.asyncio import Redis

from libs.queue.connection.cluster import client_for_key
from libs.queue.keys import slot_number
from libs.queue.scripts import Reply, script


@dataclass(frozen=True, slots=True)
class RateLimit:
    """A tenant's rate limits; 0: unlimited."""

    requests_per_second: float = 0.0
    tokens_per_second: float = 0.0
    burst_seconds: float = 5.0
    """The burst, in seconds of the rate."""

    def __str__(self) -> str:
        limits = (("requests", self.requests_per_second), ("tokens", self.tokens_per_second))
        return (
            " and ".join(f"{most:g} {what} a second" for what, most in limits if most > 0)
            or "an unlimited rate"
        )

    @property
    def is_limited(self) -> bool:
        return self.requests_per_second > 0 or self.tokens_per_second > 0


class Rates:
    """The debts of all tenants. `slots` as in `Lanes`; `clock` (Unix seconds) replaces Redis' clock
    in tests. Raises NoCapacity while Redis is unavailable.
    """

    def __init__(
        self, redis: Redis, *, slots: int = 1, clock: Callable[[], float] = lambda: -1.0
    ) -> None:
        self._redis = redis
        self._slots = slots
        self._clock = clock

    async def take(self, tenant: str, rate: RateLimit, tokens: int) -> float:
        """Charge one request and return 0.0, or charge nothing and return the seconds until it
        would conform.

        One round trip. Do not call it for a tenant without limits.
        """
        return await self._charge(tenant, rate, 1, tokens)

    async def give_back(
        self, tenant: str, rate: RateLimit, tokens: int, *, requests: int = 1
    ) -> None:
        """Refund `take` for a request that was refused for another reason, or with `requests` 0
        only the tokens that a request did not use.
        """
        await self._charge(tenant, rate, -requests, -tokens)

    async def _charge(self, tenant: str, rate: RateLimit, requests: int, tokens: int) -> float:
        key = rates_key(tenant, self._slots)
        reply = await charge(
            client_for_key(self._redis, key),
            [key],
            now=self._clock(),
            requests_per_second=rate.requests_per_second,
            tokens_per_second=rate.tokens_per_second,
            burst=rate.burst_seconds,
            requests=requests,
            tokens=tokens,
        )
        return float(reply)


def rates_key(tenant: str, slots: int = 1) -> str:
    """Return the name of a HASH: `requests` and `tokens`, the times at which their debts will be
    paid (Unix seconds). It expires when both are paid.
    """
    return f"v1:{{{slot_number(tenant, slots)}}}:rates:{quote(tenant, safe='')}"


@script("debts", prologues=["rates"])
async def charge(
    *,
    now: float,
    requests_per_second: float,
    tokens_per_second: float,
    burst: float,
    requests: int,
    tokens: int,
) -> Reply: ...
