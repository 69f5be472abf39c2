"""Follows the mesh in the background: a stream of snapshots from a router, opened again when the
router is lost.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Self

from rich.console import RenderableType
from rich.text import Text

from shoal.cli.top.drawing import drawn
from shoal.cli.top.history import MeshHistory, Snapshot
from shoal.client import Client
from shoal.errors import InvalidInput, PermissionDenied, ShoalError, TlsFailed, Unauthenticated

_RETRY_SECONDS = 0.5
_STALE_INTERVALS = 3
"""Number of intervals without a newer snapshot after which a snapshot is stale."""
# Errors that another try does not resolve.
_FINAL = (InvalidInput, PermissionDenied, TlsFailed, Unauthenticated)


def snapshots(
    client: Client, interval: float, pool: str, pause: Callable[[float], bool]
) -> Iterator[Snapshot | ShoalError]:
    """Yield an endless stream of snapshots, and of the errors between them. After an error it waits
    by `pause` and tries again, unless that returns True. Raises ShoalError if another try cannot
    help.
    """
    history = MeshHistory()
    while True:
        try:
            for mesh in client.watch(interval):
                snapshot = history.add(mesh, time.monotonic())
                yield snapshot.for_pool(pool) if pool else snapshot
        except _FINAL:
            raise
        except ShoalError as error:
            yield error
        if pause(_RETRY_SECONDS):
            return


class Watcher:
    """Follows the mesh on a thread, so that neither the screen nor the keyboard waits for a router.

    `on_update` is called there with each snapshot or error. `failure`: the error that ended the
    thread.
    """

    def __init__(
        self,
        client: Client,
        interval: float,
        pool: str,
        on_update: Callable[[Snapshot | ShoalError], None] = lambda _: None,
    ) -> None:
        self._client, self._interval, self._pool, self._on_update = (
            client,
            interval,
            pool,
            on_update,
        )
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watch")
        # Written by the thread: the last snapshot, when it arrived, and the error since then.
        self._snapshot: Snapshot | None = None
        self._received_at = time.monotonic()
        self._problem = ""
        self.failure: ShoalError | None = None

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._closing.set()
        self._client.close()
        self._thread.join()

    def view(self, width: int, height: int) -> RenderableType:
        """Return the last snapshot, with a notice if it is stale."""
        snapshot, age = self._snapshot, time.monotonic() - self._received_at
        if snapshot is None:
            return Text(
                f"{self._client.address}: {self._problem or 'waiting for the first snapshot'}"
            )
        head = header(self._client, snapshot, self._pool)
        if age > _STALE_INTERVALS * self._interval + _RETRY_SECONDS:
            head.append(
                (
                    f"\nSTALE, {age:.0f} s old: {self._problem or 'the router sends nothing'}; "
                    "trying again"
                ),
                style="bold red",
            )
        return drawn(snapshot, head, width, height)

    def _run(self) -> None:
        try:
            for update in snapshots(self._client, self._interval, self._pool, self._closing.wait):
                self._on_update(update)
                if isinstance(update, ShoalError):
                    self._problem = update.message
                else:
                    self._snapshot, self._received_at, self._problem = update, time.monotonic(), ""
        except ShoalError as error:
            self.failure = error
        except RuntimeError:
            if not self._closing.is_set():  # else the client was closed just before the next try
                raise


def header(client: Client, snapshot: Snapshot, pool: str) -> Text:
    """Return one line: the router that answers, and the scheduler that leads."""
    leader = (
        f"scheduler {snapshot.scheduler_id} leads"
        if snapshot.scheduler_id
        else "no scheduler leads"
    )
    head = Text.assemble(
        ("shoal top", "bold"),
        f"  {time.strftime('%H:%M:%S')}  router {snapshot.router_id}, {leader}",
    )
    if pool and not snapshot.pools:
        head.append(f"\nthe mesh has no pool {pool!r}", style="yellow")
    return head
