"""Runs blocking work outside the event loop, each call on a thread of its own."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

_Answer = TypeVar("_Answer")


def begin(function: Callable[[], _Answer]) -> asyncio.Future[_Answer]:
    """Runs the function on a thread of its own: a daemon, because a load cannot be interrupted and
    must not delay process exit.
    """
    future: Future[_Answer] = Future()
    # so that a waiter that is cancelled does not cancel the future itself
    future.set_running_or_notify_cancel()

    def run() -> None:
        try:
            future.set_result(function())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name="load", daemon=True).start()
    return asyncio.wrap_future(future)


async def in_thread(function: Callable[[], _Answer]) -> _Answer:
    """Runs the function as `begin` does, and returns its result or raises its exception."""
    return await begin(function)
