"""Fail the jobs of lanes that no worker of their pool can serve, so that clients do not wait until
their deadlines.
"""

from __future__ import annotations

import logging

from libs.queue import LaneKey, Lanes
from libs.telemetry.logs import fields
from services.router.admission.routing.routes import why_broken
from services.router.lanes import codec
from services.router.state.view import RouterView

log = logging.getLogger(__name__)


class BrokenLanes:
    """Fails the jobs of lanes with a model or adapter that their pool cannot serve (`why_broken`).
    Methods raise NoCapacity while Redis is unavailable.
    """

    def __init__(self, lanes: Lanes, view: RouterView) -> None:
        self._lanes = lanes
        self._view = view

    async def fail_all(self) -> None:
        """Fail the queued jobs of all broken lanes, including jobs that other routers queued."""
        waiting = [lane for lane, gauges in self._view.gauges.items() if gauges.queued_jobs]
        await self._lanes.masters.for_each_lane(waiting, self.fail_if_broken)

    async def fail_if_broken(self, lane: LaneKey) -> bool:
        """Fail the lane's queued jobs if it is broken, and return whether it is."""
        failure = why_broken(lane, self._view.snapshot)
        if failure is None:
            return False
        failed = await self._lanes.fail_all(lane, codec.failed(codec.from_failure(failure)))
        if failed:
            log.warning(
                "model given up",
                extra=fields({"lane": lane.name, "reason": failure.reason, "jobs": failed}),
            )
        return True
