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
from services.edge.console.board import Board
from services.edge.messages.base import HttpError, json_of
from services.edge.past.history import STEP_SECONDS

log = logging.getLogger(__name__)

MAX_PAGES: Final = 256
HEARTBEAT_SECONDS: Final = 15.0
"""A page hears at least so often that the stream lives; proxies close what is silent for longer."""
CHECK_SECONDS: Final = 60.0
FIRST_PAUSE_SECONDS: Final = 0.5
MAX_PAUSE_SECONDS: Final = 10.0
WATCH_SECONDS: Final = 1.0
"""The interval of WatchMesh while a page is open; otherwise STEP_SECONDS."""
ALONE_PAUSE_SECONDS: Final = 30.0
"""The interval at which the edge checks whether routers still require no credential."""
REFUSED: Final = ("UNAUTHENTICATED", "PERMISSION_DENIED")

Watch = Callable[[Metadata, float], AsyncGenerator[mesh_pb2.WatchMeshResponse]]
Allow = Callable[[Metadata], Awaitable[None]]
See = Callable[[mesh_pb2.Mesh, float], None]


@dataclass(eq=False, slots=True)
class _Page:
    """One open page. `refusal`: why its credential no longer lets it look on."""

    metadata: Metadata
    news: asyncio.Event = field(default_factory=asyncio.Event)
    refusal: HttpError | None = None


class Hub:
    """`watch` opens WatchMesh, `allow` asks a router whether a caller may; both raise ShoalError.
    `see` is given each look at the mesh, and the time since 1970. `may_watch_alone`: whether
    routers ask for no credential, as far as is known."""

    def __init__(
        self,
        watch: Watch,
        allow: Allow,
        see: See = lambda mesh, now: None,
        may_watch_alone: Callable[[], bool] = lambda: False,
    ) -> None:
        self._watch = watch
        self._allow = allow
        self._see = see
        self._may_watch_alone = may_watch_alone
        # The state: what is shown, the pages in the order in which they came, the task that watches
        # and the page in whose name it does (None: the edge's own), whether it watches without
        # pages, and whether the edge drains.
        self._board = Board()
        self._pages: list[_Page] = []
        self._watching: asyncio.Task[None] | None = None
        self._watcher: _Page | None = None
        self._is_started = False
        self._is_closed = False

    def start(self) -> None:
        """Watch from now on, whether or not a page is open."""
        self._is_started = True
        self._restart()

    @property
    def pages(self) -> int:
        return len(self._pages)

    async def events(self, metadata: Metadata, about: dict[str, Any]) -> AsyncIterator[bytes]:
        """Server-sent events for one page: everything, then what changes. The first has `about`,
        too. Raises ShoalError and Problem for a caller who may not look, at the beginning or
        later."""
        if len(self._pages) >= MAX_PAGES:
            raise HttpError(
                "QUEUE_FULL", f"{MAX_PAGES} pages look at the mesh here already", retry_after=10.0
            )
        await self._allow(metadata)
        page = _Page(metadata)
        self._enter(page)
        try:
            number, checked = 0, time.monotonic()
            yield b"retry: 2000\nevent: about\ndata: " + json_of(about) + b"\n\n"
            while not self._is_closed:
                if page.refusal is not None:
                    raise page.refusal
                page.news.clear()
                told = self._board.since(number)
                if told is not None:
                    number = self._board.number
                    yield b"id: %d\nevent: mesh\ndata: %b\n\n" % (number, json_of(told))
                    continue
                try:
                    async with asyncio.timeout(HEARTBEAT_SECONDS):
                        await page.news.wait()
                except TimeoutError:
                    yield b": still here\n\n"
                if time.monotonic() - checked > CHECK_SECONDS:
                    await self._check_again(metadata)
                    checked = time.monotonic()
            yield b"event: closing\ndata: {}\n\n"
        finally:
            self._leave(page)

    def close(self) -> None:
        """Ends all pages' streams: the edge drains."""
        self._is_closed = True
        self._tell()
        if self._watching is not None:
            self._watching.cancel()

    async def check(self, metadata: Metadata) -> None:
        """Raises ShoalError for a caller who may not look at the mesh."""
        await self._allow(metadata)

    async def _check_again(self, metadata: Metadata) -> None:
        """Raises ShoalError if the credential is refused by now; that no router answers is no
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
        """Watch on in the name of another page or of the edge, or not at all."""
        if self._watching is not None:
            self._watching.cancel()
        self._watcher = None
        watches = bool(self._pages or self._is_started) and not self._is_closed
        self._watching = asyncio.create_task(self._look()) if watches else None
        if not watches:
            self._board.rest()

    async def _look(self) -> None:
        pause = FIRST_PAUSE_SECONDS
        while True:
            page = next((one for one in self._pages if one.refusal is None), None)
            self._watcher = page
            if page is None and not self._may_watch_alone():
                self._board.rest()
                await asyncio.sleep(ALONE_PAUSE_SECONDS)
                continue
            metadata = page.metadata if page is not None else (("x-request-id", new_request_id()),)
            interval = WATCH_SECONDS if page is not None else STEP_SECONDS
            try:
                async with aclosing(self._watch(metadata, interval)) as snapshots:
                    async for look in snapshots:
                        now = time.time()
                        self._board.show(look.mesh, now)
                        self._see(look.mesh, now)
                        self._tell()
                        pause = FIRST_PAUSE_SECONDS
            except ShoalError as error:
                if error.code in REFUSED and page is not None:
                    page.refusal = HttpError(error.reason, error.message)
                    page.news.set()
                    continue
                self._board.fail(error.reason, error.message)
                pause = max(pause, ALONE_PAUSE_SECONDS if error.code in REFUSED else 0.0)
            except Exception:
                log.exception("the watch of the mesh failed")
                self._board.fail("INTERNAL", "the mesh could not be shown: the edge's log says why")
            else:
                self._board.fail("CANNOT_CONNECT", "the router ended the watch")
            self._tell()
            await asyncio.sleep(pause)
            pause = min(MAX_PAUSE_SECONDS, 2 * pause)

    def _tell(self) -> None:
        for page in self._pages:
            page.news.set()

    async def stop(self) -> None:
        """Waits for the watch to end."""
        self.close()
        if self._watching is not None:
            with suppress(asyncio.CancelledError):
                await self._watching
