"""Slow, broken and hostile clients on real sockets: no 500, bounded memory, and the next request
succeeds.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from typing import Any

import pytest
from shoal.v1 import inference_pb2 as pb

from services.edge import server
from services.edge.server import HttpConnection
from tests.edge.parts import (
    MODEL,
    Http,
    Reply,
    Script,
    card,
    dense,
    edge,
    head,
    read_reply,
    routing,
    vectors,
)
from tests.edge.test_server import BODY, EMBED, until

LARGE = 512, 1024
"""Vectors of a large answer, and their dimensions: 2 MiB of float32, about 10 MB of JSON."""


def large(request: pb.EncodeRequest) -> pb.EncodeResponse:
    return pb.EncodeResponse(dense=dense(vectors(*LARGE)), usage=pb.Usage(input_tokens=5))


def post(body: Any = BODY, path: str = EMBED, **headers: str) -> bytes:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    return head("POST", path, {"content-length": str(len(content)), **headers}) + content


async def forever() -> None:
    await asyncio.Event().wait()


@pytest.fixture
def connections(monkeypatch: pytest.MonkeyPatch) -> list[HttpConnection]:
    """Return all connections that the edge has accepted."""
    found: list[HttpConnection] = []
    made = HttpConnection.connection_made

    def connection_made(self: HttpConnection, transport: asyncio.Transport) -> None:
        found.append(self)
        made(self, transport)

    monkeypatch.setattr(HttpConnection, "connection_made", connection_made)
    return found


async def test_slow_reader_has_a_limited_buffer(connections: list[HttpConnection]) -> None:
    async with edge(Script(encode=large)) as http:
        reader, writer = await http.open()
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        writer.write(post())
        await until(
            lambda: (
                connections and connections[0].flow is not None and connections[0].flow.write_paused
            )
        )
        assert connections[0].transport.get_write_buffer_size() < 1 << 20
        assert (await http.get("/livez")).status == 200  # other requests are served
        writer.transport.resume_reading()  # type: ignore[attr-defined]
        reply = await read_reply(reader)
        assert (reply.status, len(reply.json["data"])) == (200, LARGE[0])
        writer.close()


async def test_answers_count_as_memory_in_flight(connections: list[HttpConnection]) -> None:
    scripts = [large, None]
    script = Script(encode=lambda request: (scripts.pop(0) or large)(request))
    async with edge(script, body_bytes=2000, in_flight_bytes=3 << 20) as http:
        _, writer = await http.open()
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        writer.write(post())
        await until(
            lambda: (
                connections and connections[0].flow is not None and connections[0].flow.write_paused
            )
        )
        reply = await http.post(EMBED, BODY)
        assert (reply.status, reply.headers["retry-after"]) == (429, "1")
        writer.transport.abort()
        script.encode = large

        async def has_room() -> bool:
            return (await http.post(EMBED, BODY)).status == 200

        await until(has_room)


async def test_single_answer_may_exceed_the_memory_in_flight() -> None:
    async with edge(Script(encode=large), body_bytes=2000, in_flight_bytes=1 << 20) as http:
        assert (await http.post(EMBED, {**BODY, "encoding_format": "base64"})).status == 200


async def test_client_that_reads_nothing_is_disconnected(connections: list[HttpConnection]) -> None:
    async with edge(Script(encode=large), body_seconds=2.0) as http:
        _, writer = await http.open()
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        writer.write(post())
        await until(
            lambda: (
                connections
                and connections[0].flow is not None
                and (
                    connections[0].flow.write_paused
                    or connections[0] not in connections[0].connections
                )
            )
        )
        await until(lambda: connections[0] not in connections[0].connections)
        writer.close()


async def test_unsent_data_does_not_keep_a_client_that_reads_nothing(
    connections: list[HttpConnection], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "LINGER_SECONDS", 0.2)
    medium = pb.EncodeResponse(dense=dense(vectors(16, 1024)))
    async with edge(Script(encode=lambda request: medium), idle_seconds=3.0) as http:
        _, writer = await http.open()
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        await until(lambda: connections)
        state = connections[0].server_state
        while not connections[0].transport.get_write_buffer_size():
            answers = state.total_requests + 1
            writer.write(post())
            await until(lambda answers=answers: state.total_requests >= answers)  # type: ignore[misc]
        await until(lambda: connections[0] not in connections[0].connections)
        writer.close()


async def test_half_closed_connection_counts_as_disconnected() -> None:
    script = Script(act=forever)
    async with edge(script) as http:
        reader, writer = await http.open()
        writer.write(post())
        await until(lambda: script.requests)
        writer.write_eof()
        await until(lambda: script.cancelled == 1)
        assert await reader.read() == b""
        writer.close()


async def test_request_before_garbage_is_answered() -> None:
    async with edge(Script()) as http:
        reader, writer = await http.open()
        writer.write(post() + b"\x00garbage\r\n\r\n")
        first = await read_reply(reader)
        assert (first.status, first.json["object"]) == (200, "list")
        assert (await read_reply(reader)).status == 400
        assert await reader.read() == b""
        writer.close()


async def test_flood_of_pipelined_requests_is_disconnected(
    connections: list[HttpConnection],
) -> None:
    script = Script(act=forever)
    async with edge(script) as http:
        _, writer = await http.open()
        writer.write(post() * (3 * server.MAX_PIPELINED))
        await until(
            lambda: (
                connections
                and connections[0].transport is not None
                and connections[0].transport.is_closing()
            )
        )
        writer.close()
        script.act = None
        assert (await http.post(EMBED, BODY)).status == 200


async def test_requests_that_fit_the_pipeline_are_all_answered() -> None:
    async with edge(Script()) as http:
        reader, writer = await http.open()
        count = server.MAX_PIPELINED // 2
        writer.write(post() * count)
        assert {(await read_reply(reader)).status for _ in range(count)} == {200}
        writer.close()


CONTENT = json.dumps(BODY).encode()
CHUNKED = head("POST", EMBED, {"transfer-encoding": "chunked"})


@pytest.mark.parametrize(
    "sent",
    [
        CHUNKED + b"zz\r\n{}\r\n0\r\n\r\n",
        CHUNKED + b"ffffffffffffffffff\r\n{}",
        CHUNKED + b"-5\r\nabcde\r\n0\r\n\r\n",
        CHUNKED + b"2\r\n{}garbage\r\n0\r\n\r\n",
        CHUNKED + b"0\r\ntrailer without colon\r\n\r\n",
        head("POST", EMBED, {"transfer-encoding": "chunked", "content-length": "5"}) + b"0\r\n\r\n",
        head("POST", EMBED, {"transfer-encoding": "gzip, identity"}) + CONTENT,
        f"POST {EMBED} HTTP/1.1\r\nhost: a\r\n".encode()
        + b"content-length: 2\r\ncontent-length: 3\r\n\r\n"
        + CONTENT,
        head("POST", EMBED, {"content-length": "-1"}),
        head("POST", EMBED, {"content-length": "1e3"}),
        head("POST", EMBED, {"content-length": "9" * 30}),
        f"POST {EMBED} HTTP/1.1\r\nhost : a\r\n\r\n".encode(),
        f"POST {EMBED} HTTP/1.1\r\nno colon\r\n\r\n".encode(),
        f"POST {EMBED} HTTP/1.1\r\nx: a\x00b\r\n\r\n".encode(),
        f"POST {EMBED} HTTP/9.9\r\n\r\n".encode(),
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"CONNECT a:1 HTTP/1.1\r\n\r\n",
        b"OPTIONS * HTTP/1.1\r\nhost: a\r\n\r\n",
        b"GET http://other/livez-not HTTP/1.1\r\nhost: a\r\n\r\n",
        b"GET /\xff\xfe HTTP/1.1\r\nhost: a\r\n\r\n",
    ],
)
async def test_broken_http_is_refused(sent: bytes) -> None:
    script = Script()
    async with edge(script) as http:
        reader, writer = await http.open()
        writer.write(sent)
        reply = await read_reply(reader)
        assert 400 <= reply.status < 500
        assert reply.json["error"]["message"]
        writer.close()
        assert not script.requests
        assert (await http.post(EMBED, BODY)).status == 200


@pytest.mark.parametrize(
    "path",
    [
        "%ff%fe",
        "org%2f%ff",
        "%00",
        "%",
        "%zz",
        "..%2f..%2fetc",
        "a" * 5000,
        "%F0%9F%90%9F",
        "org/%0d%0ax:y",
    ],
)
async def test_strange_ids_in_paths(path: str) -> None:
    async with edge(Script(models=[card()])) as http:
        for reply in (
            await http.get(f"/v1/models/{path}"),
            await http.post(f"/v1/encode/{path}", {"items": [{"text": "a"}]}),
            await http.post(f"/tei/{path}/embed", {"inputs": "a"}),
        ):
            assert 400 <= reply.status < 500
            assert isinstance(reply.json, dict)


def nested(depth: int, name: str = "x") -> bytes:
    return (
        b'{"model":"org/model","input":"a","'
        + name.encode()
        + b'":'
        + b"[" * depth
        + b"]" * depth
        + b"}"
    )


DEEP = [
    nested(100_000),
    nested(100_000, "messages"),
    nested(100_000, "input"),
    b"[" * 500_000,
    b'{"a":' * 200_000,
]


@pytest.mark.parametrize(
    "path",
    [
        EMBED,
        "/v1/rerank",
        "/v1/encode/org/model",
        "/v1/score/org/model",
        "/v1/extract/org/model",
        "/tei/org/model/embed",
    ],
)
@pytest.mark.parametrize("number", range(len(DEEP)))
async def test_deep_json_is_refused(path: str, number: int) -> None:
    async with edge(Script()) as http:
        assert 400 <= (await http.post(path, DEEP[number])).status < 500
        assert (await http.post(EMBED, BODY)).status == 200


async def test_deep_msgpack_is_refused() -> None:
    async with edge(Script()) as http:
        for body in (
            b"\x91" * 200_000,
            b"\x81\xa5items" + b"\x91" * 200_000,
            b"\x81\xa1x" + b"\x91" * 200_000,
        ):
            reply = await http.post(
                "/v1/encode/org/model", body, content_type="application/msgpack"
            )
            assert 400 <= reply.status < 500
        assert (await http.post(EMBED, BODY)).status == 200


NUMBERS = [
    b"1e999",
    b"-1e999",
    b"1" + b"0" * 5000,
    b"NaN",
    b"Infinity",
    b"-Infinity",
    b"9223372036854775808",
    b"-1",
    b"1.5",
    b"1e400",
    b"0x10",
]


@pytest.mark.parametrize("number", NUMBERS)
async def test_extreme_numbers_are_refused(number: bytes) -> None:
    async with edge(Script()) as http:
        for path, body in (
            (EMBED, b'{"model":"org/model","input":"a","dimensions":%b}'),
            ("/v1/rerank", b'{"model":"org/model","query":"a","documents":["b"],"top_n":%b}'),
            ("/v1/encode/org/model", b'{"items":[{"text":"a"}],"params":{"output_types":%b}}'),
            ("/tei/org/model/embed", b'{"inputs":"a","dimensions":%b}'),
        ):
            status = (await http.post(path, body % number)).status
            is_clipped = (
                path == "/v1/rerank" and number == b"9223372036854775808"
            )  # more than there are documents
            assert status == 200 if is_clipped else 400 <= status < 500, (path, number)
        assert (await http.post(EMBED, BODY, x_request_timeout="1e308")).status == 200


async def test_name_with_many_roles_is_not_found() -> None:
    async with edge(Script()) as http:
        for name in ("org/model:query:document", "org/model" + ":query" * 5000):
            assert (await http.post(EMBED, {**BODY, "model": name})).status == 404


async def test_last_of_duplicate_keys_is_used() -> None:
    script = Script()
    async with edge(script) as http:
        assert (
            await http.post(
                EMBED, b'{"model":"org/other","model":"org/model","input":"a","input":["b"]}'
            )
        ).status == 200
        assert (script.requests[0].model, script.requests[0].items[0].text) == (MODEL, "b")


async def test_offer_to_speak_http_2_is_declined() -> None:
    """Java's HttpClient sends it with its first request to a plain HTTP address."""
    script = Script()
    async with edge(script) as http:
        reader, writer = await http.open()
        offer = {
            "connection": "Upgrade, HTTP2-Settings",
            "upgrade": "h2c",
            "http2-settings": "AAEAAEAAAAIAAAAB",
        }
        for _ in range(2):
            writer.write(post(**offer))
            reply = await asyncio.wait_for(read_reply(reader), 60)
            assert (reply.status, reply.json["object"]) == (200, "list")
        writer.close()
    assert len(script.requests) == 2


async def test_100_continue_is_sent() -> None:
    async with edge(Script()) as http:
        reader, writer = await http.open()
        writer.write(
            head("POST", EMBED, {"content-length": str(len(CONTENT)), "expect": "100-Continue"})
        )
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 100")
        writer.write(CONTENT)
        assert (await read_reply(reader)).status == 200
        writer.close()


async def test_sigterm_under_load_answers_accepted_requests() -> None:
    """SIGTERM under load: every request that the router has seen is answered, and the process ends
    with status 0.
    """
    script = Script(act=lambda: asyncio.sleep(0.02))
    answered: list[Reply] = []
    cut: list[bytes] = []
    """The bytes received before the connection was closed."""

    async def caller(http: Http) -> None:
        reader, writer = await http.open()
        try:
            while True:
                writer.write(post())
                answered.append(await read_reply(reader))
        except (asyncio.IncompleteReadError, ConnectionError) as error:
            cut.append(getattr(error, "partial", b""))
        finally:
            writer.close()

    async with routing(script) as router:
        reported = {
            "SHOAL_ROUTERS": router,
            "SHOAL_HTTP_ADDRESS": "127.0.0.1:0",
            "SHOAL_LOG_LEVEL": "INFO",
        }
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "services.edge"),
            env=dict(os.environ) | reported,
            stderr=asyncio.subprocess.PIPE,
        )
        assert process.stderr is not None
        try:
            address = ""
            while not address:
                line = json.loads(await process.stderr.readline())
                address = line["address"] if line["message"] == "listening" else ""
            draining = asyncio.create_task(process.stderr.read())
            callers = [asyncio.create_task(caller(Http(address))) for _ in range(32)]
            await until(lambda: len(answered) > 64, seconds=60.0)
            process.send_signal(signal.SIGTERM)
            await asyncio.gather(*callers)
            assert await process.wait() == 0
            await draining
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
    assert {reply.status for reply in answered} == {200}
    assert len(script.requests) == len(answered)
    assert cut == [b""] * 32
