"""The backlog ahead of a request in its lane, over all routers, read just before admission control
decides.

Gauges are too stale for that: they are up to a second old, in which a fivefold overload adds five
seconds of work. Only `forget` changes a lane here: it drops the counters of an unused one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from redis.asyncio import Redis

from libs.queue.connection.cluster import client_for_key
from libs.queue.keys import LaneKey, RedisKeys
from libs.queue.operations import lane_script
from libs.queue.scripts import Reply, Rest

CALL_TENANTS = 256
"""Maximum tenants of one call: each takes Redis some 3 microseconds."""


@dataclass(frozen=True, slots=True)
class QueuePosition:
    """A lane's backlog for a new job of one tenant, in tokens.

    All but `leased` are estimates: a count of jobs times the lane's average queued job.
    """

    leased: int = 0
    interactive: int = 0
    """Waiting interactive tokens."""
    bulk: int = 0
    """Waiting bulk tokens."""
    interactive_ahead: int = 0
    """Interactive tokens that would be served before the job."""
    bulk_ahead: int = 0
    """Bulk tokens that would be served before the job."""
    interactive_jobs: int = 0
    """The number of jobs in `interactive_ahead`."""


class QueuePositions:
    """The queue positions in all lanes. `slots` as in `Lanes`. Every method raises NoCapacity while
    Redis is unavailable.
    """

    def __init__(self, redis: Redis, *, slots: int = 1) -> None:
        self._keys = RedisKeys(slots)
        self._clients = [client_for_key(redis, index) for index in self._keys.indexes()]

    async def read(self, lane: LaneKey, tenants: Sequence[str]) -> list[QueuePosition]:
        """Return the position of each tenant in the lane, in order; one round trip per 256
        tenants.
        """
        found: list[QueuePosition] = []
        slot, keys = self._keys.locate(lane)
        for start in range(0, len(tenants), CALL_TENANTS):
            chunk = tenants[start : start + CALL_TENANTS]
            queued, leased, interactive, bulk, *ahead = await queue_position(
                self._clients[slot], keys, tenants=chunk
            )
            size = queued / max(1, interactive + bulk)
            found += [
                QueuePosition(
                    leased,
                    interactive=round(size * interactive),
                    bulk=round(size * bulk),
                    interactive_ahead=round(size * before),
                    bulk_ahead=round(size * bulk_before),
                    interactive_jobs=before,
                )
                for before, bulk_before in zip(ahead[::2], ahead[1::2], strict=True)
            ]
        return found

    async def forget(self, lane: LaneKey) -> bool:
        """Drop the counters of a lane without work, so that it is no longer listed. Returns False
        if it has work.
        """
        slot, keys = self._keys.locate(lane)
        return bool(await forget(self._clients[slot], keys, lane=lane.name) == 1)


@lane_script
async def queue_position(*, tenants: Rest) -> Reply: ...


@lane_script
async def forget(*, lane: str) -> Reply: ...
