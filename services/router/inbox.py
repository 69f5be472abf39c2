"""Receive from other routers through Redis: answers to this router's jobs, generated text before
the answers, and notifications for its waiting pulls.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Final

from shoal.v1 import worker_pb2

from libs.errors import NoCapacity
from libs.queue import Lanes, WakeupLeft, WorkerWakeup
from services.router.lanes.dispatch import Dispatcher
from services.router.lanes.wakeups import Wakeups

REPLY_WAIT_SECONDS: Final = 2.0
RECONNECT_SECONDS: Final = 0.2
LISTEN_SECONDS: Final = 1.0


class Inbox:
    """Loops that end only when they are cancelled. They survive outages of Redis; any other error
    is a bug and stops the router.
    """

    def __init__(self, lanes: Lanes, wakeups: Wakeups, dispatcher: Dispatcher) -> None:
        self._lanes = lanes
        self._wakeups = wakeups
        self._dispatcher = dispatcher

    def take_replies(self) -> list[Coroutine[None, None, None]]:
        """Return one loop for each inbox. It delivers answers to this router's jobs that workers
        returned through other routers.
        """
        return [self._take_replies(inbox) for inbox in self._lanes.inboxes]

    async def _take_replies(self, inbox: int) -> None:
        while True:
            try:
                for job_id, result in await self._lanes.take_replies(REPLY_WAIT_SECONDS, inbox):
                    self._dispatcher.deliver(job_id, result)
            except NoCapacity:
                await asyncio.sleep(RECONNECT_SECONDS)

    async def receive_streamed(self) -> None:
        """Deliver generated text of this router's jobs from workers at other routers."""
        while True:
            try:
                async for parts in self._lanes.streamed_texts():
                    for part in worker_pb2.DeltasRequest.FromString(parts).deltas:
                        self._dispatcher.streamed(part)
            except NoCapacity:
                await asyncio.sleep(LISTEN_SECONDS)

    async def receive_wakeups(self) -> None:
        """Receive notifications from other routers."""
        while True:
            try:
                async for wakeup in self._lanes.wakeups():
                    if wakeup is None:
                        self._wakeups.wake_all()
                    elif isinstance(wakeup, WorkerWakeup):
                        self._wakeups.pending_pulls.notify_worker(wakeup.worker_id)
                    elif isinstance(wakeup, WakeupLeft):
                        self._wakeups.notify(wakeup.lane, is_new=False)
                    else:
                        self._wakeups.notify(wakeup)
            except NoCapacity:
                await asyncio.sleep(RECONNECT_SECONDS)
