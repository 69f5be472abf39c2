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
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._end)

    async def finished(self) -> None:
        """Return when no task is left."""
        while self._tasks:
            await asyncio.wait(self._tasks)

    def _end(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if isinstance(error, ShoalError):
            log.info(
                "background work given up",
                extra=fields({"reason": error.reason, "error": error.message}),
            )
        elif error is not None:
            log.error("background work failed", exc_info=error)
