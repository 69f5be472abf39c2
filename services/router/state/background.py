"""Work that must be finished after its call has ended: cancelling jobs, returning batches to their
lanes.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine

from libs.errors import ShoalError
from libs.telemetry.logs import fields

log = logging.getLogger(__name__)


class Background:
    """Tasks that outlive their callers. Their errors end here: a ShoalError is expected (Redis
    away), others are logged as bugs.
    """

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()

    def spawn(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(_supervised(work))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def finished(self) -> None:
        """Return when no task is left."""
        while self._tasks:
            await asyncio.wait(self._tasks)


async def _supervised(work: Coroutine[None, None, None]) -> None:
    try:
        await work
    except ShoalError as error:
        log.info(
            "background work given up",
            extra=fields({"reason": error.reason, "error": error.message}),
        )
    except Exception:
        log.exception("background work failed")
