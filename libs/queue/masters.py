"""The masters that hold the lanes: one, or several on a cluster, of which some may be unavailable
while the others serve.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Callable, Iterable
from contextlib import AbstractAsyncContextManager, AbstractContextManager, nullcontext
from types import TracebackType
from typing import Final, TypeVar

from redis.asyncio import Redis

from libs.errors import NoCapacity
from libs.queue.connection.cluster import ClusterRedis, client_for_key, within_master_timeout
from libs.queue.keys import LaneKey, RedisKeys
from libs.telemetry.logs import fields

log = logging.getLogger(__name__)

T = TypeVar("T")

AWAY_LOG_SECONDS: Final = 10.0
"""The minimum interval between two log lines about ignored failures of masters."""


class _Tolerance:
    """Ignores NoCapacity within its contexts if `is_active`."""

    def __init__(self, *, is_active: bool) -> None:
        self._is_active = is_active
        # The state: the time of the last log line, in monotonic seconds.
        self._logged_at = -math.inf

    def __enter__(self) -> None:
        pass

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool:
        if not (self._is_active and isinstance(error, NoCapacity)):
            return False
        if time.monotonic() - self._logged_at >= AWAY_LOG_SECONDS:
            self._logged_at = time.monotonic()
            log.warning("a master of redis is unavailable", extra=fields({"error": error.message}))
        return True


class Masters:
    """The clients of the slots' masters, and the rules for work on several of them."""

    def __init__(self, redis: Redis, keys: RedisKeys) -> None:
        self._redis = redis
        self._keys = keys
        self.clients = [client_for_key(redis, index) for index in keys.indexes()]
        """The client of each slot. Without a cluster they are the same."""
        self.is_sharded = isinstance(redis, ClusterRedis)
        """True if lanes may be on several masters, each of which may be away alone."""
        self._tolerance = _Tolerance(is_active=self.is_sharded)
        self._intolerance = _Tolerance(is_active=False)

    @property
    def addresses(self) -> object:
        """Return a value that identifies the current masters: it changes when Sentinel or the
        cluster promotes another one.
        """
        if isinstance(self._redis, ClusterRedis):
            return self._redis.topology.addresses
        return getattr(self._redis.connection_pool, "master_address", None)

    def group_slots(self) -> list[tuple[Redis, list[int]]]:
        """Group all slots by their masters, each with a client of it."""
        return self._group((client, slot) for slot, client in enumerate(self.clients))

    def group_lanes(self, lanes: Iterable[LaneKey]) -> list[tuple[Redis, list[LaneKey]]]:
        """Group the lanes by their masters, each with a client of it."""
        return self._group((self.clients[self._keys.locate(lane)[0]], lane) for lane in lanes)

    def within_timeout(self) -> AbstractAsyncContextManager[None]:
        """Bound the time of work on a master of a cluster (`within_master_timeout`)."""
        return within_master_timeout() if self.is_sharded else nullcontext()

    def tolerate_away(self, *, when: bool = True) -> AbstractContextManager[None, bool]:
        """Ignore and log NoCapacity within the context on a cluster, because other masters may
        respond. With `when` False, nothing is ignored.
        """
        return self._tolerance if when else self._intolerance

    async def for_each_lane(
        self, lanes: Iterable[LaneKey], step: Callable[[LaneKey], Awaitable[object]]
    ) -> None:
        """Await the step for every lane: one lane after the other on each master, and all masters
        concurrently.

        After NoCapacity the remaining lanes of that master are skipped. The first NoCapacity is
        raised when all masters are done.
        """

        async def take_steps(own: Iterable[LaneKey]) -> None:
            for lane in own:
                async with self.within_timeout():
                    await step(lane)

        found = await asyncio.gather(
            *(take_steps(own) for _, own in self.group_lanes(lanes)), return_exceptions=True
        )
        errors = [error for error in found if error is not None]
        for error in sorted(errors, key=lambda error: isinstance(error, NoCapacity)):
            raise error

    @staticmethod
    def _group(entries: Iterable[tuple[Redis, T]]) -> list[tuple[Redis, list[T]]]:
        groups: dict[object, tuple[Redis, list[T]]] = {}
        for client, entry in entries:
            groups.setdefault(client.connection_pool, (client, []))[1].append(entry)
        return list(groups.values())
