"""The console's server: permissions, the shared watch, and the files, in front of a fake mesh
(fake_mesh.py).
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from libs.errors import InvalidInput, NoCapacity, Unauthenticated
from services.edge.activity.history import STEP_SECONDS
from services.edge.app import Edge, running
from services.edge.console import files
from services.edge.routers import Routers
from services.edge.settings import Settings
from tests.edge import fake_mesh
from tests.edge.fake_mesh import NAMES, RESIDENT, FakeMesh, busy
from tests.edge.parts import Http, head, read_reply
from tests.edge.test_server import until

MODEL = "nomic-ai/nomic-embed-text-v1.5"
OURS = {"host": "127.0.0.1:8080", "x_shoal_console": "1"}


@asynccontextmanager
async def console(fake: FakeMesh, **settings: Any) -> AsyncIterator[Http]:
    async with fake_mesh.routing(fake) as router:
        given = Settings(
            edge_id="edge",
            address="127.0.0.1:0",
            routers=(router,),
            console=True,
            grace_seconds=5.0,
        )
        async with running(replace(given, **settings)) as address:
            yield Http(address)


def asked(fake: FakeMesh) -> list[str]:
    """Return the calls made for a caller; the edge's watch has no caller."""
    return [name for name, _ in fake.calls if name != "WatchMesh"]


async def get(http: Http, path: str, host: str = "127.0.0.1:8080", **headers: str) -> Any:
    return await send(http, "GET", path, b"", {"host": host, **headers})


async def act(http: Http, body: Any, **headers: str) -> Any:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    return await send(
        http, "POST", "/console/act", content, OURS | {"content_type": "application/json"} | headers
    )


async def posted(http: Http, path: str, body: bytes) -> Any:
    return await send(
        http, "POST", path, body, {"host": "127.0.0.1:8080", "content_type": "application/json"}
    )


async def send(http: Http, method: str, path: str, body: bytes, headers: Mapping[str, str]) -> Any:
    """Send a request like Http.send, with the Host of the test."""
    reader, writer = await http.open()
    try:
        text = head(
            method,
            path,
            {
                "content-length": str(len(body)),
                **{key: value for key, value in headers.items() if key != "host"},
            },
        )
        writer.write(text.replace(b"host: localhost", f"host: {headers['host']}".encode()) + body)
        return await read_reply(reader, method)
    finally:
        writer.close()


class Page:
    """One page's stream of events."""

    def __init__(self, http: Http, **headers: str) -> None:
        self._http = http
        self._headers = OURS | headers
        self.status = 0

    async def __aenter__(self) -> Page:
        self._reader, self._writer = await self._http.open()
        headers = {key: value for key, value in self._headers.items() if key != "host"}
        self._writer.write(
            head("GET", "/console/events", headers).replace(
                b"host: localhost", f"host: {self._headers['host']}".encode()
            )
        )
        self.head = (await self._reader.readuntil(b"\r\n\r\n")).decode()
        self.status = int(self.head.split()[1])
        self._text = ""
        return self

    async def __aexit__(self, *error: object) -> None:
        self._writer.close()

    async def next(self, name: str = "mesh") -> dict[str, Any]:
        """Return the data of the next event of that name."""
        while True:
            while "\n\n" in self._text:
                event, _, self._text = self._text.partition("\n\n")
                fields = dict(
                    line.split(": ", 1) for line in event.split("\n") if not line.startswith(":")
                )
                if fields.get("event") == name:
                    found: dict[str, Any] = json.loads(fields["data"])
                    return found
            size = int(await asyncio.wait_for(self._reader.readline(), 60), 16)
            if not size:
                raise EOFError
            self._text += (await self._reader.readexactly(size + 2))[:-2].decode()


async def test_page_and_its_files() -> None:
    async with console(FakeMesh()) as http:
        page = await get(http, "/")
        assert page.status == 200
        assert page.headers["content-type"] == "text/html; charset=utf-8"
        assert page.headers["cache-control"] == "no-cache"
        policy = page.headers["content-security-policy"]
        assert policy.startswith("default-src 'self';")
        assert "unsafe" not in policy
        assert page.headers["x-frame-options"] == "DENY"
        assert page.headers["x-content-type-options"] == "nosniff"
        assert (await get(http, "/", if_none_match=page.headers["etag"])).status == 304
        assert (await send(http, "HEAD", "/", b"", {"host": "localhost"})).status == 200
        paths = re.findall(r'(?:src|href)="([^"]+)"', page.body.decode())
        assert len(paths) == 4
        for path in paths:
            found = await get(http, path)
            assert (found.status, found.headers["cache-control"]) == (
                200,
                "public, max-age=31536000, immutable",
            )
            assert (
                await get(http, path, if_none_match=f'"x", {found.headers["etag"]}')
            ).status == 304
        assert (await get(http, "/console/static/0123456789abcdef/main.js")).status == 404
        assert (await get(http, paths[0].replace("icon.svg", "../app.py"))).status == 404
        # Other paths are the edge's.
        assert (await get(http, "/livez")).json == {"status": "ok"}
        assert (await get(http, "/v1/models")).status == 200


def test_pages_comply_with_their_policy() -> None:
    """Files contain no foreign address and no inline script or style, and all imports exist."""
    page = (files.STATIC / "index.html").read_text()
    assert not re.search(r"<style|\sstyle=|\son\w+=|<script(?![^>]*src=)", page)
    for path in files.STATIC.glob("*.js"):
        text = path.read_text()
        assert not re.search(
            r"\beval\(|new Function|innerHTML|dangerously|document\.write", text
        ), path
        assert not re.search(r"https?://(?!www\.w3\.org)", text), path
        for name in re.findall(r'from "(\./[^"]+)"', text):
            assert (path.parent / name).is_file(), (path, name)
    assert "url(" not in (files.STATIC / "console.css").read_text()


def test_vendored_files_equal_the_published_ones() -> None:
    """The hashes are from npm's package; docs/console.md lists them."""
    folder = files.STATIC / "vendor"
    lines = (folder / "SHA256SUMS").read_text().splitlines()
    listed = {name: digest for digest, name in map(str.split, lines)}
    found = {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in folder.iterdir()
        if path.name != "SHA256SUMS"
    }
    assert found == listed
    assert (
        listed["htm-preact.js"]
        == "72284e8e9079c87817145df1110f74e8a2aa040b2fc384922e18dfcb46fc1fd7"
    )
    licences = (folder / "LICENCES.txt").read_text()
    assert "Apache License" in licences
    assert "The MIT License" in licences


async def test_rebound_name_is_refused() -> None:
    """DNS rebinding: the browser treats the console as part of evil.example and sends its
    name as Host.
    """
    async with console(busy()) as http:
        for path in ("/", "/console/events", "/console/static/x"):
            assert (await get(http, path, "evil.example:8080", x_shoal_console="1")).status == 421
        assert (
            await act(http, {"action": "evict", "model": NAMES[0][0]}, host="evil.example")
        ).status == 421
        assert (await get(http, "/livez", "evil.example")).status == 200


PUBLIC = ("https://mesh.example", "https://ops.example:8443")


async def test_proxy_that_rewrites_host() -> None:
    """Without the setting the page's requests are refused with the setting to change; with it they
    are answered, and requests of other pages are not.
    """
    body = {"action": "check", "model": NAMES[0][0]}
    proxied = {"host": "edge:8080", "origin": PUBLIC[0], "sec_fetch_site": "same-origin"}
    async with console(busy(), console_hosts=("edge",)) as http:
        refused = await act(http, body, **proxied)
        assert refused.status == 403
        assert "SHOAL_CONSOLE_ORIGINS" in refused.json["error"]["message"]
    async with console(busy(), console_hosts=("edge",), console_origins=PUBLIC) as http:
        assert (await get(http, "/", "edge:8080")).status == 200
        assert (await act(http, body, **proxied)).status == 200
        assert (await act(http, body, **proxied | {"host": "mesh.example"})).status == 200
        assert (await act(http, body, **proxied | {"origin": "https://evil.example"})).status == 403
        assert (await act(http, body, **proxied | {"host": "evil.example"})).status == 421


async def test_forms_of_other_pages_have_no_effect() -> None:
    """CSRF: requests that a foreign page can send without permission (CORS) are refused before they
    reach a router.
    """
    fake = busy()
    async with console(fake) as http:
        body = {"action": "evict", "model": NAMES[0][0]}
        seen = len(asked(fake))
        assert (await act(http, body, x_shoal_console="")).status == 403
        assert (await act(http, body, origin="http://evil.example")).status == 403
        assert (await act(http, body, content_type="text/plain")).status == 415
        assert (
            await act(http, body, content_type="application/x-www-form-urlencoded")
        ).status == 415
        assert (await send(http, "GET", "/console/act", b"", OURS)).status == 404
        preflight = await send(
            http,
            "OPTIONS",
            "/console/act",
            b"",
            {"host": "127.0.0.1", "origin": "http://evil.example"},
        )
        assert preflight.status == 403
        assert not any(name.startswith("access-control") for name in preflight.headers)
        assert len(asked(fake)) == seen


async def test_actions_call_the_router() -> None:
    fake = busy()
    async with console(fake) as http:
        loaded = await act(
            http, {"action": "load", "model": MODEL, "pool": "cpu"}, authorization="Bearer mine"
        )
        assert loaded.json == {"message": f"{MODEL} is resident on cpu-0"}
        name, request = fake.calls[-1]
        assert (name, request.model, request.pool) == ("LoadModel", MODEL, "cpu")
        assert fake.metadata[-1]["authorization"] == "Bearer mine"
        assert (await act(http, {"action": "pin", "model": MODEL})).json[
            "message"
        ] == f"{MODEL} is pinned on cpu-0"
        assert (await act(http, {"action": "unpin", "model": MODEL})).json[
            "message"
        ] == f"{MODEL} may be evicted again"
        assert (await act(http, {"action": "evict", "model": MODEL})).json[
            "message"
        ] == f"cpu-0 will unload {MODEL}"
        assert (await act(http, {"action": "evict", "model": MODEL})).json[
            "message"
        ] == f"no worker holds {MODEL}"
        found = (await act(http, {"action": "check", "model": MODEL})).json
        assert found["model"]["card"]["family"] == "nomic_bert"
        assert [one["id"] for one in found["workers"]] == ["cpu-0", "l4-0", "l4-1", "l4-2"]
        assert found["plan"].startswith("held back")
        unknown = (await act(http, {"action": "check", "model": "org/unknown"})).json
        assert unknown["model"] is None
        ids = [metadata["x-request-id"] for metadata in fake.metadata]
        assert len(set(ids)) == len(ids)


@pytest.mark.parametrize(
    ("body", "status", "reason"),
    [
        (b"no json", 400, "INVALID_INPUT"),
        ({"action": "drop", "model": MODEL}, 400, "INVALID_INPUT"),
        ({"action": "load", "model": MODEL, "tenant": "x"}, 400, "INVALID_INPUT"),
        ({"action": "load"}, 400, "INVALID_INPUT"),
        (b" " * 20_000, 413, "TOO_LARGE"),
        ({"action": "evict", "model": "org/unknown"}, 404, "MODEL_NOT_FOUND"),
        ({"action": "load", "model": NAMES[9][0]}, 502, "MODEL_LOAD_FAILED"),
    ],
)
async def test_failed_actions_return_their_reason(body: Any, status: int, reason: str) -> None:
    async with console(busy()) as http:
        reply = await act(http, body)
        assert (reply.status, reply.json["error"]["reason"]) == (status, reason)
        assert reply.json["error"]["message"]


async def test_router_checks_roles() -> None:
    fake = busy()
    fake.tokens = {"a": "admin", "c": "client"}
    async with console(fake) as http:
        body = {"action": "evict", "model": NAMES[0][0]}
        assert (await act(http, body)).status == 401
        denied = await act(http, body, authorization="Bearer c")
        assert (denied.status, denied.json["error"]["reason"]) == (403, "PERMISSION_DENIED")
        assert (await act(http, body, authorization="Bearer a")).status == 200
        async with Page(http) as page:
            assert page.status == 401
        async with Page(http, authorization="Bearer c") as page:
            assert page.status == 403
        async with Page(http, authorization="Bearer a") as page:
            assert (await page.next())["full"]


async def test_pages_share_one_watch() -> None:
    fake = busy()
    fake.seconds = 0.02
    async with console(fake) as http, Page(http) as one:
        assert "text/event-stream" in one.head
        assert (await one.next("about"))["version"]
        first = await one.next()
        while "router" not in first:
            first = await one.next()
        async with Page(http) as two, Page(http) as three:
            for page in (two, three):
                described = await page.next()
                assert described["full"]
                assert len(described["models"]) == 10
                assert len(described["workers"]) == 4
            await until(lambda: fake.watchers == 1)
            # Later events contain only changes.
            later = await one.next()
            assert "models" not in later
            fake.set(MODEL, RESIDENT, load_seconds=2.0)
            while "models" not in (later := await one.next()):
                pass
            assert list(later["models"]) == [MODEL]
            assert [event["text"] for event in later["events"]] == [
                f"cpu-0 loaded {MODEL} in 2.0 s"
            ]
            assert (later["events"][0]["tone"], later["events"][0]["model"]) == ("good", MODEL)
        # A page that connects later receives the earlier events.
        async with Page(http) as four:
            assert (await four.next())["events"]
        # A new watch may begin before the router has ended the previous one: the edge's, then a
        # page's.
        assert fake.most_watchers <= 2


async def test_events_before_the_first_page_are_shown_and_the_queue_is_remembered() -> None:
    fake = busy()
    fake.seconds = 0.02
    async with console(fake) as http:

        async def has_queue() -> bool:
            found = await get(http, "/console/history", x_shoal_console="1")
            return max(one or 0 for one in found.json["steps"]["queued"]) == sum(
                lane.queued_jobs for lane in fake.mesh.lanes
            )

        await until(has_queue)
        fake.set(MODEL, RESIDENT, load_seconds=2.0)
        fake.mesh.lanes[0].queued_jobs += 5
        await until(has_queue)
        async with Page(http) as page:
            first = await page.next()
        assert [event["text"] for event in first["events"]] == [f"cpu-0 loaded {MODEL} in 2.0 s"]
        assert (
            next(call for name, call in fake.calls if name == "WatchMesh").interval_seconds
            == STEP_SECONDS
        )


async def test_history_contains_the_last_requests_without_texts() -> None:
    fake = fake_mesh.with_others(busy())
    async with console(fake) as http:
        encode = json.dumps({"model": MODEL, "input": ["a secret of a caller"]}).encode()
        assert (await posted(http, "/v1/embeddings", encode)).status == 200
        said = {
            "model": fake_mesh.GENERATIVE,
            "messages": [{"role": "user", "content": "another secret"}],
            "stream": True,
        }
        streamed = await posted(http, "/v1/chat/completions", json.dumps(said).encode())
        assert streamed.status == 200
        failing = json.dumps({"model": NAMES[9][0], "input": "a third secret"}).encode()
        assert (await posted(http, "/v1/embeddings", failing)).status == 502
        assert (await posted(http, "/v1/embeddings", b"{}")).status == 400
        assert (await get(http, "/v1/models")).status == 200
        found = await get(http, "/console/history", x_shoal_console="1")
        assert found.headers["cache-control"] == "no-store"
        requests = found.json["requests"]
        assert [(one["verb"], one["model"], one["status"], one["reason"]) for one in requests] == [
            ("", "", 400, "INVALID_INPUT"),
            ("encode", NAMES[9][0], 502, "MODEL_LOAD_FAILED"),
            ("generate", fake_mesh.GENERATIVE, 200, ""),
            ("encode", MODEL, 200, ""),
        ]
        assert (requests[3]["input_tokens"], requests[3]["route"]) == (31, "/v1/embeddings")
        assert requests[2]["output_tokens"] > 40
        assert requests[3]["stages"] == {
            "queue": 2.1,
            "prepare": 0.4,
            "wait": 1.2,
            "forward": 6.3,
            "finish": 0.3,
            "total": 11.8,
        }
        steps = found.json["steps"]
        assert [sum(steps[name]) for name in ("requests", "refused", "failed")] == [4, 1, 1]
        assert sum(steps["input_tokens"]) == 31 + 24
        assert any(steps["p99"])
        assert b"secret" not in found.body


async def test_models_are_listed_with_the_inputs_of_their_cards() -> None:
    """A caller who may not watch the mesh needs them for the playground's file input."""
    async with console(fake_mesh.with_others(busy())) as http:
        listed = {one["id"]: one["inputs"] for one in (await get(http, "/v1/models")).json["data"]}
    assert listed["google/siglip2-base-patch16-224"] == ["text", "image"]
    assert listed["zai-org/GLM-OCR"] == ["image", "document"]
    assert listed[MODEL] == ["text"]


async def test_history_requires_permission_to_watch_the_mesh() -> None:
    fake = busy()
    fake.tokens = {"a": "admin", "c": "client"}
    async with console(fake) as http:
        ours = {"x_shoal_console": "1"}
        assert (await get(http, "/console/history", **ours)).status == 401
        assert (await get(http, "/console/history", **ours, authorization="Bearer c")).status == 403
        assert (await get(http, "/console/history", **ours, authorization="Bearer a")).status == 200
        assert (await get(http, "/console/history", authorization="Bearer a")).status == 403
        assert (await send(http, "POST", "/console/history", b"", OURS)).status == 404
        # The edge has no credential, so it does not try.
        assert "WatchMesh" not in [name for name, _ in fake.calls]


async def test_heads_of_open_pages_count_as_memory_in_flight() -> None:
    async with AsyncExitStack() as stack:
        http = await stack.enter_async_context(
            console(busy(), body_bytes=2000, in_flight_bytes=1 << 20)
        )
        pages = [
            await stack.enter_async_context(Page(http, x_large="a" * 30_000)) for _ in range(32)
        ]
        opened = [page for page in pages if page.status == 200]
        assert opened
        assert {page.status for page in pages[len(opened) :]} == {429}
        assert 60_000 * len(opened) < 1 << 20
        opened[0]._writer.close()

        async def has_room() -> bool:
            async with Page(http, x_large="a" * 30_000) as page:
                return page.status == 200

        await until(has_room)


async def test_watch_continues_for_another_page_and_ends_with_the_last() -> None:
    fake = busy()
    fake.tokens = {"a": "admin", "b": "admin"}
    async with console(fake) as http:
        async with Page(http, authorization="Bearer a") as one:
            await one.next()
            two = Page(http, authorization="Bearer b")
            await two.__aenter__()
            await two.next()

        def watchers() -> list[str]:
            names = [
                fake.metadata[at].get("authorization", "")
                for at, (name, _) in enumerate(fake.calls)
                if name == "WatchMesh"
            ]
            return [name for name in names if name]

        await until(lambda: watchers() == ["Bearer a", "Bearer b"])
        await until(lambda: fake.watchers == 1)
        await two.next()
        # The token of an open page is revoked.
        fake.tokens = {}
        fake.refusal = Unauthenticated("this token was withdrawn")
        assert (await two.next("refused"))["reason"] == "UNAUTHENTICATED"
        with pytest.raises(EOFError):
            await two.next()
        await two.__aexit__()
        await until(lambda: fake.watchers == 0)


async def test_unreachable_mesh_is_reported_and_recovers() -> None:
    fake = busy()
    fake.seconds = 0.02
    async with console(fake) as http, Page(http) as page:
        await page.next()
        fake.refusal = NoCapacity("Redis cannot be reached")
        while (described := await page.next()).get("problem") is None:
            pass
        assert described["problem"] == {
            "reason": "NO_CAPACITY",
            "message": "Redis cannot be reached",
        }
        fake.refusal = None
        while "problem" not in (described := await page.next()):
            pass
        assert described["problem"] is None


async def test_open_pages_do_not_delay_a_drain() -> None:
    async with console(busy(), grace_seconds=60.0) as http:
        page = await Page(http).__aenter__()
        await page.next()
        begin = asyncio.get_running_loop().time()
    assert asyncio.get_running_loop().time() - begin < 30
    await page.__aexit__()


async def test_separate_console_address() -> None:
    fake = busy()
    async with fake_mesh.routing(fake) as router, Routers((router,), None) as routers:
        given = Settings(
            edge_id="e",
            routers=(router,),
            console=True,
            console_address="127.0.0.1:0",
            console_hosts=("mesh.example",),
        )
        edge = Edge(given, routers)
        assert edge.console is not None
        replies: list[Any] = []

        async def answered(application: Any, path: str, host: bytes) -> int:
            scope = {
                "type": "http",
                "method": "GET",
                "path": path,
                "headers": [(b"host", host)],
                "state": {},
            }

            async def nothing() -> dict[str, Any]:
                return {"type": "http.request"}

            async def keep(message: Any) -> None:
                replies.append(message)

            replies.clear()
            await application(scope, nothing, keep)
            return int(replies[0]["status"])

        assert await answered(edge.application, "/console/events", b"localhost") == 404
        assert await answered(edge.console, "/", b"mesh.example") == 200
        assert await answered(edge.console, "/livez", b"localhost") == 200
        # That listener only serves browsers, so other names are refused entirely.
        assert await answered(edge.console, "/livez", b"evil.example") == 421
    async with console(fake, console_address="127.0.0.1:0") as http:
        assert (await get(http, "/console/events")).status == 404


@pytest.mark.parametrize(
    ("environment", "is_on"),
    [
        ({}, True),
        ({"SHOAL_CONSOLE": "0"}, False),
        ({"SHOAL_HTTP_ADDRESS": "0.0.0.0:8080", "SHOAL_ALLOW_INSECURE": "1"}, False),
        (
            {
                "SHOAL_HTTP_ADDRESS": "0.0.0.0:8080",
                "SHOAL_ALLOW_INSECURE": "1",
                "SHOAL_CONSOLE": "1",
            },
            True,
        ),
        (
            {
                "SHOAL_HTTP_ADDRESS": "0.0.0.0:8080",
                "SHOAL_ALLOW_INSECURE": "1",
                "SHOAL_CONSOLE_ADDRESS": "127.0.0.1:8081",
            },
            True,
        ),
        ({"SHOAL_CONSOLE_ADDRESS": "0.0.0.0:8081"}, False),
    ],
)
def test_console_setting(environment: dict[str, str], is_on: bool) -> None:
    settings = Settings.from_env(environment)
    assert settings.console is is_on
    assert (settings.describe()["console"] != "off") is is_on


@pytest.mark.parametrize(
    "environment",
    [
        {"SHOAL_CONSOLE": "yes"},
        {"SHOAL_CONSOLE_ADDRESS": "8081"},
        {"SHOAL_CONSOLE_HOSTS": "https://mesh.example"},
        {"SHOAL_CONSOLE_HOSTS": "mesh.example:80"},
        {"SHOAL_CONSOLE_ORIGINS": "mesh.example"},
        {"SHOAL_CONSOLE_ORIGINS": "https://mesh.example/"},
        {"SHOAL_CONSOLE_ORIGINS": "https://Mesh.example"},
        {"SHOAL_CONSOLE_ORIGINS": "https://mesh.example:443"},
        {"SHOAL_CONSOLE_ORIGINS": "https://user@mesh.example"},
        {"SHOAL_CONSOLE_ORIGINS": "null"},
        {"SHOAL_CONSOLE_ORIGINS": "*"},
        {"SHOAL_CONSOLE": "1", "SHOAL_CONSOLE_ADDRESS": "0.0.0.0:8081"},
    ],
)
def test_invalid_console_settings_are_refused(environment: dict[str, str]) -> None:
    with pytest.raises(InvalidInput):
        Settings.from_env(environment)


def test_wheels_contain_the_files() -> None:
    """The file setup.py lists each folder below static as package data.

    tests/local/test_wheels.py builds the wheels.
    """
    text = (Path(__file__).parents[2] / "setup.py").read_text()
    folders = {
        path.parent.relative_to(files.STATIC.parents[2])
        for path in files.STATIC.rglob("*")
        if path.is_file()
    }
    assert all(f"{{INSIDE}}.services.{'.'.join(folder.parts)}" in text for folder in folders)
