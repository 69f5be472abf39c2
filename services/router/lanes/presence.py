"""Detect dead workers by the connections that they keep open, and recover their jobs at once.

Not on the request path. A lease expires only after 15 s, but the kernel closes the connections of a
process that dies, so its router knows within milliseconds. A live worker may lose its connection
too, so it has GRACE_SECONDS to reconnect, here or at any router. If a live worker is taken for
dead, some work is done twice: the first answer to a job counts, whichever worker sends it.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from typing import Final

from libs.fleet import Fleet
from libs.queue import LaneKey, Lanes
from libs.telemetry.logs import fields
from services.router.lanes.wakeups import Wakeups
from services.router.state.background import Background

log = logging.getLogger(__name__)

CONNECT_SECONDS: Final = 240.0
"""A stream is ended in order after this time, before its connection is (`SHOAL_CONNECTION_SECONDS`
and its grace).
"""
GRACE_SECONDS: Final = 1.5
"""A live worker reconnects within 0.1 s where a router listens, and sends a heartbeat at once."""
CLOSE_MS: Final = 100
"""A heartbeat this close to the break may have been sent before it; the next one decides."""
NEXT_SECONDS: Final = 2.5
"""Time in which the next heartbeat of a live worker arrives."""


class WorkerPresence:
    """The open connections of workers to this router."""

    def __init__(
        self, lanes: Lanes, fleet: Fleet, wakeups: Wakeups, background: Background
    ) -> None:
        self._lanes = lanes
        self._fleet = fleet
        self._wakeups = wakeups
        self._background = background
        # The state: the number of open streams by worker and epoch.
        self._open: Counter[tuple[str, str]] = Counter()
        self._closing = asyncio.Event()

    def close(self) -> None:
        self._closing.set()

    async def attend(self, worker_id: str, epoch: str) -> None:
        """Return when the stream should end; a cancellation means that the connection broke."""
        process = (worker_id, epoch)
        self._open[process] += 1
        try:
            await self._closed_within(CONNECT_SECONDS)
        except asyncio.CancelledError:
            if not self._closing.is_set():
                self._background.spawn(
                    self._recover_unless_back(worker_id, epoch, self._lanes.clock_ms())
                )
            raise
        finally:
            self._open[process] -= 1
            if not self._open[process]:
                del self._open[process]

    async def _closed_within(self, seconds: float) -> bool:
        try:
            async with asyncio.timeout(seconds):
                await self._closing.wait()
        except TimeoutError:
            return False
        return True

    async def _recover_unless_back(self, worker_id: str, epoch: str, broke_ms: int) -> None:
        last_ms = 0
        for seconds in (GRACE_SECONDS, NEXT_SECONDS):
            if await self._closed_within(seconds) or (worker_id, epoch) in self._open:
                return
            found = await self._fleet.last_heartbeat(worker_id)
            if found is None or found[0] != epoch:
                break  # its record is gone, or a new process has its id: this one has ended
            heard_ms = found[1]
            if heard_ms > broke_ms + CLOSE_MS:
                return
            is_silent = heard_ms < broke_ms - CLOSE_MS or heard_ms == last_ms
            if is_silent and await self._fleet.forget(worker_id, heard_ms):
                break
            last_ms = heard_ms
        else:
            return
        await self._recover(worker_id, epoch)

    async def _recover(self, worker_id: str, epoch: str) -> None:
        """End the worker's leases: its jobs return to their lanes, with an attempt counted."""
        jobs = 0

        async def end_leases(lane: LaneKey) -> None:
            nonlocal jobs
            if back := await self._lanes.end_leases(lane, worker_id, epoch):
                jobs += back
                self._wakeups.notify(lane, back)

        gauges = await self._lanes.lane_gauges()
        leased = [one.lane for one in gauges if one.leased_tokens]
        # The leases on a master that is unavailable expire, and the others end now.
        with self._lanes.masters.tolerate_away():
            await self._lanes.masters.for_each_lane(leased, end_leases)
        level = logging.WARNING if jobs else logging.INFO
        log.log(
            level,
            "worker gone",
            extra=fields({"worker": worker_id, "epoch": epoch, "jobs_recovered": jobs}),
        )
