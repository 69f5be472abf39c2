"""Background tasks that are cancelled together."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine


class Tasks:
    """Tasks of one owner in a task group. Event loop only."""

    def __init__(self, group: asyncio.TaskGroup) -> None:
        self._group = group
        self._running: set[asyncio.Task[None]] = set()

    def start(self, work: Coroutine[object, object, None]) -> asyncio.Task[None]:
        """Run `work` in the background."""
        task = self._group.create_task(work)
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        return task

    def cancel(self) -> None:
        """Cancel every task that still runs."""
        for task in self._running:
            task.cancel()
