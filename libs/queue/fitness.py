"""Whether Redis can hold the queue: at the start, and again when it has been away or another one took over."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, cast

from redis.asyncio import Redis

from libs.queue import connection
from libs.queue.connection import UnsuitableRedis, translated
from libs.queue.keys import LAYOUT
from libs.telemetry.logs import fields
from libs.versions import LAYOUT_VERSION

if TYPE_CHECKING:
    from libs.queue.lanes import Lanes

log = logging.getLogger(__name__)


async def check(redis: Redis, *, again: bool = False) -> None:
    """UnsuitableRedis unless the server can hold the queue, and what it holds has our layout.

    `again`: of one that took the place of a fit one. What its settings may do to queued work is only logged then: routers queue
    again what is lost, and a mesh that has ended answers nobody.
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
    """Remembers of which Redis it was asked."""

    def __init__(self, lanes: Lanes) -> None:
        self._lanes = lanes
        # The state: whether it was asked at all, of which master of Sentinels', and whether Redis was away since.
        self._is_known = False
        self._server: object = None
        self._was_away = False

    def away(self) -> None:
        """What comes back may have lost everything, or be another server."""
        self._was_away = True

    async def look(self) -> None:
        """Asks if it has to. Raises UnsuitableRedis, and NoCapacity while Redis is away."""
        if self._is_known and not self._was_away and self._server == self._lanes.server:
            return
        await self._lanes.check(again=self._is_known)
        self._is_known, self._was_away, self._server = True, False, self._lanes.server
