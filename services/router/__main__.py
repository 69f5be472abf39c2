"""`python -m services.router`: one router, until SIGTERM or Ctrl-C; then it drains and ends with status 0."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys

import uvloop

from libs.errors import ShoalError
from libs.queue import UnsuitableRedis
from libs.telemetry.logs import configure, fields
from services.router.app import running
from services.router.settings import Settings

log = logging.getLogger(__name__)


async def serve(settings: Settings) -> None:
    """Runs a router until a signal asks it to end. A second signal ends it at once."""
    asked_to_end = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, _end, asked_to_end, loop, number)
    async with running(settings):
        await asked_to_end.wait()


def _end(asked_to_end: asyncio.Event, loop: asyncio.AbstractEventLoop, number: signal.Signals) -> None:
    loop.remove_signal_handler(number)
    asked_to_end.set()


def main() -> int:
    """Exit status: 0 after a drain, 2 for what the operator must change."""
    status = 0
    try:
        settings = Settings.from_env(os.environ)
        configure("router", settings.log_level)
        log.info("starting", extra=fields(settings.describe()))
        uvloop.run(serve(settings))
    except* (ShoalError, UnsuitableRedis) as group:  # also those that a supervised loop ended with
        status = 2
        print(f"shoal router: {_first(group)}", file=sys.stderr)
    return status


def _first(error: BaseException) -> BaseException:
    return _first(error.exceptions[0]) if isinstance(error, BaseExceptionGroup) else error


if __name__ == "__main__":
    sys.exit(main())
