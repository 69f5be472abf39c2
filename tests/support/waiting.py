"""Waiting for something to become true, instead of sleeping and hoping."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any


def wait_until(
    predicate: Callable[[], bool], timeout: float = 60.0, what: str = "the condition"
) -> None:
    """Returns once `predicate()` is true; fails after `timeout` seconds, naming `what`.

    The timeout only bounds a hang: on a busy machine any step may take seconds.
    """
    end = time.monotonic() + timeout
    while not predicate():
        if time.monotonic() > end:
            raise AssertionError(f"waited {timeout:g} s for {what}")
        time.sleep(0.02)


def rounds(most: int, what: str) -> Iterator[int]:
    """Yield round numbers until the caller breaks off; fail after `most` rounds, naming `what`.

    For conditions that a machine without a free core can prevent in one round, but not in each.
    """
    yield from range(most)
    raise AssertionError(f"not once in {most} rounds: {what}")


async def end_tasks(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """Cancel tasks until all have ended: redis-py may swallow a cancellation that arrives together
    with a reply.
    """
    while unfinished := [task for task in tasks if not task.done()]:
        for task in unfinished:
            task.cancel()
        await asyncio.wait(unfinished, timeout=0.2)
