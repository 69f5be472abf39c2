"""This router's membership among the routers of the mesh."""

from __future__ import annotations

import logging

from libs.aliases import AliasStore
from libs.fleet import Fleet
from libs.queue import Lanes
from libs.telemetry.logs import fields

log = logging.getLogger(__name__)


class Membership:
    """Reports that this router is alive, and deletes the answers to routers that died."""

    def __init__(self, fleet: Fleet, aliases: AliasStore, lanes: Lanes, router_id: str) -> None:
        self._fleet = fleet
        self._aliases = aliases
        self._lanes = lanes
        self._router_id = router_id

    async def send_heartbeat(self) -> None:
        """Send a heartbeat; call once a second. Raises NoCapacity while Redis is unavailable."""
        lost = await self._fleet.router_heartbeat(self._router_id)
        for router_id in lost:
            log.info("router lost", extra=fields({"router": router_id}))
            await self._aliases.forget_router(router_id)
        # Last, because these are on all masters, of which one may be away.
        for router_id in lost:
            await self._lanes.drop_replies(router_id)
