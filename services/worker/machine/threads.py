"""Runs blocking work outside the event loop, each call on a new thread."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

_Answer = TypeVar("_Answer")


def begin(function: Callable[[], _Answer]) -> asyncio.Future[_Answer]:
    """Run the function on a new daemon thread, and return a future of its result. A daemon thread,
    because a load cannot be interrupted and must not delay the end of the process.
    """
    return asyncio.wrap_future(begin_without_loop(function))


def begin_without_loop(function: Callable[[], _Answer]) -> Future[_Answer]:
    """Run the function as `begin` does, for a caller on a thread without an event loop."""
    future: Future[_Answer] = Future()
    # Mark the future as running, so that cancelling a waiter does not cancel the future itself.
    future.set_running_or_notify_cancel()

    def run() -> None:
        try:
            future.set_result(function())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name="load", daemon=True).start()
    return future


async def in_thread(function: Callable[[], _Answer]) -> _Answer:
    """Run the function as `begin` does, and return its result or raise its exception."""
    return await begin(function)
