"""Liveness: keeps one stream open to a router, by which routers know that this process is alive.

Not on the request path. When the process dies its stream breaks, and its leased jobs go to other
workers immediately. If the stream breaks while the process is alive, the worker sends a heartbeat
and opens another stream.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Final

from shoal.v1 import worker_pb2

from libs.errors import InternalError, NoCapacity
from libs.telemetry.logs import fields
from libs.versions import WIRE_VERSION
from services.worker.mesh.link import Backoff, Link

log = logging.getLogger(__name__)

REFUSED_SECONDS: Final = 60.0
"""Time until the next try after a router refused the stream."""


class PresenceStream:
    """Keeps the stream open. `changed` is set to send a heartbeat immediately."""

    def __init__(self, link: Link, changed: asyncio.Event) -> None:
        self._link = link
        self._changed = changed
        identity = link.identity
        self._request = worker_pb2.ConnectRequest(
            worker_id=identity.worker_id, epoch=identity.epoch, wire_version=WIRE_VERSION
        )

    async def run(self) -> None:
        backoff = Backoff()
        while True:
            try:
                await self._link.connect(self._request)
                backoff.reset()
            except NoCapacity as error:
                log.debug(
                    "the stream to a router broke; opening another",
                    extra=fields({"reason": error.message}),
                )
                self._changed.set()
                await asyncio.sleep(backoff.next())
            except InternalError:
                await asyncio.sleep(REFUSED_SECONDS)
