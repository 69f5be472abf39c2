"""What other routers send this one through Redis: answers to its jobs, what is written of them
meanwhile, and bells for its waiting pulls."""

from __future__ import annotations

import asyncio
from typing import Final

from shoal.v1 import worker_pb2

from libs.errors import NoCapacity
from libs.queue import Lanes, WakeupLeft, WorkerWakeup
from services.router.lanes.bells import Wakeups
from services.router.lanes.dispatch import Dispatcher

REPLY_WAIT_SECONDS: Final = 2.0
RECONNECT_SECONDS: Final = 0.2
LISTEN_SECONDS: Final = 1.0


class Inbox:
    """Three loops that end only when they are cancelled. Redis may come and go; any other error is
    a bug and stops the router.
    """

    def __init__(self, lanes: Lanes, bells: Wakeups, dispatcher: Dispatcher) -> None:
        self._lanes = lanes
        self._bells = bells
        self._dispatcher = dispatcher

    async def take_replies(self) -> None:
        """Delivers answers to this router's jobs that workers returned through other routers."""
        while True:
            try:
                for job_id, result in await self._lanes.take_replies(REPLY_WAIT_SECONDS):
                    self._dispatcher.deliver(job_id, result)
            except NoCapacity:
                await asyncio.sleep(RECONNECT_SECONDS)

    async def receive_written(self) -> None:
        """Delivers what models have written of this router's jobs on workers of other routers. A
        user of Redis whose rights are of before 2026-11-24 may not listen: then texts come with the
        answers alone."""
        while True:
            try:
                async for parts in self._lanes.written():
                    for part in worker_pb2.WrittenRequest.FromString(parts).texts:
                        self._dispatcher.written(part)
            except NoCapacity:
                await asyncio.sleep(LISTEN_SECONDS)

    async def receive_bells(self) -> None:
        """Receives the bells that other routers ring."""
        while True:
            try:
                async for bell in self._lanes.bells():
                    if bell is None:
                        self._bells.ring_all()
                    elif isinstance(bell, WorkerWakeup):
                        self._bells.waiters.ring_worker(bell.worker_id)
                    elif isinstance(bell, WakeupLeft):
                        self._bells.ring(bell.lane, is_new=False)
                    else:
                        self._bells.ring(bell)
            except NoCapacity:
                await asyncio.sleep(RECONNECT_SECONDS)
