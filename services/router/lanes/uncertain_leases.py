"""Releases batches that a pull may have leased on a master of a cluster that did not answer.

The pull went on with lanes of other masters, so the worker does not know of such a batch. Unless it
is released, its jobs wait until the lease expires, and an attempt is counted.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Final

from libs.errors import NoCapacity
from libs.queue import LaneKey, Lanes
from services.router.state.background import Background

RELEASE_SECONDS: Final = 1.0
"""Interval of the attempts."""
MAX_UNCERTAIN_BATCHES: Final = 1_000
"""Maximum number of batches of a lane; further ones are left to expire."""


class UncertainLeases:
    """The batches, with their workers, by lane, and when their leases have expired anyway."""

    def __init__(self, lanes: Lanes, background: Background) -> None:
        self._lanes = lanes
        self._background = background
        # The state: for each worker and batch the end of the attempts, by the loop's clock.
        self._ends: dict[LaneKey, dict[tuple[str, str], float]] = {}

    def add(self, lane: LaneKey, worker_id: str, batch_id: str) -> None:
        """Release the batch once the lane's master answers."""
        if lane not in self._ends:
            self._ends[lane] = {}
            self._background.spawn(self._release(lane))
        if len(self._ends[lane]) < MAX_UNCERTAIN_BATCHES:
            end = asyncio.get_running_loop().time() + self._lanes.lease_ms / 1000
            self._ends[lane][worker_id, batch_id] = end

    def forget(self, lane: LaneKey, worker_id: str, batch_id: str) -> None:
        """Keep the batch leased: its worker has it now."""
        self._ends.get(lane, {}).pop((worker_id, batch_id), None)

    async def _release(self, lane: LaneKey) -> None:
        """Release the lane's batches. Give up those with expired leases."""
        ends = self._ends[lane]
        try:
            while ends:
                await asyncio.sleep(RELEASE_SECONDS)
                with suppress(NoCapacity):
                    await self._release_each(lane, ends)
        finally:
            del self._ends[lane]

    async def _release_each(self, lane: LaneKey, ends: dict[tuple[str, str], float]) -> None:
        for batch in list(ends):
            if asyncio.get_running_loop().time() < ends.get(batch, 0.0):
                await self._lanes.complete(lane, *batch, [], release=True)
            ends.pop(batch, None)
