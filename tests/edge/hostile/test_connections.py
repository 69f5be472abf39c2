"""The memory cost of heads, headers and trailers, while they arrive and after their connection is
closed.
"""

from __future__ import annotations

import asyncio
import gc
import json
import weakref
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest

from libs.serving import Security
from services.edge import server
from services.edge.server import HttpConnection
from tests.edge.hostile.process import MAX_GROWTH_BYTES, MIB, EdgeProcess, edge_process
from tests.edge.parts import Http, Reply, Script, edge, head, read_reply
from tests.edge.test_server import BODY, EMBED, until
from tests.serving.parts import write_tokens
from tests.support.peak import Peak

CONTENT = json.dumps(BODY).encode()
CHUNKED = head("POST", EMBED, {"transfer-encoding": "chunked"}) + b"%x\r\n%b\r\n0\r\n" % (
    len(CONTENT),
    CONTENT,
)
FLOOD_BYTES = 60_000_000


async def flood(http: Http, begin: bytes, repeated: bytes, size: int = FLOOD_BYTES) -> None:
    """Send `begin`, then repeat `repeated` up to `size` bytes or until the edge disconnects."""
    reader, writer = await http.open()
    piece = repeated * max(1, MIB // len(repeated))
    try:
        writer.write(begin)
        for _ in range(size // len(piece)):
            writer.write(piece)
            await writer.drain()
        await read_reply(reader)
    except (ConnectionError, asyncio.IncompleteReadError):
        pass
    finally:
        writer.close()


async def reply_to(http: Http, sent: bytes) -> Reply:
    reader, writer = await http.open()
    try:
        writer.write(sent)
        return await read_reply(reader)
    finally:
        writer.close()


async def test_trailers_are_dropped() -> None:
    script = Script()
    async with edge(script) as http:
        reply = await reply_to(
            http, CHUNKED + b"authorization: Bearer late\r\n" + b"x: y\r\n" * 1000 + b"\r\n"
        )
        assert reply.status == 200
    assert "authorization" not in script.metadata[0]


@pytest.mark.parametrize(
    "trailers",
    [b"x: y\r\n" * 2000 + b"\r\n", b"x: " + b"y" * server.MAX_TRAILER_BYTES + b"\r\n\r\n"],
)
async def test_trailers_beyond_the_limit_are_refused(trailers: bytes) -> None:
    async with edge(Script()) as http:
        reply = await reply_to(http, CHUNKED + trailers)
        assert (reply.status, reply.headers["connection"]) == (431, "close")
        assert "8192 bytes" in reply.json["detail"]


@pytest.mark.parametrize(
    "repeated", [b"a: b\r\n", b"b"], ids=["many trailers", "one trailer without end"]
)
async def test_flood_of_trailers_uses_no_memory(repeated: bytes) -> None:
    async with edge_process(Script()) as process:
        peak = Peak(process.pid)
        await flood(process.http, CHUNKED + b"a: ", repeated)
        assert peak.grown < MAX_GROWTH_BYTES


async def test_flood_of_chunk_extensions_is_refused() -> None:
    async with edge(Script()) as http:
        reader, writer = await http.open()
        writer.write(head("POST", EMBED, {"transfer-encoding": "chunked"}) + b"2;")
        for _ in range(2):
            await writer.drain()
            writer.write(b"x" * server.MAX_TRAILER_BYTES)
        assert (await read_reply(reader)).status == 431
        writer.close()


async def test_answered_request_gets_no_second_answer_for_its_trailers(tmp_path: Path) -> None:
    async with edge(Script(), body_bytes=2000) as http:
        reader, writer = await http.open()
        writer.write(
            head("POST", EMBED, {"transfer-encoding": "chunked"})
            + b"fff\r\n"
            + b" " * 0xFFF
            + b"\r\n"
        )
        assert (await read_reply(reader)).status == 413
        writer.write(b"0\r\n" + b"x: y\r\n" * 2000 + b"\r\n")
        assert await reader.read() == b""
        writer.close()


async def test_number_of_headers_is_limited() -> None:
    async with edge(Script()) as http:
        most = {f"x-{number}": "y" for number in range(server.MAX_HEADERS - 1)}
        assert (await reply_to(http, head("GET", "/livez", most))).status == 200
        reply = await reply_to(http, head("GET", "/livez", {**most, "x": "y"}))
        assert reply.status == 431
        assert "128 headers" in reply.json["detail"]


async def test_excess_headers_are_refused_before_the_head_ends() -> None:
    async with edge(Script()) as http:
        assert (
            await reply_to(http, b"GET /livez HTTP/1.1\r\n" + b"a:\r\n" * (server.MAX_HEADERS + 2))
        ).status == 431


async def test_unfinished_heads_with_many_headers_use_limited_memory() -> None:
    """300 connections send 16,000 headers each."""
    async with edge_process(Script()) as process:
        peak = Peak(process.pid)
        opened = []
        for _ in range(300):
            reader, writer = await process.http.open()
            opened.append((reader, writer))
            writer.write(b"GET /livez HTTP/1.1\r\nhost: localhost\r\n" + b"a:\r\n" * 16_000)
        for reader, _ in opened:
            with suppress(ConnectionError):  # the edge closes while data is still being sent
                assert await reader.read(13) in (b"HTTP/1.1 431 ", b"")
        assert peak.grown < MAX_GROWTH_BYTES
        for _, writer in opened:
            writer.close()


async def test_unfinished_heads_share_a_budget(
    accepted: list[weakref.ref[HttpConnection]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "MAX_UNFINISHED_BYTES", 100_000)
    unfinished = b"GET /livez HTTP/1.1\r\nx: " + b"y" * 60_000
    async with edge(Script()) as http:
        _, first = await http.open()
        first.write(unfinished)

        def is_counted() -> bool:
            connection = accepted[0]() if accepted else None
            return connection is not None and connection._unfinished_bytes >= 60_000

        await until(is_counted)
        reader, second = await http.open()
        second.write(unfinished)
        assert (await read_reply(reader)).status == 503
        assert (await http.post(EMBED, BODY)).status == 200  # its head arrives in one piece
        first.close()
        second.close()
        _, third = await http.open()
        third.write(unfinished + b"\r\n\r\n")
        third.close()


async def closed_requests(process: EdgeProcess, sent: bytes, count: int = 200) -> set[int]:
    """Send each request over a connection that is then closed; return the statuses."""
    statuses: set[int] = set()
    for _ in range(count):
        with suppress(ConnectionError):  # the edge closes while data is still being sent
            statuses.add((await reply_to(process.http, sent)).status)
    return statuses


@pytest.mark.parametrize(
    ("headers", "status"),
    [(b"a:b\r\n" * 12_000, 431), (b"a:" + b"b" * 59_000 + b"\r\n", 200)],
    ids=["many", "large"],
)
async def test_closed_connections_with_large_heads_free_their_memory(
    headers: bytes, status: int
) -> None:
    """Each of 200 requests has 60 KB of headers."""
    async with edge_process(Script()) as process:
        begin = process.resident_bytes
        peak = Peak(process.pid)
        assert await closed_requests(
            process, b"GET /livez HTTP/1.1\r\nhost: localhost\r\n" + headers + b"\r\n"
        ) <= {status}
        assert peak.grown < 8 * MIB
        assert process.resident_bytes < 1.1 * begin


@pytest.fixture
def accepted(monkeypatch: pytest.MonkeyPatch) -> list[weakref.ref[HttpConnection]]:
    """Return weak references to all connections that the edge has accepted."""
    found: list[weakref.ref[HttpConnection]] = []
    made = HttpConnection.connection_made

    def connection_made(self: HttpConnection, transport: asyncio.Transport) -> None:
        found.append(weakref.ref(self))
        made(self, transport)

    monkeypatch.setattr(HttpConnection, "connection_made", connection_made)
    return found


@asynccontextmanager
async def no_collector() -> AsyncIterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


POST = head("POST", EMBED, {"content-length": str(len(CONTENT))}) + CONTENT


@pytest.mark.parametrize(
    ("sent", "replies"),
    [
        (b"", 0),
        (b"GET /livez HTTP/1.1\r\nx: ", 0),
        (head("GET", "/livez", {}), 1),
        (head("GET", "/livez", {}) * 3, 3),
        (POST, 1),
        (POST * 3, 3),
        (POST[:-1], 0),
        (head("POST", EMBED, {"content-length": "2"}) + b"[]", 1),
        (b"garbage\r\n\r\n", 1),
        (CHUNKED + b"x: y\r\n" * 5000, 1),
        (
            head("POST", EMBED, {"content-length": "2", "connection": "upgrade", "upgrade": "h2c"})
            + b"[]",
            1,
        ),
    ],
)
@pytest.mark.parametrize("is_reset", [False, True], ids=["closed", "reset"])
async def test_closed_connection_is_freed_without_the_garbage_collector(
    accepted: list[weakref.ref[HttpConnection]], sent: bytes, replies: int, is_reset: bool
) -> None:
    async with edge(Script()) as http, no_collector():
        reader, writer = await http.open()
        writer.write(sent)
        for _ in range(replies):
            await read_reply(reader)
        if is_reset:
            writer.transport.abort()
        else:
            writer.close()
        await until(lambda: accepted and accepted[0]() is None)


async def test_disconnect_during_a_request_frees_the_connection(
    accepted: list[weakref.ref[HttpConnection]],
) -> None:
    async def forever() -> None:
        await asyncio.Event().wait()

    script = Script(act=forever)
    async with edge(script) as http, no_collector():
        _, writer = await http.open()
        writer.write(POST)
        await until(lambda: script.requests)
        writer.close()
        await until(lambda: accepted[0]() is None)


async def test_idle_connection_keeps_no_request(
    accepted: list[weakref.ref[HttpConnection]],
) -> None:
    async with edge(Script()) as http:
        reader, writer = await http.open()
        writer.write(
            head("POST", EMBED, {"content-length": str(len(CONTENT)), "x": "y" * 60_000}) + CONTENT
        )
        assert (await read_reply(reader)).status == 200
        connection = accepted[0]()
        assert connection is not None
        assert all(not kept for kept in (connection.cycle, connection.scope, connection.headers))
        writer.write(POST)
        assert (await read_reply(reader)).status == 200
        writer.close()


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        (b"host: localhost\r\nhost: localhost\r\n", 400),
        (b"host: localhost\r\ntransfer-encoding: gzip, chunked\r\n", 400),
        (b"host: localhost\r\ntransfer-encoding: gzip\r\ntransfer-encoding: chunked\r\n", 400),
        (b"host: localhost\r\ntransfer-encoding: chunked, chunked\r\n", 400),
        (b"host: localhost\r\ntransfer-encoding: Chunked \r\n", 200),
    ],
)
async def test_ambiguous_heads_are_refused(headers: bytes, status: int) -> None:
    script = Script()
    async with edge(script) as http:
        body = b"%x\r\n%b\r\n0\r\n\r\n" % (len(CONTENT), CONTENT)
        assert (
            await reply_to(http, f"POST {EMBED} HTTP/1.1\r\n".encode() + headers + b"\r\n" + body)
        ).status == status
    assert len(script.requests) == (status == 200)


async def test_refused_credential_frees_the_connection(
    accepted: list[weakref.ref[HttpConnection]], tmp_path: Path
) -> None:
    security = Security(tokens=write_tokens(tmp_path / "tokens.yaml"))
    async with edge(Script(), security) as http, no_collector():
        assert (await http.post(EMBED, BODY)).status == 401
        await until(lambda: accepted[0]() is None)


WHOLE_CHUNKED = CHUNKED + b"\r\n"
LIVE = head("GET", "/livez", {"x": "y" * 1500})
LARGE_POST = (
    head("POST", EMBED, {"content-length": str(150_000)})
    + CONTENT
    + b" " * (150_000 - len(CONTENT))
)
UNFINISHED = b"GET /livez HTTP/1.1\r\nx: " + b"y" * 60_000


async def replies_to_reads(
    http: Http, accepted: list[weakref.ref[HttpConnection]], reads: list[bytes], replies: int
) -> list[int]:
    """Let the edge parse these bytes, one read at a time, on a new connection; return the statuses
    of its replies.
    """
    reader, writer = await http.open()
    try:
        await until(lambda: accepted)
        for data in reads:
            connection = accepted[-1]()
            assert connection is not None
            connection.data_received(data)
        return [(await read_reply(reader)).status for _ in range(replies)]
    finally:
        writer.close()


@pytest.mark.parametrize("size", [9 << 10, 40 << 10])
@pytest.mark.parametrize("request_bytes", [POST, WHOLE_CHUNKED], ids=["by length", "chunked"])
async def test_body_may_arrive_after_a_large_head(
    accepted: list[weakref.ref[HttpConnection]], size: int, request_bytes: bytes
) -> None:
    start, separator, body = request_bytes.partition(b"\r\n\r\n")
    begin = start + b"\r\ncookie: " + b"y" * size + separator
    async with edge(Script()) as http:
        assert await replies_to_reads(http, accepted, [begin, body], 1) == [200]


async def test_body_may_arrive_with_the_offer_of_another_protocol(
    accepted: list[weakref.ref[HttpConnection]],
) -> None:
    content = json.dumps({**BODY, "input": "x" * (20 << 10)}).encode()
    offer = {
        "connection": "upgrade, http2-settings",
        "upgrade": "h2c",
        "content-length": str(len(content)),
    }
    async with edge(Script()) as http:
        assert await replies_to_reads(
            http, accepted, [head("POST", EMBED, offer) + content], 1
        ) == [200]


async def test_bytes_without_content_behind_a_head_are_counted(
    accepted: list[weakref.ref[HttpConnection]],
) -> None:
    begin = head("POST", EMBED, {"transfer-encoding": "chunked"}) + b"2;"
    async with edge(Script()) as http:
        assert await replies_to_reads(
            http, accepted, [begin + b"x" * server.MAX_TRAILER_BYTES], 1
        ) == [431]


@pytest.mark.parametrize(
    ("finished", "replies"),
    [(LIVE * 60, 60), (LARGE_POST, 1), (LIVE + LARGE_POST, 2), (WHOLE_CHUNKED * 30, 30)],
)
@pytest.mark.parametrize("split", [0, 1000])
async def test_only_the_unfinished_head_of_a_read_is_counted(
    accepted: list[weakref.ref[HttpConnection]],
    monkeypatch: pytest.MonkeyPatch,
    finished: bytes,
    replies: int,
    split: int,
) -> None:
    """`split` is the number of bytes that arrive in a preceding read."""
    monkeypatch.setattr(server, "MAX_UNFINISHED_BYTES", 61_000)
    reads = [finished[:split], finished[split:] + UNFINISHED, b"\r\n\r\n"]
    async with edge(Script()) as http:
        assert set(await replies_to_reads(http, accepted, reads, replies + 1)) == {200}


@pytest.mark.parametrize(
    "finished", [LIVE * 2, POST, WHOLE_CHUNKED], ids=["no body", "by length", "chunked"]
)
async def test_head_behind_a_finished_request_is_counted(
    accepted: list[weakref.ref[HttpConnection]], monkeypatch: pytest.MonkeyPatch, finished: bytes
) -> None:
    monkeypatch.setattr(server, "MAX_UNFINISHED_BYTES", len(UNFINISHED) - 1)
    async with edge(Script()) as http:
        statuses = await replies_to_reads(
            http, accepted, [finished + UNFINISHED], finished.count(b"HTTP/1.1") + 1
        )
        assert statuses[-1] == 503


@pytest.mark.parametrize(
    "headers",
    [{"x": "y" * 60_000}, {f"x-{number}": "y" for number in range(120)}],
    ids=["large", "many headers"],
)
async def test_memory_of_pipelined_heads_is_limited(
    accepted: list[weakref.ref[HttpConnection]], headers: dict[str, str]
) -> None:
    async with edge(Script()) as http:
        reads = [POST, head("GET", "/livez", headers) * (server.MAX_PIPELINED // 2)]
        with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
            await replies_to_reads(http, accepted, reads, 1)


async def test_pipelined_heads_of_usual_size_wait() -> None:
    headers = {f"x-{number}": "y" * 20 for number in range(20)}
    async with edge(Script()) as http:
        reader, writer = await http.open()
        writer.write(POST + head("GET", "/livez", headers) * (server.MAX_PIPELINED - 1))
        for _ in range(server.MAX_PIPELINED):
            assert (await read_reply(reader)).status == 200
        writer.close()
