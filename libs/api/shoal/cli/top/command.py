"""`shoal top`: shows the mesh, refreshed every second."""

from __future__ import annotations

import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from queue import Empty, SimpleQueue
from typing import Annotated

import typer
from rich.live import Live

from shoal.cli.console import WIDTH, SafeConsole, emit, note, show
from shoal.cli.options import OpenClient, connected
from shoal.cli.top.drawing import drawn
from shoal.cli.top.history import Snapshot
from shoal.cli.top.watcher import Watcher, header
from shoal.client import Client
from shoal.errors import ShoalError

if sys.platform != "win32":
    import termios
    import tty

_REDRAW_SECONDS = 0.25
_ONCE_SNAPSHOTS = 2
"""Snapshots that `--once` waits for: rates need two."""


@connected
def top(
    open_client: OpenClient,
    once: Annotated[
        bool, typer.Option("--once", help="Print one snapshot, after an interval, and stop.")
    ] = False,
    pool: Annotated[str, typer.Option(help="Show only this pool.")] = "",
    interval: Annotated[
        float, typer.Option(min=0.2, max=60, help="Seconds between two snapshots.")
    ] = 1.0,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print a line of JSON for each snapshot, for programs.")
    ] = False,
) -> None:
    """Watch the mesh: pools, workers, lanes and models, with rates over the last ten seconds. q or
    Ctrl-C ends it.
    """
    if not (once or as_json or sys.stdout.isatty()):
        raise typer.BadParameter("stdout is not a terminal: use --once or --json")
    client = open_client()
    with _interruptible() as is_interrupted:
        if once or as_json:
            _print(client, interval, pool, once, as_json, is_interrupted)
        else:
            _live(client, interval, pool, is_interrupted)


def _print(
    client: Client,
    interval: float,
    pool: str,
    once: bool,
    as_json: bool,
    is_interrupted: Callable[[], bool],
) -> None:
    is_lost, count = False, 0
    updates = SimpleQueue[Snapshot | ShoalError]()
    with Watcher(client, interval, pool, updates.put) as watcher:
        while not is_interrupted():
            try:
                update = updates.get(timeout=_REDRAW_SECONDS)
            except Empty:
                if watcher.failure is not None:
                    raise watcher.failure from None
                continue
            if isinstance(update, ShoalError):
                if once:
                    raise update
                if not is_lost:
                    note(f"{update.message}; trying again until it answers")
                is_lost = True
                continue
            if is_lost:
                note(f"router {update.router_id} answers again")
            is_lost, count = False, count + 1
            if once and count < _ONCE_SNAPSHOTS:
                continue
            if as_json:
                emit({"address": client.address, "unix_seconds": time.time()} | asdict(update))
                sys.stdout.flush()
            else:
                show(
                    drawn(
                        update,
                        header(client, update, pool),
                        SafeConsole().width if sys.stdout.isatty() else WIDTH,
                    )
                )
            if once:
                return


@contextmanager
def _interruptible() -> Iterator[Callable[[], bool]]:
    """Yield a function that returns whether Ctrl-C was pressed.

    A signal handler is used because a KeyboardInterrupt that is raised in a destructor is printed
    and then lost.
    """
    pressed = threading.Event()
    before = signal.signal(signal.SIGINT, lambda *_: pressed.set())
    try:
        yield pressed.is_set
    finally:
        signal.signal(signal.SIGINT, before)


def _live(client: Client, interval: float, pool: str, is_interrupted: Callable[[], bool]) -> None:
    console = SafeConsole()
    with (
        Watcher(client, interval, pool) as watcher,
        _keys() as is_quit,
        Live(console=console, screen=True, auto_refresh=False) as live,
    ):
        while watcher.failure is None:
            live.update(watcher.view(console.width, console.height), refresh=True)
            if is_quit(_REDRAW_SECONDS) or is_interrupted():
                return
    raise watcher.failure


@contextmanager
def _keys() -> Iterator[Callable[[float], bool]]:
    """Yield a function that waits the given seconds for a key and returns True for q. Without a
    keyboard it only waits.
    """
    if sys.platform == "win32" or not sys.stdin.isatty():
        yield threading.Event().wait  # of an event that is never set
        return
    before = termios.tcgetattr(sys.stdin)
    tty.setcbreak(sys.stdin)
    try:
        yield _is_quit
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)


def _is_quit(seconds: float) -> bool:
    ready, _, _ = select.select([sys.stdin], [], [], seconds)
    if not ready:
        return False
    keys = os.read(sys.stdin.fileno(), 64)
    return not keys or b"q" in keys.lower()  # end of file: the terminal was closed
