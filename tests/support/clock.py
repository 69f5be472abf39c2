"""Clocks for tests of what happens over minutes and hours: one that jumps from event to event, and
one that runs fast.

Both have the same four methods, so that the same code runs on either: `FakeClock` when everything
in the test is ours to wait for, `FastClock` when other processes take part.
"""

from __future__ import annotations

import asyncio
import heapq
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextlib import AbstractContextManager, contextmanager
from itertools import count
from typing import Any, Protocol


class Clock(Protocol):
    """Seconds that only rise."""

    def now(self) -> float: ...

    async def sleep(self, seconds: float) -> None: ...

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run `work` in a task. Only spawned tasks may sleep."""
        ...

    def outside(self) -> AbstractContextManager[None]:
        """A context in which a spawned task waits for something that this clock does not move, such
        as a stream's next message.
        """
        ...


class FakeClock:
    """Jumps to the next sleeper's time once every spawned task sleeps: hours take what their events
    take, always in the same order.

    `settle` is awaited before each jump, for messages still on their way to a task that waits
    `outside`.
    """

    def __init__(
        self, start: float = 0.0, settle: Callable[[], Awaitable[None]] | None = None
    ) -> None:
        self._settle = settle
        self._numbers = count()
        # The state: the time, who sleeps until when, and how many tasks are at work.
        self._now = start
        self._sleepers: list[tuple[float, int, asyncio.Future[None], bool]] = []
        self._at_work = 0
        self._quiet = asyncio.Event()
        self._quiet.set()

    def now(self) -> float:
        return self._now

    async def sleep(self, seconds: float) -> None:
        wake = self._alarm(seconds, is_spawned=True)
        self._rest()
        try:
            await wake  # whoever sets it counts the task as at work
        except asyncio.CancelledError:
            if wake.cancelled():
                self._work()
            raise

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        self._work()
        task = asyncio.create_task(work)
        task.add_done_callback(lambda _: self._rest())
        return task

    @contextmanager
    def outside(self) -> Iterator[None]:
        self._rest()
        try:
            yield
        finally:
            self._work()

    async def wait(self, seconds: float) -> None:
        """`sleep` for tasks that were not spawned: the clock does not wait for their later work."""
        await self._alarm(seconds, is_spawned=False)

    async def run(self, seconds: float) -> None:
        """Let `seconds` pass. A task that neither sleeps nor is `outside` stops the clock."""
        end = self._now + seconds
        await self._all_quiet()
        while self._sleepers and self._sleepers[0][0] <= end:
            at, _, wake, is_spawned = heapq.heappop(self._sleepers)
            if wake.done():
                continue
            self._now = at
            if is_spawned:
                self._work()
            wake.set_result(None)
            await self._all_quiet()
        self._now = end

    def _alarm(self, seconds: float, *, is_spawned: bool) -> asyncio.Future[None]:
        wake: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        heapq.heappush(
            self._sleepers, (self._now + max(0.0, seconds), next(self._numbers), wake, is_spawned)
        )
        return wake

    async def _all_quiet(self) -> None:
        await self._quiet.wait()
        if self._settle is not None:
            await self._settle()
            await self._quiet.wait()

    def _work(self) -> None:
        self._at_work += 1
        self._quiet.clear()

    def _rest(self) -> None:
        self._at_work -= 1
        if self._at_work == 0:
            self._quiet.set()


class FastClock:
    """Real time, `factor` times as fast."""

    def __init__(self, factor: float) -> None:
        self.factor = factor
        self._start = time.monotonic()

    def now(self) -> float:
        return (time.monotonic() - self._start) * self.factor

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds / self.factor)

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        return asyncio.create_task(work)

    @contextmanager
    def outside(self) -> Iterator[None]:
        yield
