"""Shares one WatchMesh stream among all open pages. Without a page, the edge watches itself, for
events and the queue's history.

The stream uses the credential of one of the open pages. Each page's own credential is checked when
it connects and once a minute, so no page receives the mesh's state without the right to it. Without
a page, the edge watches every ten seconds without a credential, where routers require none. Where
they require one, events are not recorded while no page is open.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from typing import Any, Final

from shoal.errors import ShoalError
from shoal.transport.wire import Metadata
from shoal.v1 import mesh_pb2

from libs.serving.calls.call import new_request_id
from services.edge.activity.history import STEP_SECONDS
from services.edge.console.board import Board
from services.edge.messages.base import HttpError, encode_json

log = logging.getLogger(__name__)

MAX_PAGES: Final = 256
KEEP_ALIVE_SECONDS: Final = 15.0
"""The interval of keep-alive comments; proxies close streams that are silent for longer."""
CHECK_SECONDS: Final = 60.0
FIRST_PAUSE_SECONDS: Final = 0.5
MAX_PAUSE_SECONDS: Final = 10.0
WATCH_SECONDS: Final = 1.0
"""The interval of WatchMesh while a page is open; otherwise STEP_SECONDS."""
ANONYMOUS_CHECK_SECONDS: Final = 30.0
"""The interval at which the edge checks whether routers still require no credential."""
REFUSED: Final = ("UNAUTHENTICATED", "PERMISSION_DENIED")

Watch = Callable[[Metadata, float], AsyncGenerator[mesh_pb2.WatchMeshResponse]]
Allow = Callable[[Metadata], Awaitable[None]]
See = Callable[[mesh_pb2.Mesh, float], None]


@dataclass(eq=False, slots=True)
class _Page:
    """One open page. `refusal` is the error by which its credential became invalid."""

    metadata: Metadata
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    refusal: HttpError | None = None


class WatchHub:
    """Shares the watch of the mesh.

    Args:
        watch: Opens WatchMesh; raises ShoalError.
        allow: Asks a router whether a caller may watch; raises ShoalError.
        see: Receives each snapshot of the mesh and its Unix time.
        may_watch_anonymously: Returns whether routers are known to require no credential.
    """

    def __init__(
        self,
        watch: Watch,
        allow: Allow,
        see: See = lambda mesh, now: None,
        may_watch_anonymously: Callable[[], bool] = lambda: False,
    ) -> None:
        self._watch = watch
        self._allow = allow
        self._see = see
        self._may_watch_alone = may_watch_anonymously
        # The state: the board, the pages in order of arrival, the task that watches and the page
        # with the credential that it uses (None: no credential), whether it watches without pages,
        # and whether the edge is draining.
        self._board = Board()
        self._pages: list[_Page] = []
        self._watching: asyncio.Task[None] | None = None
        self._watcher: _Page | None = None
        self._is_started = False
        self._is_closed = False

    def start(self) -> None:
        """Watch from now on, with or without an open page."""
        self._is_started = True
        self._restart()

    @property
    def pages(self) -> int:
        return len(self._pages)

    async def events(self, metadata: Metadata, about: dict[str, Any]) -> AsyncIterator[bytes]:
        """Yield server-sent events for one page: everything, then the changes. The first event also
        has `about`. Raises ShoalError and HttpError at the start or later for a caller without
        permission.
        """
        if len(self._pages) >= MAX_PAGES:
            raise HttpError(
                "QUEUE_FULL", f"{MAX_PAGES} pages already watch the mesh here", retry_after=10.0
            )
        await self._allow(metadata)
        page = _Page(metadata)
        self._enter(page)
        try:
            number, checked = 0, time.monotonic()
            yield b"retry: 2000\nevent: about\ndata: " + encode_json(about) + b"\n\n"
            while not self._is_closed:
                if page.refusal is not None:
                    raise page.refusal
                page.changed.clear()
                changes = self._board.since(number)
                if changes is not None:
                    number = self._board.number
                    yield b"id: %d\nevent: mesh\ndata: %b\n\n" % (number, encode_json(changes))
                    continue
                try:
                    async with asyncio.timeout(KEEP_ALIVE_SECONDS):
                        await page.changed.wait()
                except TimeoutError:
                    yield b": still here\n\n"
                if time.monotonic() - checked > CHECK_SECONDS:
                    await self._check_again(metadata)
                    checked = time.monotonic()
            yield b"event: closing\ndata: {}\n\n"
        finally:
            self._leave(page)

    def close(self) -> None:
        """End all pages' streams because the edge is draining."""
        self._is_closed = True
        self._notify_pages()
        if self._watching is not None:
            self._watching.cancel()

    async def check(self, metadata: Metadata) -> None:
        """Raise ShoalError for a caller who may not watch the mesh."""
        await self._allow(metadata)

    async def _check_again(self, metadata: Metadata) -> None:
        """Raise ShoalError if the credential is now refused. An unreachable router is not a
        refusal.
        """
        try:
            await self._allow(metadata)
        except ShoalError as error:
            if error.code in REFUSED:
                raise

    def _enter(self, page: _Page) -> None:
        self._pages.append(page)
        if self._watcher is None:
            self._restart()

    def _leave(self, page: _Page) -> None:
        self._pages.remove(page)
        if page is self._watcher or not self._pages:
            self._restart()

    def _restart(self) -> None:
        """Restart the watch for another page or for the edge, or stop it."""
        if self._watching is not None:
            self._watching.cancel()
        self._watcher = None
        watches = bool(self._pages or self._is_started) and not self._is_closed
        self._watching = asyncio.create_task(self._watch_mesh()) if watches else None
        if not watches:
            self._board.pause()

    async def _watch_mesh(self) -> None:
        pause = FIRST_PAUSE_SECONDS
        while True:
            page = next((one for one in self._pages if one.refusal is None), None)
            self._watcher = page
            if page is None and not self._may_watch_alone():
                self._board.pause()
                await asyncio.sleep(ANONYMOUS_CHECK_SECONDS)
                continue
            metadata = page.metadata if page is not None else (("x-request-id", new_request_id()),)
            interval = WATCH_SECONDS if page is not None else STEP_SECONDS
            try:
                async with aclosing(self._watch(metadata, interval)) as snapshots:
                    async for look in snapshots:
                        now = time.time()
                        self._board.show(look.mesh, now)
                        self._see(look.mesh, now)
                        self._notify_pages()
                        pause = FIRST_PAUSE_SECONDS
            except ShoalError as error:
                if error.code in REFUSED and page is not None:
                    page.refusal = HttpError(error.reason, error.message)
                    page.changed.set()
                    continue
                self._board.fail(error.reason, error.message)
                pause = max(pause, ANONYMOUS_CHECK_SECONDS if error.code in REFUSED else 0.0)
            except Exception:
                log.exception("watching the mesh failed")
                self._board.fail("INTERNAL", "the mesh cannot be shown: see the edge's log")
            else:
                self._board.fail("CANNOT_CONNECT", "the router ended the watch")
            self._notify_pages()
            await asyncio.sleep(pause)
            pause = min(MAX_PAUSE_SECONDS, 2 * pause)

    def _notify_pages(self) -> None:
        for page in self._pages:
            page.changed.set()

    async def stop(self) -> None:
        """Wait until the watch has ended."""
        self.close()
        if self._watching is not None:
            with suppress(asyncio.CancelledError):
                await self._watching
