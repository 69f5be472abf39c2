"""Liveness: keeps one stream open to a router; while it is open the routers know that this process
lives.

Not on the request path. When the process dies its stream breaks, and its leased jobs are given to
other workers at once; when the stream breaks and the process lives, the worker sends a heartbeat
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
"""Time until the next try after a router has refused the stream: those of before wire version 3 do
not know it.
"""


class Presence:
    """`run` until it is cancelled. `changed`: set to send a heartbeat at once."""

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
                    "the stream to a router broke: another one is opened",
                    extra=fields({"reason": error.message}),
                )
                self._changed.set()
                await asyncio.sleep(backoff.next())
            except InternalError:
                await asyncio.sleep(REFUSED_SECONDS)
