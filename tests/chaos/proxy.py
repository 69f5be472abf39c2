"""TCP links that misbehave on demand: `python -m tests.chaos.proxy`, steered through its standard
input by `links.py`.

Every line in is a JSON object, and is answered by one. The first is {link: "host:port" it leads
to}; the answer gives the port of each on 127.0.0.1. Every other sets links to a way (`links.Way`).
The process ends when its input does.

A silent link loses only data that TCP would lose: bytes in transit stay in the kernel until the
link passes again, and if a side gives up before that, the other is notified only then. A connection
that begins on a silent link is reset when the link passes again.
"""

from __future__ import annotations

import asyncio
import json
import random
import socket
import struct
import sys
from collections import deque
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final, cast

import uvloop

_RESET: Final = struct.pack("ii", 1, 0)
"""SO_LINGER of 0 s: closing sends RST."""
_MAX_QUEUED: Final = 256 * 1024
"""Bytes queued in a slow direction before its source is paused, as by a router's buffer."""


@dataclass
class Course:
    """One direction of a link. Seconds; bytes a second (0: as fast as it goes)."""

    silent: bool = False
    latency: float = 0.0
    jitter: float = 0.0
    rate: float = 0.0

    @property
    def is_plain(self) -> bool:
        return not (self.silent or self.latency or self.jitter or self.rate)


@dataclass
class Link:
    """One link; `cut`: all its connections are reset, and new ones at once."""

    host: str
    port: int
    up: Course = field(default_factory=Course)
    down: Course = field(default_factory=Course)
    cut: bool = False
    connections: set[Connection] = field(default_factory=set)

    def set(self, way: dict[str, Any]) -> None:
        was_silent = self.up.silent or self.down.silent
        self.up, self.down, self.cut = Course(**way["up"]), Course(**way["down"]), way["cut"]
        is_silent = self.up.silent or self.down.silent
        for connection in list(self.connections):
            if self.cut or (was_silent and not is_silent and connection.is_stillborn):
                connection.reset()
            else:
                connection.up.course, connection.down.course = self.up, self.down
                connection.up.pump()
                connection.down.pump()


class Pipe:
    """One direction of a connection: from `source` to `sink`, in order, as `course` says."""

    def __init__(self, course: Course) -> None:
        self.course = course
        self.source: asyncio.Transport | None = None
        self.sink: asyncio.Transport | None = None
        self.is_sink_full = False
        # Mutable state: what waits for its time, and whether the source is being read.
        self._queue: deque[tuple[float, bytes]] = deque()
        self._queued = 0
        self._last = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._is_reading = True
        self._is_ending = False

    def feed(self, data: bytes) -> None:
        if self.course.is_plain and not self._queue and self.sink is not None:
            self.sink.write(data)
            return
        now = asyncio.get_running_loop().time()
        due = now + self.course.latency + random.random() * self.course.jitter
        due = max(due, self._last)
        if self.course.rate:
            due += len(data) / self.course.rate
        self._last = due
        self._queue.append((due, data))
        self._queued += len(data)
        self.pump()

    def end(self) -> None:
        """The source will send no more."""
        self._is_ending = True
        self.pump()

    def pump(self) -> None:
        """Send the data that is due, and decide whether to read on."""
        loop = asyncio.get_running_loop()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self.sink is not None and not self.course.silent:
            while self._queue and (self.course.is_plain or self._queue[0][0] <= loop.time()):
                data = self._queue.popleft()[1]
                self._queued -= len(data)
                self.sink.write(data)
            if self._queue:
                self._timer = loop.call_at(self._queue[0][0], self.pump)
            elif self._is_ending:
                self.sink.close()
        self._read(
            self.sink is not None
            and not (self.course.silent or self.is_sink_full or self._queued > _MAX_QUEUED)
        )

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._queue.clear()

    def _read(self, wanted: bool) -> None:
        if self.source is None or self.source.is_closing() or wanted == self._is_reading:
            return
        self._is_reading = wanted
        if wanted:
            self.source.resume_reading()
        else:
            self.source.pause_reading()


class Side(asyncio.Protocol):
    """One end of a connection: data that it receives goes to `out`; `back` leads to it."""

    def __init__(self, connection: Connection, out: Pipe, back: Pipe) -> None:
        self._connection = connection
        self._out, self._back = out, back

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        joined = cast(asyncio.Transport, transport)  # uvloop's is one in all but name
        self._out.source = self._back.sink = joined
        self._connection.joined(joined)
        self._out.pump()
        self._back.pump()

    def data_received(self, data: bytes) -> None:
        self._out.feed(data)

    def eof_received(self) -> bool:
        self._out.end()
        return True

    def connection_lost(self, error: Exception | None) -> None:
        if error is None:
            self._out.end()
        else:
            self._connection.reset()
        self._connection.left()

    def pause_writing(self) -> None:
        self._back.is_sink_full = True
        self._back.pump()

    def resume_writing(self) -> None:
        self._back.is_sink_full = False
        self._back.pump()


class Connection:
    """One connection through a link. `is_stillborn`: it began while the link was silent, and leads
    nowhere.
    """

    def __init__(self, link: Link) -> None:
        self._link = link
        self.up, self.down = Pipe(link.up), Pipe(link.down)
        self.is_stillborn = link.up.silent or link.down.silent
        self._transports: list[asyncio.Transport] = []
        self._open = 0
        self._leading: asyncio.Task[None] | None = None
        link.connections.add(self)

    def accepted(self) -> asyncio.Protocol:
        return Side(self, self.up, self.down)

    def joined(self, transport: asyncio.Transport) -> None:
        self._transports.append(transport)
        self._open += 1
        if len(self._transports) > 1:
            return
        if self._link.cut:
            self.reset()
        elif not self.is_stillborn:
            self._leading = asyncio.get_running_loop().create_task(self._lead())

    def left(self) -> None:
        self._open -= 1
        if not self._open:
            self.up.stop()
            self.down.stop()
            if self._leading is not None:
                self._leading.cancel()
            self._link.connections.discard(self)

    def reset(self) -> None:
        for transport in self._transports:
            if not transport.is_closing():
                with suppress(OSError):
                    transport.get_extra_info("socket").setsockopt(
                        socket.SOL_SOCKET, socket.SO_LINGER, _RESET
                    )
                transport.abort()

    async def _lead(self) -> None:
        try:
            await asyncio.get_running_loop().create_connection(
                lambda: Side(self, self.down, self.up), self._link.host, self._link.port
            )
        except OSError:  # no server listens there: the caller is reset
            self.reset()


async def serve() -> None:
    """Serve until the input ends."""
    loop = asyncio.get_running_loop()
    orders = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(orders), sys.stdin)
    links: dict[str, Link] = {}
    ports: dict[str, int] = {}
    for name, target in json.loads(await orders.readline()).items():
        host, _, port = target.rpartition(":")
        link = links[name] = Link(host, int(port))
        server = await loop.create_server(
            lambda link=link: Connection(link).accepted(),  # type: ignore[misc]
            "127.0.0.1",
            0,
        )
        ports[name] = server.sockets[0].getsockname()[1]
    _reply(ports)
    while line := await orders.readline():
        order = json.loads(line)
        for name in order["links"]:
            links[name].set(order["way"])
        _reply({"connections": sum(len(links[name].connections) for name in order["links"])})


def _reply(message: dict[str, int]) -> None:
    sys.stdout.write(json.dumps(message) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    uvloop.run(serve())
