"""Identify callers by asking a router before more than a little of a body is read. Results are
cached for seconds.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

from shoal.errors import ShoalError
from shoal.transport.wire import Metadata

from libs.serving.calls.call import REQUEST_ID_HEADER, new_request_id
from services.edge.intake.budget import ADDRESS_FACTOR, network_key
from services.edge.messages.base import HttpError

FRESH_SECONDS: Final = 5.0
"""Time for which a result is used without a refresh. It only decides which tenant pays for memory:
the router authenticates the request itself again.
"""
MAX_STALE_SECONDS: Final = 60.0
"""Time for which a result is used while it is refreshed, so that a burst does not wait for each
refresh.
"""
REFUSAL_TTL_SECONDS: Final = 1.0
MAX_CALLERS: Final = 10_000
MAX_REFUSED_CALLERS: Final = 1000
"""Refused callers have their own table, so that invalid credentials evict no accepted caller."""
MAX_LOOKUPS: Final = 256
"""The maximum number of concurrent lookups. One address may have ADDRESS_FACTOR times as many as
are free.
"""
_REFUSALS: Final = ("UNAUTHENTICATED", "PERMISSION_DENIED", "INVALID_ARGUMENT")

Ask = Callable[[Metadata], Awaitable[str]]


@dataclass(frozen=True, slots=True)
class _Known:
    """The outcome of a lookup.

    Attributes:
        at: When a router answered.
        tenant: The caller's tenant.
        refusal: The error, if the caller was refused.
    """

    at: float
    tenant: str = ""
    refusal: ShoalError | None = None


class Callers:
    """A cache of callers.

    Args:
        ask: Returns the tenant of a call's metadata; raises ShoalError.
        clock: Returns seconds.
    """

    def __init__(self, ask: Ask, clock: Callable[[], float] = time.monotonic) -> None:
        self._ask = ask
        self._clock = clock
        # The state, by digest: accepted callers and refused ones, oldest first, and pending
        # lookups.
        self._known: dict[bytes, _Known] = {}
        self._refused: dict[bytes, _Known] = {}
        self._asking: dict[bytes, asyncio.Task[_Known]] = {}
        # The pending lookups by the network of the peer that caused them.
        self._networks: Counter[str] = Counter()

    def knows(self, metadata: Metadata) -> bool:
        """Return whether `tenant` needs no router for this caller."""
        known = self._known.get(_digest(metadata))
        return known is not None and self._clock() - known.at < MAX_STALE_SECONDS

    async def tenant(
        self, metadata: Metadata, address: str = "", *, is_accepted: bool = False
    ) -> str:
        """Return the caller's tenant, by its credential and the tenant that it names. Concurrent
        requests of one caller share one lookup.

        Args:
            metadata: The metadata of the caller's request.
            address: The peer's address; empty if unknown.
            is_accepted: Whether a router has answered the request, so that MAX_LOOKUPS does not
                apply.

        Raises HttpError for a refused caller, if no router answers, or if too many callers are
        being identified.
        """
        key = _digest(metadata)
        known = self._known.get(key) or self._refused.get(key)
        age = self._clock() - known.at if known is not None else MAX_STALE_SECONDS
        if known is None or age >= (
            REFUSAL_TTL_SECONDS if known.refusal is not None else MAX_STALE_SECONDS
        ):
            # Other requests may wait for the same lookup, so it continues if this one is cancelled.
            known = await asyncio.shield(
                self._start_lookup(key, metadata, network_key(address), is_accepted)
            )
        elif age >= FRESH_SECONDS:
            with suppress(
                HttpError
            ):  # The known result is valid until the caller can be looked up again.
                self._start_lookup(key, metadata, network_key(address), is_accepted)
        if known.refusal is not None:
            refusal = known.refusal
            raise HttpError(
                refusal.reason,
                refusal.message,
                field=refusal.field,
                retry_after=refusal.retry_after,
            )
        return known.tenant

    def _start_lookup(
        self, key: bytes, metadata: Metadata, network: str, is_accepted: bool
    ) -> asyncio.Task[_Known]:
        task = self._asking.get(key)
        if task is None:
            if not is_accepted:
                self._check_lookups(network)
            self._networks[network] += 1
            task = self._asking[key] = asyncio.create_task(self._look_up(key, metadata, network))
        return task

    def _check_lookups(self, network: str) -> None:
        """Raise HttpError if the limit of concurrent lookups, overall or of this network, is
        reached.
        """
        free = MAX_LOOKUPS - len(self._asking)
        if free <= 0:
            raise HttpError(
                "QUEUE_FULL",
                "too many callers are being identified at once: try again later",
                retry_after=1.0,
            )
        if self._networks[network] >= free * ADDRESS_FACTOR:
            message = (
                "too many callers from this address are being identified at once: try again later"
            )
            raise HttpError("QUEUE_FULL", message, retry_after=1.0)

    async def _look_up(self, key: bytes, metadata: Metadata, network: str) -> _Known:
        named = (
            *(pair for pair in metadata if pair[0] != REQUEST_ID_HEADER),
            (REQUEST_ID_HEADER, new_request_id()),
        )
        try:
            known = _Known(self._clock(), await self._ask(named))
        except ShoalError as error:
            known = _Known(self._clock(), refusal=error)
            if (
                error.code not in _REFUSALS
            ):  # no router answered, so the previous result stays valid
                return known
        finally:
            del self._asking[key]
            self._networks[network] -= 1
            if not self._networks[network]:
                del self._networks[network]
        self._known.pop(key, None)
        self._refused.pop(key, None)
        table, limit = (
            (self._known, MAX_CALLERS)
            if known.refusal is None
            else (self._refused, MAX_REFUSED_CALLERS)
        )
        if len(table) >= limit:
            del table[next(iter(table))]
        table[key] = known
        return known


def _digest(metadata: Metadata) -> bytes:
    """Return a digest of everything that identifies a caller, so that no token is stored."""
    parts = sorted(f"{name}\0{value!s}" for name, value in metadata if name != REQUEST_ID_HEADER)
    return hashlib.sha256("\0\0".join(parts).encode()).digest()
