"""What admission asks of a lane, just before it lets a request in or refuses it: how much is ahead, over all routers.

Gauges are up to a second old, in which an overload of five times brings five seconds of work. Nothing here changes a lane but
`forget`, which drops the counters of one that nobody uses.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from redis.asyncio import Redis

from libs.queue.keys import Keys, LaneKey
from libs.queue.operations import lane_script
from libs.queue.scripts import Reply, Rest

CALL_TENANTS = 256
"""That one call asks for: some 3 microseconds of Redis each."""


@dataclass(frozen=True, slots=True)
class Standing:
    """A lane as a new job of one tenant would find it, in tokens: what is leased, what waits in each class, and what of that would
    be served before the job. The parts of `queued` are estimated by counts of jobs, each for an average one; `interactive_jobs` is
    that count for `interactive_ahead`."""

    leased: int = 0
    interactive: int = 0
    bulk: int = 0
    interactive_ahead: int = 0
    bulk_ahead: int = 0
    interactive_jobs: int = 0


class Standings:
    """Of all lanes. `slots` as in `Lanes`. Every method raises NoCapacity while Redis is away."""

    def __init__(self, redis: Redis, *, slots: int = 1) -> None:
        self._redis = redis
        self._keys = Keys(slots)

    async def of(self, lane: LaneKey, tenants: Sequence[str]) -> list[Standing]:
        """For each tenant, in order; one round trip."""
        found: list[Standing] = []
        for start in range(0, len(tenants), CALL_TENANTS):
            asked = tenants[start : start + CALL_TENANTS]
            queued, leased, interactive, bulk, *ahead = await standing(self._redis, self._keys.of(lane), tenants=asked)
            size = queued / max(1, interactive + bulk)
            found += [
                Standing(
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
        """Drops the counters of a lane that holds no work, so that nobody looks at it any more. False: it has work."""
        return bool(await forget(self._redis, self._keys.of(lane), lane=lane.name) == 1)


@lane_script
async def standing(*, tenants: Rest) -> Reply: ...


@lane_script
async def forget(*, lane: str) -> Reply: ...
