"""Checks that Redis can hold the queue: at the start, and again after an outage or a failover."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, cast

from redis.asyncio import Redis

from libs.queue.connection import client as connection
from libs.queue.connection.client import UnsuitableRedis, translated
from libs.queue.keys import LAYOUT
from libs.telemetry.logs import fields
from libs.versions import LAYOUT_VERSION

if TYPE_CHECKING:
    from libs.queue.lanes import Lanes

log = logging.getLogger(__name__)


async def check(redis: Redis, *, again: bool = False) -> None:
    """Raises UnsuitableRedis unless the server can hold the queue and its data has our layout.

    `again`: the server replaced one that passed. Unsuitable settings (version, eviction of keys) are only logged then: routers
    enqueue lost jobs again, and a mesh that stopped would answer nobody.
    """
    try:
        await connection.check(redis)
    except UnsuitableRedis as error:
        if not again:
            raise
        log.error("redis is not fit", extra=fields({"error": str(error)}))
    with translated():
        await redis.set(LAYOUT, LAYOUT_VERSION, nx=True)
        found = cast("bytes | None", await redis.get(LAYOUT))
    layout = str(LAYOUT_VERSION) if found is None else found.decode(errors="replace")
    if layout != str(LAYOUT_VERSION):
        raise UnsuitableRedis(
            f"Redis holds layout {layout} ({LAYOUT}), and this version of Shoal reads layout {LAYOUT_VERSION}: run the version "
            "that wrote it, or drain that mesh first and start this one on an empty Redis"
        )


class Fitness:
    """Runs the check when it is due, and remembers which Redis server passed it."""

    def __init__(self, lanes: Lanes) -> None:
        self._lanes = lanes
        # The state: whether a check has passed, against which master (with Sentinels), and whether Redis was away since.
        self._is_known = False
        self._server: object = None
        self._was_away = False

    def away(self) -> None:
        """Redis is unreachable, so the check is due again: the server that comes back may be another, or have lost its data."""
        self._was_away = True

    async def look(self) -> None:
        """Runs the check if it is due. Raises UnsuitableRedis, and NoCapacity while Redis is away."""
        if self._is_known and not self._was_away and self._server == self._lanes.server:
            return
        await self._lanes.check(again=self._is_known)
        self._is_known, self._was_away, self._server = True, False, self._lanes.server
