"""The edge over real sockets, in front of a real gRPC server with scripted answers."""

from __future__ import annotations

import asyncio
import inspect
import json
import logging
import ssl
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from libs.errors import InvalidInput
from libs.serving import Security
from services.edge import server
from services.edge.app import running
from services.edge.settings import Settings
from tests.edge.parts import (
    MODEL,
    Http,
    Script,
    card,
    edge,
    head,
    read_reply,
    routing,
)
from tests.serving.parts import CLIENT, write_tokens
from tests.support.certificates import Certificates

EMBED = "/v1/embeddings"
BODY: dict[str, Any] = {"model": MODEL, "input": "text"}


async def until(what: Callable[[], Any], seconds: float = 60.0) -> None:
    """Wait until `what()`, or the awaitable that it returns, is true."""
    end = time.monotonic() + seconds
    while True:
        found = what()
        if await found if inspect.isawaitable(found) else found:
            return
        assert time.monotonic() < end
        await asyncio.sleep(0.01)


async def test_slow_heads_and_bodies_time_out() -> None:
    async with edge(Script(), header_seconds=0.2, body_seconds=0.2) as http:
        reader, writer = await http.open()
        writer.write(b"POST /v1/embeddings HTTP/1.1\r\nhost:")
        assert (await read_reply(reader)).status == 408
        assert await reader.read() == b""
        writer.close()
        reader, writer = await http.open()
        assert (await read_reply(reader)).status == 408  # no byte at all
        writer.close()
        reader, writer = await http.open()
        writer.write(head("POST", EMBED, {"content-length": "10"}) + b"{")
        reply = await read_reply(reader)
        assert (reply.status, reply.headers["connection"]) == (408, "close")
        assert await reader.read() == b""
        writer.close()


async def test_idle_connections_are_closed_and_used_ones_kept() -> None:
    async with edge(Script(), idle_seconds=3.0, header_seconds=0.2) as http:
        reader, writer = await http.open()
        for _ in range(3):
            writer.write(head("GET", "/livez", {}))
            assert (await read_reply(reader)).status == 200
        assert await reader.read() == b""
        writer.close()


async def test_rest_of_a_refused_body_is_read_for_a_limited_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(server, "LINGER_SECONDS", 0.2)
    async with edge(Script(), body_bytes=2000) as http:
        reader, writer = await http.open()
        writer.write(head("POST", EMBED, {"content-length": "5000"}))
        assert (await read_reply(reader)).status == 413
        assert await reader.read() == b""
        writer.close()


async def test_large_heads_and_invalid_http_are_refused() -> None:
    async with edge(Script()) as http:
        for sent, status in (
            (head("GET", "/livez", {"x": "y" * server.MAX_HEAD_BYTES}), 431),
            (b"GET /" + b"a" * server.MAX_HEAD_BYTES + b" HTTP/1.1\r\n", 431),
            (b"hello\r\n\r\n", 400),
            (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", 400),
        ):
            reader, writer = await http.open()
            writer.write(sent)
            reply = await read_reply(reader)
            assert reply.status == status
            assert reply.json["error"]["message"]
            writer.close()


async def test_connections_are_limited() -> None:
    async with edge(Script(), connections=2) as http:
        kept = [await http.open() for _ in range(2)]
        reader, writer = await http.open()
        assert (await read_reply(reader)).status == 503
        writer.close()
        for _, each in kept:
            each.close()


async def test_pipelined_requests_are_answered_in_order() -> None:
    script = Script(models=[card()])
    async with edge(script) as http:
        reader, writer = await http.open()
        content = json.dumps(BODY).encode()
        writer.write(
            (head("POST", EMBED, {"content-length": str(len(content))}) + content) * 2
            + head("GET", "/livez", {})
        )
        assert [(await read_reply(reader)).status for _ in range(3)] == [200, 200, 200]
        writer.close()


async def test_drain_answers_requests_in_flight_and_accepts_no_new_ones() -> None:
    go = asyncio.Event()
    script = Script(act=go.wait)  # type: ignore[arg-type]
    async with routing(script) as router:
        settings = Settings(
            edge_id="edge", address="127.0.0.1:0", routers=(router,), grace_seconds=60.0
        )
        context = running(settings)
        http = Http(await context.__aenter__())
        idle, writer = await http.open()
        sent = asyncio.create_task(http.post(EMBED, BODY))
        await until(lambda: script.requests)
        leaving = asyncio.create_task(context.__aexit__(None, None, None))
        assert await idle.read() == b""
        writer.close()
        with pytest.raises(OSError, match="ailed"):
            await http.open()
        go.set()
        reply = await sent
        assert (reply.status, reply.headers["connection"]) == (200, "close")
        await leaving


async def test_requests_are_aborted_after_the_grace_time() -> None:
    async def act() -> None:
        await asyncio.Event().wait()

    script = Script(act=act)
    async with edge(script, grace_seconds=0.1) as http:
        _, writer = await http.open()
        content = json.dumps(BODY).encode()
        writer.write(head("POST", EMBED, {"content-length": str(len(content))}) + content)
        await until(lambda: script.requests)
    await until(lambda: script.cancelled == 1)
    writer.close()


async def test_tokens_are_checked_by_the_router(tmp_path: Path) -> None:
    security = Security(tokens=write_tokens(tmp_path / "tokens.yaml"))
    script = Script()
    async with edge(script, security) as http:
        for headers in (
            {},
            {"authorization": "Bearer wrong-token-0123456789"},
            {"authorization": "Basic abc def"},
        ):
            reply = await http.post(EMBED, BODY, **headers)
            assert (
                reply.status,
                reply.json["error"]["code"],
                reply.headers["www-authenticate"],
            ) == (
                401,
                "invalid_api_key",
                "Bearer",
            )
        assert (await http.post(EMBED, BODY, authorization=f"Bearer {CLIENT}")).status == 200
        assert (
            await http.post(EMBED, BODY, authorization=CLIENT)
        ).status == 200  # LlamaIndex' TEI client
        assert (await http.post(EMBED, BODY, authorization="Bearer bad\x01token-0123")).status in (
            400,
            401,
        )
        assert script.calls[0].tenant == "acme"


async def test_no_token_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    async with edge(Script()) as http:
        await http.post(EMBED, BODY, authorization="Bearer a-secret-of-somebody")
    assert "a-secret" not in caplog.text + str([record.__dict__ for record in caplog.records])


async def test_listening_beyond_this_machine_needs_tls() -> None:
    with pytest.raises(InvalidInput, match="without TLS"):
        Settings(edge_id="edge", address="0.0.0.0:8080")
    Settings(edge_id="edge", address="0.0.0.0:8080", security=Security(allow_insecure=True))
    with pytest.raises(InvalidInput, match="pass tokens to"):
        Settings(edge_id="edge", routers=("router.example:50051",))


async def test_beyond_this_machine_routers_must_authenticate(tmp_path: Path) -> None:
    made = Certificates(tmp_path).issue("router")
    tls = Security(cert=made.certificate, key=made.key)
    context = ssl.create_default_context(cafile=str(tmp_path / "ca.pem"))
    for tokens, status in ((None, 503), (write_tokens(tmp_path / "tokens.yaml"), 200)):
        async with routing(Script(), Security(tokens=tokens)) as router:
            settings = Settings(
                edge_id="edge",
                address="0.0.0.0:0",
                security=tls,
                routers=(router,),
                grace_seconds=0.1,
            )
            async with running(settings) as address:
                http = Secure(f"127.0.0.1:{address.rpartition(':')[2]}", context)
                assert (
                    await http.post(EMBED, BODY, authorization=f"Bearer {CLIENT}")
                ).status == status
                assert (await http.get("/readyz")).status == status


class Secure(Http):
    def __init__(self, address: str, context: ssl.SSLContext) -> None:
        super().__init__(address)
        object.__setattr__(self, "context", context)

    async def open(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        host, _, port = self.address.rpartition(":")
        return await asyncio.open_connection(host, int(port), ssl=self.context)  # type: ignore[attr-defined]


async def test_callers_certificates_name_their_tenant(tmp_path: Path) -> None:
    certificates = Certificates(tmp_path)
    router, gate = certificates.issue("router"), certificates.issue("client/*")
    script = Script()
    router_security = Security(cert=router.certificate, key=router.key, client_ca=certificates.ca)
    upstream = {
        "SHOAL_ROUTERS_CA": certificates.ca,
        "SHOAL_ROUTERS_CERT": gate.certificate,
        "SHOAL_ROUTERS_KEY": gate.key,
    }
    own = {
        "SHOAL_TLS_CERT": router.certificate,
        "SHOAL_TLS_KEY": router.key,
        "SHOAL_TLS_CLIENT_CA": certificates.ca,
    }
    async with routing(script, router_security) as address:
        environ = {name: str(value) for name, value in (upstream | own).items()}
        port = address.rpartition(":")[2]
        settings = Settings.from_env(
            environ | {"SHOAL_ROUTERS": f"localhost:{port}", "SHOAL_HTTP_ADDRESS": "127.0.0.1:0"}
        )
        async with running(replace(settings, grace_seconds=0.1)) as found:
            for name, status in (("client/search", 200), ("worker", 403)):
                one = certificates.issue(name)
                context = ssl.create_default_context(cafile=str(certificates.ca))
                context.load_cert_chain(one.certificate, one.key)
                reply = await Secure(found, context).post(
                    EMBED, BODY, authorization="Bearer of-an-openai-client"
                )
                assert reply.status == status
                if status == 200:
                    other = await Secure(found, context).post(EMBED, BODY, x_shoal_tenant="billing")
                    assert other.status == 403
            nobody = Secure(found, ssl.create_default_context(cafile=str(certificates.ca)))
            with pytest.raises((OSError, asyncio.IncompleteReadError)):
                await nobody.post(EMBED, BODY)
    assert [call.tenant for call in script.calls] == ["search"]


async def test_callers_cannot_use_the_edges_certificate(tmp_path: Path) -> None:
    certificates = Certificates(tmp_path)
    router, gate = certificates.issue("router"), certificates.issue("client/*")
    security = Security(cert=router.certificate, key=router.key, client_ca=certificates.ca)
    environ = {
        "SHOAL_ROUTERS_CA": certificates.ca,
        "SHOAL_ROUTERS_CERT": gate.certificate,
        "SHOAL_ROUTERS_KEY": gate.key,
    }
    script = Script()
    async with routing(script, security) as address:
        named = {name: str(value) for name, value in environ.items()} | {
            "SHOAL_ROUTERS": f"localhost:{address.rpartition(':')[2]}"
        }
        settings = replace(
            Settings.from_env(named | {"SHOAL_HTTP_ADDRESS": "127.0.0.1:0"}), grace_seconds=0.1
        )
        async with running(settings) as found:
            assert (await Http(found).post(EMBED, BODY)).status == 401
    assert not script.requests


async def test_renewed_certificates_are_presented(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "CERTIFICATE_CHECK_SECONDS", 0.05)
    certificates = Certificates(tmp_path)
    made = certificates.issue("router")
    context = ssl.create_default_context(cafile=str(certificates.ca))
    async with edge(Script(), security=None) as plain, routing(Script()) as router:
        assert (await plain.get("/livez")).status == 200
        security = Security(cert=made.certificate, key=made.key)
        settings = Settings(
            edge_id="edge",
            address="127.0.0.1:0",
            security=security,
            routers=(router,),
            grace_seconds=0.1,
        )
        async with running(settings) as address:
            http = Secure(address, context)

            async def serial() -> str:
                _, writer = await http.open()
                found = writer.get_extra_info("ssl_object").getpeercert()["serialNumber"]
                writer.close()
                return str(found)

            before = await serial()
            certificates.issue("router")

            async def is_renewed() -> bool:
                return await serial() != before

            await until(is_renewed)
            assert (await http.post(EMBED, BODY)).status == 200
