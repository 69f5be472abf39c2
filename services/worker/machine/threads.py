"""Blocking work beside the event loop, each on a thread of its own."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

_Answer = TypeVar("_Answer")


def begin(function: Callable[[], _Answer]) -> asyncio.Future[_Answer]:
    """Runs on a thread of its own: a daemon, because a load cannot be interrupted and must not hold up the end of the process."""
    future: Future[_Answer] = Future()
    future.set_running_or_notify_cancel()  # so that who stops waiting for it does not take its result's place

    def run() -> None:
        try:
            future.set_result(function())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name="load", daemon=True).start()
    return asyncio.wrap_future(future)


async def in_thread(function: Callable[[], _Answer]) -> _Answer:
    """Its result, or what it raised."""
    return await begin(function)
