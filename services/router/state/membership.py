"""This router's membership among the routers of the mesh."""

from __future__ import annotations

import logging

from libs.fleet import Fleet
from libs.queue import Lanes
from libs.telemetry.logs import fields

log = logging.getLogger(__name__)


class Membership:
    """Reports that this router is alive, and deletes the answers to routers that died."""

    def __init__(self, fleet: Fleet, lanes: Lanes, router_id: str) -> None:
        self._fleet = fleet
        self._lanes = lanes
        self._router_id = router_id

    async def send_heartbeat(self) -> None:
        """Send a heartbeat; call once a second. Raises NoCapacity while Redis is away."""
        for router_id in await self._fleet.router_heartbeat(self._router_id):
            log.info("router lost", extra=fields({"router": router_id}))
            await self._lanes.drop_replies(router_id)
