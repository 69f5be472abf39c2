"""`shoal top`: the mesh as it is, again every second."""

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
from types import TracebackType
from typing import Annotated, Self

import typer
from rich.console import RenderableType
from rich.live import Live
from rich.text import Text

from shoal.cli.console import WIDTH, Console, emit, note, show
from shoal.cli.options import Reach, connected
from shoal.cli.picture import History, Picture
from shoal.cli.screen import drawn
from shoal.client import Client
from shoal.errors import InvalidInput, PermissionDenied, ShoalError, TlsFailed, Unauthenticated

if sys.platform != "win32":
    import termios
    import tty

_AGAIN_SECONDS = 0.5
_REDRAW_SECONDS = 0.25
_LATE_INTERVALS = 3
"""A picture is old when so many further ones should have come."""
_LOOKS_AT_ONCE = 2
"""Of `--once`: rates need two looks."""
# A router that answers so will do so again.
_FINAL = (InvalidInput, PermissionDenied, TlsFailed, Unauthenticated)


@connected
def top(
    mesh: Reach,
    once: Annotated[bool, typer.Option("--once", help="Print one picture, after an interval, and stop.")] = False,
    pool: Annotated[str, typer.Option(help="Show only this pool.")] = "",
    interval: Annotated[float, typer.Option(min=0.2, max=60, help="Seconds between two looks.")] = 1.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print a line of JSON for each look, for programs.")] = False,
) -> None:
    """Watch the mesh: pools, workers, lanes and models, with rates over the last ten seconds. q or Ctrl-C ends it."""
    if not (once or as_json or sys.stdout.isatty()):
        raise typer.BadParameter("there is no terminal to draw on: use --once or --json")
    client = mesh()
    with _interruptible() as is_interrupted:
        if once or as_json:
            _print(client, interval, pool, once, as_json, is_interrupted)
        else:
            _live(client, interval, pool, is_interrupted)


def looks(client: Client, interval: float, pool: str, pause: Callable[[float], bool]) -> Iterator[Picture | ShoalError]:
    """Pictures without end, and in between why there is none; the router is asked for again after a `pause`, unless that is true.

    Raises ShoalError where asking again cannot help.
    """
    history = History()
    while True:
        try:
            for mesh in client.watch(interval):
                picture = history.add(mesh, time.monotonic())
                yield picture.of_pool(pool) if pool else picture
        except _FINAL:
            raise
        except ShoalError as error:
            yield error
        if pause(_AGAIN_SECONDS):
            return


def _print(client: Client, interval: float, pool: str, once: bool, as_json: bool, is_interrupted: Callable[[], bool]) -> None:
    is_away, seen = False, 0
    found = SimpleQueue[Picture | ShoalError]()
    with _Watcher(client, interval, pool, found.put) as watcher:
        while not is_interrupted():
            try:
                look = found.get(timeout=_REDRAW_SECONDS)
            except Empty:
                if watcher.failure is not None:
                    raise watcher.failure from None
                continue
            if isinstance(look, ShoalError):
                if once:
                    raise look
                if not is_away:
                    note(f"{look.message}; asking again until it is there")
                is_away = True
                continue
            if is_away:
                note(f"router {look.router_id} is back")
            is_away, seen = False, seen + 1
            if once and seen < _LOOKS_AT_ONCE:
                continue
            if as_json:
                emit({"address": client.address, "unix_seconds": time.time()} | asdict(look))
                sys.stdout.flush()
            else:
                show(drawn(look, _head(client, look, pool), Console().width if sys.stdout.isatty() else WIDTH))
            if once:
                return


@contextmanager
def _interruptible() -> Iterator[Callable[[], bool]]:
    """Says whether Ctrl-C was pressed. As an exception it can be lost: one raised in a destructor is printed and forgotten."""
    pressed = threading.Event()
    before = signal.signal(signal.SIGINT, lambda *_: pressed.set())
    try:
        yield pressed.is_set
    finally:
        signal.signal(signal.SIGINT, before)


def _live(client: Client, interval: float, pool: str, is_interrupted: Callable[[], bool]) -> None:
    console = Console()
    with (
        _Watcher(client, interval, pool) as watcher,
        _keys() as is_quit,
        Live(console=console, screen=True, auto_refresh=False) as live,
    ):
        while watcher.failure is None:
            live.update(watcher.view(console.width, console.height), refresh=True)
            if is_quit(_REDRAW_SECONDS) or is_interrupted():
                return
    raise watcher.failure


class _Watcher:
    """Looks at the mesh on a thread of its own, so that neither the screen nor the keyboard waits for a router.

    `told` is given each look there. `failure`: why it has ended.
    """

    def __init__(
        self, client: Client, interval: float, pool: str, told: Callable[[Picture | ShoalError], None] = lambda _: None
    ) -> None:
        self._client, self._interval, self._pool, self._told = client, interval, pool, told
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watch")
        # Written by the thread: the last picture and when it came; why there is none now.
        self._picture: Picture | None = None
        self._seen_at = time.monotonic()
        self._problem = ""
        self.failure: ShoalError | None = None

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._closing.set()
        self._client.close()
        self._thread.join()

    def view(self, width: int, height: int) -> RenderableType:
        """The last picture; when others should have come since, with a notice."""
        picture, age = self._picture, time.monotonic() - self._seen_at
        if picture is None:
            return Text(f"{self._client.address}: {self._problem or 'waiting for the first look'}")
        head = _head(self._client, picture, self._pool)
        if age > _LATE_INTERVALS * self._interval + _AGAIN_SECONDS:
            head.append(f"\nSTALE, {age:.0f} s old: {self._problem or 'the router is silent'}; asking again", style="bold red")
        return drawn(picture, head, width, height)

    def _run(self) -> None:
        try:
            for look in looks(self._client, self._interval, self._pool, self._closing.wait):
                self._told(look)
                if isinstance(look, ShoalError):
                    self._problem = look.message
                else:
                    self._picture, self._seen_at, self._problem = look, time.monotonic(), ""
        except ShoalError as error:
            self.failure = error
        except RuntimeError:
            if not self._closing.is_set():  # else the client was closed as it was about to ask again
                raise


def _head(client: Client, picture: Picture, pool: str) -> Text:
    """One line: who tells, and who leads."""
    leader = f"scheduler {picture.scheduler_id} leads" if picture.scheduler_id else "no scheduler leads"
    head = Text.assemble(("shoal top", "bold"), f"  {time.strftime('%H:%M:%S')}  router {picture.router_id}, {leader}")
    if pool and not picture.pools:
        head.append(f"\nthere is no pool {pool!r}", style="yellow")
    return head


@contextmanager
def _keys() -> Iterator[Callable[[float], bool]]:
    """Gives what waits so many seconds for a key, and says whether it was q. Without a keyboard it only waits."""
    if sys.platform == "win32" or not sys.stdin.isatty():
        yield threading.Event().wait  # which nobody sets
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
    return not keys or b"q" in keys.lower()  # a keyboard that ends is gone, and so is who watched
