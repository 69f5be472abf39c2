"""Raw bytes on a router's port: almost valid HTTP/2, other data, and connections that are never
used.
"""

from __future__ import annotations

import socket
import struct
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Final

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests.fuzz import mutate
from tests.fuzz.meshes import Mesh, serving
from tests.fuzz.target import Broken, Random, Target, Try

_PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_DATA, _HEADERS, _PRIORITY, _RST, _SETTINGS, _PUSH, _PING, _GOAWAY, _WINDOW, _CONTINUATION = range(
    10
)
_END_STREAM, _END_HEADERS = 0x1, 0x4
_EACH: Final = 25
_LINGERING: Final = 100
"""Connections that are left open, as if their clients had disappeared."""
_PATHS: Final = (
    "/shoal.v1.InferenceService/Encode",
    "/grpc.health.v1.Health/Check",
    "/shoal.v1.WorkerService/Heartbeat",
    "/x",
    "*",
    "",
)


def _frame(kind: int, flags: int, stream: int, payload: bytes, length: int | None = None) -> bytes:
    size = len(payload) if length is None else length
    return (
        struct.pack(">I", size & 0xFFFFFF)[1:]
        + struct.pack(">BBI", kind & 0xFF, flags, stream & 0xFFFFFFFF)
        + payload
    )


def _field(name: str, value: str) -> bytes:
    """Return an HPACK literal (RFC 7541) that is added to the table."""
    return b"\x40" + _text(name.encode()) + _text(value.encode())


def _text(data: bytes) -> bytes:
    return (bytes([len(data)]) if len(data) < 127 else b"\x7f" + _varint(len(data) - 127)) + data


def _varint(value: int) -> bytes:
    made = b""
    while value >= 128:
        made += bytes([value % 128 + 128])
        value //= 128
    return made + bytes([value])


def _call(random: Random) -> bytes:
    """Return the headers of a call, possibly with more data."""
    block = b"\x83\x86" + _field(":path", random.choice(_PATHS)) + _field(":authority", "x")
    block += _field("content-type", "application/grpc") + _field("te", "trailers")
    way = random.randrange(7)
    if way == 0:
        block += _field("x-big", "a" * random.choice((100, 4000, 9000, 20_000)))
    elif way == 1:
        # A bomb: one large field in the table, then one byte per reference to it.
        block += _field("x-bomb", "a" * 3500) + b"\xbe" * random.choice((10, 1000, 8000))
    elif way == 2:
        block += _field(
            "grpc-timeout", random.choice(("0n", "99999999H", "-1S", "1", "x", "9" * 30 + "S"))
        )
    elif way == 3:
        block += _field("grpc-encoding", random.choice(("gzip", "deflate", "identity", "evil")))
    elif way == 4:
        block = mutate.mutated(random, block)
    elif way == 5:
        block += b"".join(_field(f"x-{number}", "v") for number in range(random.choice((50, 300))))
    return block


def _stream(random: Random, stream: int) -> bytes:
    block = _call(random)
    cut = random.randrange(len(block) + 1) if random.random() < 0.3 else len(block)
    flags = random.choice((0, _END_HEADERS, _END_HEADERS, _END_HEADERS, _END_HEADERS | _END_STREAM))
    made = _frame(_HEADERS, flags if cut == len(block) else 0, stream, block[:cut])
    if cut < len(block):
        made += _frame(_CONTINUATION, _END_HEADERS, stream, block[cut:])
    body = random.randbytes(random.choice((0, 5, 40)))
    message = (
        struct.pack(
            ">BI",
            random.choice((0, 0, 1, 7)),
            random.choice((len(body), len(body), mutate.edge(random) % (1 << 32))),
        )
        + body
    )
    return made + _frame(_DATA, random.choice((0, _END_STREAM)), stream, message)


def _control(random: Random) -> bytes:
    stream = random.choice((0, 1, 2, 3, 0x7FFFFFFF))
    way = random.randrange(8)
    if way == 0:
        pairs = b"".join(
            struct.pack(">HI", random.randrange(8), mutate.edge(random) % (1 << 32))
            for _ in range(random.choice((1, 5, 50)))
        )
        return _frame(_SETTINGS, random.choice((0, 0, 1)), stream, pairs)
    if way == 1:
        return _frame(_PING, random.choice((0, 1)), 0, random.randbytes(8)) * random.choice(
            (1, 3, 200)
        )
    if way == 2:
        return _frame(_RST, 0, stream, struct.pack(">I", random.randrange(16))) * random.choice(
            (1, 50)
        )
    if way == 3:
        return _frame(_WINDOW, 0, stream, struct.pack(">I", mutate.edge(random) % (1 << 32)))
    if way == 4:
        return _frame(_GOAWAY, 0, 0, struct.pack(">II", stream, random.randrange(16)) + b"bye")
    if way == 5:
        return _frame(
            random.randrange(256),
            random.randrange(256),
            stream,
            random.randbytes(random.randrange(30)),
        )
    if way == 6:
        return _frame(_PUSH, 4, 1, struct.pack(">I", 2) + b"\x83")
    return _frame(_PRIORITY, 0, stream, struct.pack(">IB", stream, 255))


def _make(random: Random, known: Sequence[bytes]) -> bytes:
    """Return a byte for how the connection ends, then the bytes to send."""
    ending = bytes([random.randrange(256)])
    way = random.random()
    if known and way < 0.2:
        return mutate.mutated(random, random.choice(known), others=known)
    if way < 0.3:
        return ending + random.choice(
            (
                random.randbytes(random.randrange(200)),
                b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
                b"\x16\x03\x01\x02\x00\x01",
                b"",
            )
        )
    made = _PREFACE + _frame(_SETTINGS, 0, 0, b"")
    for number in range(random.choice((1, 1, 2, 5))):
        made += _stream(random, 2 * number + 1) if random.random() < 0.6 else _control(random)
    if random.random() < 0.3:
        made = mutate.mutated(random, made)
    return ending + (made[: random.randrange(len(made) + 1)] if random.random() < 0.2 else made)


class Sender:
    """Opens a connection per input; some are left open, half closed or reset."""

    def __init__(self, mesh: Mesh) -> None:
        host, _, port = mesh.router.rpartition(":")
        self._mesh, self._place = mesh, (host, int(port))
        self._open: deque[socket.socket] = deque()
        self._channel = grpc.insecure_channel(mesh.router)
        self._count = 0

    def close(self) -> None:
        while self._open:
            self._open.pop().close()
        self._channel.close()

    def one(self, data: bytes) -> None:
        ending = data[0] if data else 0
        connection = socket.create_connection(self._place, timeout=10.0)
        with suppress(OSError):
            connection.sendall(data[1:])
            if ending % 4 == 0:
                connection.shutdown(socket.SHUT_WR)
            if ending % 8 < 4:
                connection.settimeout(0.005)
                connection.recv(1024)
        self._end(connection, ending)
        self._count += 1
        if self._count % _EACH == 0:
            self.check()

    def _end(self, connection: socket.socket, ending: int) -> None:
        if ending >= 192:
            self._open.append(connection)
            if len(self._open) > _LINGERING:
                self._open.popleft().close()
            return
        if ending >= 128:  # reset instead of close
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        connection.close()

    def check(self) -> None:
        if self._mesh.ended.done():
            self._mesh.ended.result()
            raise Broken("the mesh has ended")
        try:
            answer = health_pb2_grpc.HealthStub(self._channel).Check(
                health_pb2.HealthCheckRequest(), timeout=10.0
            )
        except grpc.RpcError as error:
            raise Broken(
                f"health is not reported any more: {error.code().name}: {error.details()}"
            ) from error
        if answer.status != health_pb2.HealthCheckResponse.SERVING:
            raise Broken("the router does not serve any more")


@contextmanager
def _opened() -> Iterator[Try]:
    with serving(has_worker=False) as mesh:
        sender = Sender(mesh)
        try:
            sender.check()
            yield sender.one
            sender.check()
        finally:
            sender.close()


TARGETS: Final = (
    Target("wire", _make, _opened, share=2.0, memory_bytes=4 << 30, hang_seconds=60.0),
)
