"""The proxy imposes exactly the requested behaviour on a connection."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from tests.chaos.links import CUT, PASS, Direction, Links, narrow, silent, slow

LINK, NOBODY = "a>b", "c>d"


@asynccontextmanager
async def linked() -> AsyncIterator[Links]:
    """Yield a link to an echo server, and one to a closed port."""

    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(65536):
                writer.write(data)
        except ConnectionError:
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(echo, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with server, Links({LINK: f"127.0.0.1:{port}", NOBODY: "127.0.0.1:9"}) as links:
        yield links


class Caller:
    """A connection through a link."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    @classmethod
    @asynccontextmanager
    async def connect(cls, links: Links, name: str = LINK) -> AsyncIterator[Caller]:
        caller = cls(*await asyncio.open_connection("127.0.0.1", links.ports[name]))
        try:
            yield caller
        finally:
            caller.writer.close()

    async def trip(self, data: bytes = b"x") -> float:
        """Seconds until the data are back."""
        begin = time.monotonic()
        self.writer.write(data)
        async with asyncio.timeout(60):
            assert await self.reader.readexactly(len(data)) == data
        return time.monotonic() - begin

    async def ends(self) -> None:
        """Wait until the connection has been reset."""
        async with asyncio.timeout(60):
            with pytest.raises(ConnectionResetError):
                await self.reader.read(1)


async def test_data_passes_complete_and_in_order() -> None:
    async with linked() as links, Caller.connect(links) as caller:
        await caller.trip(bytes(range(256)) * 8192)
        caller.writer.write_eof()
        assert await caller.reader.read() == b""


@pytest.mark.parametrize("direction", ["both", "up", "down"])
async def test_silent_link_loses_no_data_and_accepts_no_connection(direction: Direction) -> None:
    async with linked() as links, Caller.connect(links) as caller:
        await caller.trip()
        await links.set([LINK], silent(direction))
        trip = asyncio.create_task(caller.trip())
        async with Caller.connect(links) as late:
            late.writer.write(b"x")
            assert not (await asyncio.wait([trip], timeout=0.3))[0]
            # The kernel makes a connection before the proxy sees it.
            async with asyncio.timeout(60):
                while await links.set([LINK], silent(direction)) < 2:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
            await links.set([LINK], PASS)
            assert await trip >= 0.3
            await late.ends()
        await caller.trip()


async def is_reset(links: Links, name: str) -> None:
    """A new connection ends at once, which may be seen before it is made."""
    with pytest.raises(ConnectionResetError):
        async with Caller.connect(links, name) as caller, asyncio.timeout(60):
            await caller.reader.read(1)


async def test_cut_link_resets_old_and_new_connections() -> None:
    async with linked() as links, Caller.connect(links) as caller:
        await caller.trip()
        await links.set([LINK], CUT)
        await caller.ends()
        await is_reset(links, LINK)
        await links.set([LINK], PASS)
        async with Caller.connect(links) as again:
            await again.trip()


async def test_slow_and_narrow_links_take_their_time_and_keep_order() -> None:
    async with linked() as links, Caller.connect(links) as caller:
        await links.set([LINK], slow(0.1, 0.05))
        assert await caller.trip(bytes(range(256)) * 2048) >= 0.2
        await links.set([LINK], narrow(100_000))
        assert await caller.trip(bytes(20_000)) >= 0.2
        await links.set([LINK], PASS)
        await caller.trip()


async def test_link_to_a_closed_port_resets() -> None:
    async with linked() as links:
        await is_reset(links, NOBODY)


async def test_links_are_chosen_by_either_end() -> None:
    async with linked() as links:
        assert links.matching("a>") == links.matching(">b") == links.matching("a>b") == [LINK]
