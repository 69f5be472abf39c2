"""The web pages that an edge answers, with routers that accept anonymous calls and with others."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from libs.errors import InvalidInput
from libs.serving import Security
from services.edge import app
from services.edge.routers import Routers
from services.edge.settings import Settings
from services.local.settings import free_port
from tests.edge.parts import Http, Reply, Script, card, edge, read_reply, routing
from tests.edge.test_server import BODY, EMBED, until
from tests.serving.parts import CLIENT, write_tokens

APP = "https://app.example"
CROSS_SITE = {"origin": "https://evil.example", "sec-fetch-site": "cross-site"}
REBOUND = {
    "host": "evil.example:8080",
    "origin": "http://evil.example:8080",
    "sec-fetch-site": "same-origin",
}
PREFLIGHT = {
    "origin": APP,
    "access-control-request-method": "POST",
    "access-control-request-headers": "authorization",
}


async def ask(
    http: Http, method: str, path: str, headers: Mapping[str, str], body: bytes = b""
) -> Reply:
    """Send exactly these headers and a content-length."""
    reader, writer = await http.open()
    try:
        lines = [
            f"{method} {path} HTTP/1.1",
            *(f"{name}: {value}" for name, value in headers.items() if value),
        ]
        writer.write("\r\n".join([*lines, f"content-length: {len(body)}", "", ""]).encode() + body)
        return await read_reply(reader, "HEAD" if method == "OPTIONS" else method)
    finally:
        writer.close()


async def post(http: Http, headers: Mapping[str, str]) -> Reply:
    """Send text/plain, which a page may do without a preflight."""
    content = b'{"model":"org/model","input":"text"}'
    return await ask(
        http, "POST", EMBED, {"host": "localhost", "content-type": "text/plain", **headers}, content
    )


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 200),
        ({"host": "127.0.0.1:8080"}, 200),
        ({"host": "[::1]:8080"}, 200),
        ({"host": "app.localhost"}, 200),
        ({"host": "192.168.1.5:8080"}, 200),  # an address: no resolver decides where it leads
        ({"host": ""}, 200),  # no browser leaves it out
        ({"origin": "http://localhost", "sec-fetch-site": "same-origin"}, 200),
        ({"origin": "http://localhost"}, 200),
        ({"sec-fetch-site": "none"}, 200),
        ({"host": "evil.example"}, 421),
        ({"host": "[::1].evil.example"}, 421),
        ({"host": "localhost.evil.example"}, 421),
        (REBOUND, 421),
        (REBOUND | {"authorization": "Bearer anything"}, 421),
        (CROSS_SITE, 403),
        (CROSS_SITE | {"authorization": "Bearer anything"}, 403),
        ({"sec-fetch-site": "cross-site"}, 403),
        ({"origin": "http://localhost:3000", "sec-fetch-site": "same-site"}, 403),
        ({"origin": "https://evil.example"}, 403),
        ({"origin": "null"}, 403),
    ],
)
async def test_edge_without_credentials_refuses_foreign_pages(
    headers: dict[str, str], status: int
) -> None:
    script = Script()
    async with edge(script) as http:
        reply = await post(http, headers)
        assert reply.status == status
        assert not any(name.startswith("access-control") for name in reply.headers)
    assert len(script.requests) == (status == 200)


@pytest.mark.parametrize(
    "path",
    ["/v1/models", "/v1/models/org/model", "/openapi.json", "/livez", "/", "/console/events", "/x"],
)
async def test_every_path_refuses_foreign_pages(path: str) -> None:
    script = Script(models=[card()])
    async with edge(script, console=True) as http:
        assert (await ask(http, "GET", path, {"host": "localhost", **CROSS_SITE})).status == 403
        assert (await ask(http, "OPTIONS", path, {"host": "localhost", **PREFLIGHT})).status == 403
        if path not in ("/openapi.json", "/livez"):
            assert (await ask(http, "GET", path, REBOUND)).status == 421
    assert not script.requests


LINK = {
    "host": "localhost",
    "sec-fetch-site": "cross-site",
    "sec-fetch-mode": "navigate",
    "sec-fetch-dest": "document",
}


async def test_foreign_link_opens_only_the_console() -> None:
    script = Script(models=[card()])
    async with edge(script, console=True) as http:
        page = await ask(http, "GET", "/", LINK)
        assert (page.status, page.headers["content-type"]) == (200, "text/html; charset=utf-8")
        found = re.search(rb"/console/static/[0-9a-f]+/console.css", page.body)
        assert found is not None
        assert (await ask(http, "GET", found[0].decode(), LINK)).status == 200
        assert (await ask(http, "HEAD", "/", LINK)).status == 200
        for path in ("/v1/models", "/openapi.json", "/console/events", "/livez"):
            assert (await ask(http, "GET", path, LINK)).status == 403
        assert (await ask(http, "POST", "/", LINK)).status == 403
        for other in (
            {"sec-fetch-dest": "iframe"},
            {"sec-fetch-mode": "no-cors"},
            {"sec-fetch-mode": ""},
        ):
            assert (await ask(http, "GET", "/", LINK | other)).status == 403
        assert (await ask(http, "GET", "/", LINK | {"host": "evil.example"})).status == 421
    assert not script.requests


async def test_other_addresses_refuse_foreign_pages() -> None:
    door, console = f"127.0.0.1:{free_port()}", f"127.0.0.1:{free_port()}"
    script = Script()
    async with edge(script, tei_http=((door, "org/model"),), console=True, console_address=console):
        for address, path in ((door, "/embed"), (console, "/tei/org/model/embed")):
            for headers, status in (({}, 200), (CROSS_SITE, 403), (REBOUND, 421)):
                reply = await ask(
                    Http(address),
                    "POST",
                    path,
                    {"host": "localhost", **headers},
                    b'{"inputs":"text"}',
                )
                assert reply.status == status
    assert len(script.requests) == 2


@pytest.mark.parametrize("path", ["/livez", "/readyz", "/healthz", "/v2/health/ready"])
async def test_probes_are_answered_for_any_host(path: str) -> None:
    async with edge(Script(), hosts=("mesh.example",)) as http:
        for host in ("10.1.2.3:8080", "edge.shoal.svc:8080"):
            assert (
                await ask(http, "GET", path, {"host": host, "user-agent": "kube-probe/1.31"})
            ).status == 200


async def test_listed_hosts_are_answered() -> None:
    async with edge(Script(), hosts=("mesh.example",)) as http:
        assert (await post(http, {"host": "mesh.example"})).status == 200
        assert (await post(http, {"host": "mesh.example.evil.example"})).status == 421
        refused = await post(http, {"host": "other.example"})
        assert (refused.status, "SHOAL_HTTP_HOSTS" in refused.json["error"]["message"]) == (
            421,
            True,
        )


async def test_with_credentials_any_host_is_answered_and_pages_are_refused_by_the_router(
    tmp_path: Path,
) -> None:
    security = Security(tokens=write_tokens(tmp_path / "tokens.yaml"))
    async with edge(Script(), security) as http:
        assert (await post(http, CROSS_SITE)).status == 401
        given = {"host": "mesh.example", "authorization": f"Bearer {CLIENT}"}
        assert (await post(http, given)).status == 200
        assert (
            await post(http, CROSS_SITE | given)
        ).status == 200  # no page has the token, and none may read the answer


async def test_beyond_this_machine_hosts_are_checked_only_if_they_are_listed() -> None:
    beyond = Settings(
        edge_id="edge",
        address="0.0.0.0:0",
        security=Security(allow_insecure=True),
        grace_seconds=0.1,
    )
    async with routing(Script()) as router:
        async with app.running(replace(beyond, routers=(router,))) as address:
            http = Http(f"127.0.0.1:{address.rpartition(':')[2]}")
            assert (await post(http, {"host": "edge.shoal.svc"})).status == 200
            assert (await post(http, CROSS_SITE)).status == 403
        async with app.running(
            replace(beyond, routers=(router,), hosts=("mesh.example",))
        ) as address:
            http = Http(f"127.0.0.1:{address.rpartition(':')[2]}")
            assert (await post(http, {"host": "edge.shoal.svc"})).status == 421


async def test_pages_of_listed_origins_may_call(tmp_path: Path) -> None:
    for security in (None, Security(tokens=write_tokens(tmp_path / "tokens.yaml"))):
        async with edge(Script(models=[card()]), security, origins=(APP,)) as http:
            allowed = await ask(http, "OPTIONS", EMBED, {"host": "localhost", **PREFLIGHT})
            assert (allowed.status, allowed.headers["access-control-allow-origin"]) == (204, APP)
            assert "POST" in allowed.headers["access-control-allow-methods"]
            assert "authorization" in allowed.headers["access-control-allow-headers"]
            assert allowed.headers["vary"] == "origin"
            page = {
                "origin": APP,
                "sec-fetch-site": "cross-site",
                "authorization": f"Bearer {CLIENT}",
            }
            reply = await post(http, page)
            assert (reply.status, reply.headers["access-control-allow-origin"]) == (200, APP)
            assert {"x-request-id", "retry-after"} <= set(
                reply.headers["access-control-expose-headers"].split(", ")
            )
            assert "access-control-allow-credentials" not in reply.headers
            refused = await ask(
                http, "GET", "/nowhere", {"host": "localhost", **page}
            )  # a page may read errors
            assert (refused.status, refused.headers["access-control-allow-origin"]) == (404, APP)
            other = await ask(
                http,
                "OPTIONS",
                EMBED,
                {"host": "localhost", **PREFLIGHT, "origin": "https://evil.example"},
            )
            assert other.status in (403, 404, 405)
            assert "access-control-allow-origin" not in other.headers
            assert other.headers["vary"] == "origin"
            assert (await post(http, REBOUND | {"origin": APP})).status == (
                421 if security is None else 401
            )


async def test_pages_are_refused_until_a_router_has_refused_a_token(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(app, "POLL_SECONDS", 0.02)
    monkeypatch.setattr(app, "START_SECONDS", 0.1)
    settings = Settings(
        edge_id="edge", address="127.0.0.1:0", routers=("127.0.0.1:1",), grace_seconds=0.1
    )
    async with app.running(settings) as address:
        assert (await post(Http(address), CROSS_SITE)).status == 403


async def test_routers_that_start_to_require_credentials_are_detected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(app, "POLL_SECONDS", 0.02)
    monkeypatch.setattr(app, "GUARD_SECONDS", 0.0)
    answers = [True, True, False]

    async def accepts_anonymous(self: Any) -> bool:
        return answers.pop(0) if len(answers) > 1 else answers[0]

    monkeypatch.setattr(Routers, "accepts_anonymous", accepts_anonymous)
    async with edge(Script()) as http:

        async def is_let_through() -> bool:
            return (await post(http, CROSS_SITE)).status == 200

        await until(is_let_through)


def test_origins_and_hosts_are_checked() -> None:
    for name, value in (
        ("SHOAL_HTTP_ORIGINS", "*"),
        ("SHOAL_HTTP_ORIGINS", "app.example"),
        ("SHOAL_HTTP_ORIGINS", "https://app.example/"),
        ("SHOAL_HTTP_ORIGINS", "https://app.example:443"),
        ("SHOAL_HTTP_ORIGINS", "https://*.example"),
        ("SHOAL_HTTP_ORIGINS", "https://user@app.example"),
        ("SHOAL_HTTP_ORIGINS", "tauri://Localhost"),
        ("SHOAL_HTTP_ORIGINS", "app://obsidian.md/page"),
        ("SHOAL_HTTP_ORIGINS", "null"),
        ("SHOAL_CONSOLE_ORIGINS", "tauri://localhost"),
        ("SHOAL_CONSOLE_ORIGINS", "http://[::1]:3000"),
        ("SHOAL_HTTP_HOSTS", "mesh.example:8080"),
        ("SHOAL_HTTP_HOSTS", "*"),
    ):
        with pytest.raises(InvalidInput, match=name):
            Settings.from_env({name: value})
    origins = "https://app.example, http://localhost:3000"
    found = Settings.from_env({"SHOAL_HTTP_ORIGINS": origins, "SHOAL_HTTP_HOSTS": "mesh.example"})
    assert found.origins == ("https://app.example", "http://localhost:3000")
    assert found.describe()["origins"] == "https://app.example,http://localhost:3000"
    assert found.hosts == ("mesh.example",)


@pytest.mark.parametrize(
    "origin",
    [
        "tauri://localhost",
        "app://obsidian.md",
        "vscode-webview://0abc",
        "chrome-extension://abc",
        "http://[::1]:3000",
    ],
)
async def test_origins_of_apps_and_extensions_may_be_listed(origin: str) -> None:
    origins = Settings.from_env({"SHOAL_HTTP_ORIGINS": origin}).origins
    async with edge(Script(), origins=origins) as http:
        reply = await post(http, {"origin": origin, "sec-fetch-site": "cross-site"})
        assert (reply.status, reply.headers["access-control-allow-origin"]) == (200, origin)


async def test_programs_are_not_affected() -> None:
    async with edge(Script()) as http:
        assert (await http.post(EMBED, BODY)).status == 200
