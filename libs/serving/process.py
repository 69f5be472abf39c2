"""The lifecycle of a serving process: reads settings from the environment, sets up logs, and runs
the service until a signal.
"""

from __future__ import annotations

import asyncio
import logging
import os
import resource
import signal
import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager
from typing import Protocol, TypeVar

import uvloop

from libs import memory
from libs.errors import ShoalError
from libs.telemetry import traces
from libs.telemetry.logs import configure, fields

log = logging.getLogger(__name__)

MAX_OPEN_FILES = 65_536
"""The soft limit of open files to ask for: each connection is one, and many systems allow 1,024
unless a process asks for more.
"""


class ServiceSettings(Protocol):
    """The settings of a service, as far as `run` uses them."""

    @property
    def log_level(self) -> str: ...

    @property
    def instance(self) -> str:
        """The id that distinguishes this process from others of its service."""

    def describe(self) -> Mapping[str, str | float]:
        """Return the settings for the one log line at the start, without secrets."""


_Settings = TypeVar("_Settings", bound=ServiceSettings)
Running = Callable[[_Settings], AbstractAsyncContextManager[object]]


def run(
    name: str,
    read: Callable[[Mapping[str, str]], _Settings],
    running: Running[_Settings],
    *refusals: type[Exception],
) -> int:
    """Run a service within its context until SIGTERM or Ctrl-C; a second signal ends it at once.

    Exit status: 0 after a drain; 2 for a fault that the operator must fix, raised by `read` or
    `running` as a ShoalError or one of `refusals`.
    """
    status = 0
    refused: tuple[type[Exception], ...] = (ShoalError, *refusals)
    try:
        settings = read(os.environ)
        configure(name, settings.log_level)
        traces.start(name, settings.instance, os.environ)
        _allow_connections()
        memory.limit_heaps(heaps=1)
        memory.freeze()
        log.info("starting", extra=fields(settings.describe()))
        uvloop.run(_until_signalled(settings, running))
    except* refused as group:  # also from a supervised loop
        status = 2
        print(f"shoal {name}: {_first(group)}", file=sys.stderr)
    finally:
        traces.stop()
    return status


def _allow_connections() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


async def _until_signalled(settings: _Settings, running: Running[_Settings]) -> None:
    signalled = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, _end, signalled, loop, number)
    tidying = loop.create_task(memory.tidy())
    async with running(settings):
        await signalled.wait()
    tidying.cancel()


def _end(signalled: asyncio.Event, loop: asyncio.AbstractEventLoop, number: signal.Signals) -> None:
    loop.remove_signal_handler(number)
    signalled.set()


def _first(error: BaseException) -> BaseException:
    return _first(error.exceptions[0]) if isinstance(error, BaseExceptionGroup) else error
