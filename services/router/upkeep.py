"""A router's background loops: refresh the view once a second and update its dependents; sweep
lanes.

The loops survive outages of Redis. Each ends only when it is cancelled; any other error is a bug
and stops the router.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Final

from libs.aliases import AliasStore
from libs.errors import NoCapacity
from libs.queue import LaneKey, Lanes, RedisCheck
from libs.queue.queue_position import QueuePositions
from libs.serving.watched import Watched
from libs.telemetry.logs import fields
from services.router.lanes.broken_lanes import BrokenLanes
from services.router.lanes.dispatch import Dispatcher
from services.router.lanes.wakeups import Wakeups
from services.router.state.membership import Membership
from services.router.state.view import RouterView

log = logging.getLogger(__name__)

TICK_SECONDS: Final = 1.0
AWAY_TICK_SECONDS: Final = 0.2
"""Interval of refreshes while Redis is unavailable."""
SWEEP_SECONDS: Final = 30.0
KEPT_UNKNOWN: Final = 256
MAX_FORGOTTEN: Final = 1000
"""Idle lanes of models or adapters that no worker has: KEPT_UNKNOWN are left to expire, and each
refresh drops at most MAX_FORGOTTEN of the others (0.2 ms each).
"""

SetHealth = Callable[[bool], Awaitable[None]]


class Upkeep:
    """The loops, and the components that they keep up to date."""

    def __init__(
        self,
        lanes: Lanes,
        view: RouterView,
        aliases: AliasStore,
        membership: Membership,
        wakeups: Wakeups,
        dispatcher: Dispatcher,
        broken: BrokenLanes,
        positions: QueuePositions,
        files: Sequence[Watched[Any]],
    ) -> None:
        self._lanes = lanes
        self._view = view
        self._aliases = aliases
        self._membership = membership
        self._wakeups = wakeups
        self._dispatcher = dispatcher
        self._broken = broken
        self._positions = positions
        self._files = files
        self._redis_check = RedisCheck(lanes)
        # The state: whether schedulers can run this version's scripts. A Redis that lost them
        # receives them again with the next call.
        self._has_loaded = False
        self.is_redis_up = False
        """True if Redis answered the last refresh."""
        self.oldest: Mapping[LaneKey, float] = {}
        """Age in seconds of the oldest of this router's jobs in each lane, at the last refresh;
        replaced whole.
        """

    async def run(self, set_health: SetHealth) -> None:
        """Refresh once a second, more often while Redis is unavailable. Calls `set_health` after
        each refresh.
        """
        was_away = False
        while True:
            try:
                await self.refresh()
            except NoCapacity as error:
                if not was_away:
                    log.warning("redis is unavailable", extra=fields({"error": error.message}))
                was_away = True
                self._redis_check.mark_away()
            else:
                if was_away:
                    log.info("redis is back")
                was_away = False
            self.is_redis_up = not was_away
            self.oldest = self._dispatcher.oldest_seconds()
            await set_health(not was_away)
            await asyncio.sleep(AWAY_TICK_SECONDS if was_away else TICK_SECONDS)

    async def refresh(self) -> None:
        """Refresh the view and update its dependents. Raises NoCapacity while Redis is unavailable,
        and UnsuitableRedis.
        """
        for file in self._files:
            await asyncio.to_thread(file.refresh)
        await self._redis_check.run_if_due()
        if not self._has_loaded:
            await self._lanes.load_scripts()
            self._has_loaded = True
        await self._view.refresh(self._lanes)
        # On a cluster at least one master has answered, and its lanes are still served.
        masters = self._lanes.masters
        for step in (self._aliases.refresh, self._membership.send_heartbeat):
            with masters.tolerate_away():
                async with masters.within_timeout():
                    await step()
        self._wakeups.remind(self._view.gauges.values(), self._lanes.clock_ms())
        # These bound the time of each lane.
        for step in (self._broken.fail_all, self._dispatcher.reconcile, self._forget_unknown):
            with masters.tolerate_away():
                await step()

    async def _forget_unknown(self) -> None:
        lanes = self._view.idle_unknown()[KEPT_UNKNOWN : KEPT_UNKNOWN + MAX_FORGOTTEN]
        await self._lanes.masters.for_each_lane(lanes, self._positions.forget)

    async def sweep(self) -> None:
        """Correct gauges that a crash left wrong, and drop expired jobs of lanes without pulls."""
        while True:
            await asyncio.sleep(SWEEP_SECONDS)
            with suppress(NoCapacity):  # the next round starts soon enough
                await self._lanes.masters.for_each_lane(list(self._view.gauges), self._lanes.sweep)
