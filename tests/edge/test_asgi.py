"""The application of the edge: paths, headers, errors, limits and disconnects, over real sockets
in front of a real gRPC server with scripted answers.
"""

from __future__ import annotations

import asyncio
import gzip
import hashlib
import json
import logging
import re

import pytest
from shoal.v1 import inference_pb2 as pb

from libs.embedding_id import check_expected
from libs.errors import InvalidInput, ModelNotFound, NoCapacity, QueueFull, WorkerLost
from services.edge import asgi
from services.edge.app import running
from services.edge.reference import page as reference
from services.edge.settings import Settings
from tests.edge.parts import (
    MODEL,
    Http,
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


async def test_metadata_is_passed_to_the_router() -> None:
    script = Script()
    trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-00"
    async with edge(script) as http:
        headers = {
            "x_request_id": "id-1",
            "x_shoal_tenant": "acme",
            "traceparent": trace,
            "x_request_timeout": "50",
        }
        reply = await http.post(EMBED, BODY, authorization="bearer token", **headers)
        assert reply.status == 200
        assert reply.headers["x-request-id"] == "id-1"
        assert int(reply.headers["openai-processing-ms"]) >= 0
        seen = script.metadata[0]
        assert (seen["x-request-id"], seen["x-shoal-tenant"], seen["traceparent"]) == (
            "id-1",
            "acme",
            trace,
        )
        assert seen["authorization"] == "Bearer token"
        assert seen["x-shoal-max-answer-bytes"] == "-1", "the edge reads answers of any size"
        assert 25 < script.seconds[0] < 55  # not the default of 60
        await http.post(EMBED, BODY, x_stainless_read_timeout="600", api_key="azure")
        assert script.seconds[1] > 500
        assert script.metadata[1]["authorization"] == "Bearer azure"
        assert (await http.post(EMBED, BODY)).headers["x-request-id"] == script.calls[2].request_id


async def test_embedding_id_is_required_and_reported_by_headers() -> None:
    found = "0123456789abcdef.float32"

    def encode(request: pb.EncodeRequest) -> pb.EncodeResponse:
        check_expected(request.expect_embedding_id, found)
        rows = dense(vectors(len(request.items)))
        return pb.EncodeResponse(dense=rows, embedding_id=found)

    script = Script(encode=encode)
    async with edge(script) as http:
        plain = await http.post(EMBED, BODY)
        assert plain.headers["x-shoal-embedding-id"] == found
        assert script.requests[-1].expect_embedding_id == ""
        same = await http.post(EMBED, BODY, x_shoal_expect_embedding_id=found)
        assert (same.status, same.headers["x-shoal-embedding-id"]) == (200, found)
        other = await http.post(EMBED, BODY, x_shoal_expect_embedding_id="f" * 16)
        assert other.status == 412
        assert "x-shoal-embedding-id" not in other.headers
        error = json.loads(other.body)["error"]
        assert error["code"] == "embedding_id_mismatch"
        assert error["param"] == "x-shoal-expect-embedding-id"
        assert "f" * 16 in error["message"]
        assert found in error["message"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (EMBED, BODY),
        ("/v2/embed", {"model": "org/model", "texts": ["a"]}),
        ("/api/embed", {"model": "org/model", "input": ["a"]}),
        ("/tei/org/model/embed", {"inputs": ["a"]}),
        ("/v1/encode/org/model", {"items": [{"text": "a"}]}),
    ],
)
async def test_texts_that_were_cut_are_counted_in_a_header(
    path: str, body: dict[str, object]
) -> None:
    usage = pb.Usage(input_tokens=1)
    reply = pb.EncodeResponse(dense=dense(vectors(1)), usage=usage)
    async with edge(Script(encode=lambda request: reply)) as http:
        whole = await http.post(path, body)
        assert whole.status == 200
        assert "x-shoal-truncated-inputs" not in whole.headers
        reply.usage.truncated_items = 1
        assert (await http.post(path, body)).headers["x-shoal-truncated-inputs"] == "1"


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/v1/rerank", {"model": "org/reranker", "query": "a", "documents": ["b"]}, 400),
        ("/v1/completions", {"model": "org/writer", "prompt": "a"}, 400),
        ("/v1/completions", {"model": "org/writer", "prompt": "a", "stream": True}, 400),
        ("/tei/org/model/tokenize", {"inputs": "a"}, 422),
    ],
)
async def test_embedding_id_of_calls_without_vectors_is_refused(
    path: str, body: dict[str, object], status: int
) -> None:
    script = Script()
    async with edge(script) as http:
        reply = await http.post(path, body, x_shoal_expect_embedding_id="f" * 16)
    assert reply.status == status
    assert b"x-shoal-expect-embedding-id is supported for requests that are answered" in reply.body
    assert not script.requests


async def test_id_that_is_none_is_not_made_a_header() -> None:
    rows = dense(vectors(1))
    for found in ("", "a\r\nx-injected: 1"):
        reply = pb.EncodeResponse(dense=rows, embedding_id=found)
        async with edge(Script(encode=lambda request, reply=reply: reply)) as http:  # type: ignore[misc]
            headers = (await http.post(EMBED, BODY)).headers
        assert not {"x-shoal-embedding-id", "x-injected"} & set(headers)


@pytest.mark.parametrize("given", ["", "x" * 129, "with space", "caf\xe9"])
async def test_request_ids_are_printable(given: str) -> None:
    async with edge(Script()) as http:
        reply = await http.post(EMBED, BODY, x_request_id=given)
        assert reply.status == (400 if given else 200)
        assert reply.headers["x-request-id"] not in ("", given)


@pytest.mark.parametrize(
    "path", ["/v1/models/org%2Fmodel", "/v1/models/org/model", "/openai/v1/models/org%2fmodel"]
)
async def test_slashes_of_ids_may_be_escaped(path: str) -> None:
    async with edge(Script(models=[card()])) as http:
        assert (await http.get(path)).json["id"] == MODEL


async def test_ids_in_paths_of_verbs() -> None:
    script = Script()
    async with edge(script) as http:
        for path in (
            "/v1/encode/org%2Fmodel",
            "/v1/encode/org/model",
            "/v1/encode/org/model:default",
        ):
            assert (await http.post(path, {"items": [{"text": "a"}]})).status == 200
        assert (await http.post("/tei/org%2Fmodel/embed", {"inputs": "a"})).status == 200
        assert (await http.post("/tei/org/model/v1/embeddings", {"input": "a"})).status == 200
        assert {request.model for request in script.requests} == {MODEL}


async def test_unknown_paths_return_a_json_error() -> None:
    async with edge(Script()) as http:
        for method, path, status in (
            ("GET", "/nothing", 404),
            ("GET", EMBED, 405),
            ("POST", "/v1/edits", 404),
        ):
            reply = await http.send(method, path, b"", {})
            assert reply.status == status
            assert reply.json["error"]["message"]
        wrong = await http.send("DELETE", EMBED, b"", {})
        assert (wrong.headers["allow"], wrong.json["error"]["param"]) == ("POST", None)


async def test_health_openapi_and_head() -> None:
    async with edge(Script()) as http:
        for path in ("/health", "/healthz", "/livez", "/readyz"):
            assert (await http.get(path)).status == 200
        described = (await http.get("/openapi.json")).json
        assert described["openapi"] == "3.1.0"
        assert [server["url"] for server in described["servers"]] == ["/"]
        root = await http.get("/")
        assert (
            root.headers["content-type"].split(";")[0]
            in described["paths"]["/"]["get"]["responses"]["200"]["content"]
        )
        assert described["paths"][EMBED]["post"]["requestBody"]
        assert (await http.send("HEAD", "/livez", b"", {})).status == 200


async def test_docs_page_names_only_files_that_the_edge_serves() -> None:
    async with edge(Script()) as http:
        page = await http.get("/docs")
        assert (page.status, page.headers["content-type"]) == (200, "text/html; charset=utf-8")
        policy = dict(
            part.strip().split(" ", 1)
            for part in page.headers["content-security-policy"].split(";")
        )
        assert {name for name, value in policy.items() if "unsafe" in value} == {"style-src"}
        assert policy["default-src"] == policy["connect-src"] == "'self'", (
            "no other host, and no inline script"
        )
        named = re.findall(r'(?:src|href|spec-url)="(?!data:)([^"]+)"', page.body.decode())
        assert len(named) >= 5
        for name in named:
            assert not name.startswith(("/", "http")), (
                "a proxy may serve the page below another path"
            )
            assert (await http.get(f"/{name}")).status == 200


def test_docs_page_serves_the_published_rapidoc() -> None:
    """The hash is from npm's package; docs/http.md names its version."""
    folder = reference.STATIC / "vendor"
    lines = (folder / "SHA256SUMS").read_text().splitlines()
    listed = {name: digest for digest, name in map(str.split, lines)}
    found = {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in folder.iterdir()
        if path.name != "SHA256SUMS"
    }
    assert found == listed
    assert (
        listed["rapidoc-min.js"]
        == "affbd173a65e870e18f392cca963113bcdafb6e50e88cd2f6a834a65b22db94d"
    )
    assert (folder / "rapidoc-min.js").read_bytes().startswith(b"/*! RapiDoc 9.3.8 ")
    assert "MIT License" in (folder / "LICENCES.txt").read_text()


@pytest.mark.parametrize(
    ("path", "field"),
    [
        (EMBED, "error"),
        ("/v1/rerank", "error"),
        ("/v1/encode/org/model", "detail"),
        ("/v1/score/org/model", "detail"),
        ("/v1/extract/org/model", "detail"),
        ("/tei/org/model/embed", "error_type"),
        ("/tei/org/model/rerank", "error_type"),
        ("/tei/org/model/predict", "error_type"),
        ("/tei/org/model/similarity", "error_type"),
        ("/tei/org/model", "error_type"),
        ("/models/org/model/pipeline/feature-extraction", "error_type"),
    ],
)
@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b"\xff\xfe", b"null", b'{"a":' * 3000, b"\x00", b'{"inputs":{}}']
)
async def test_malformed_bodies_are_never_500(path: str, field: str, body: bytes) -> None:
    async with edge(Script()) as http:
        reply = await http.post(path, body)
        assert 400 <= reply.status < 500
        assert field in reply.json


async def test_router_errors_reach_the_caller_in_its_names() -> None:
    async def act() -> None:
        raise errors.pop(0)

    errors: list[Exception] = [
        InvalidInput("items[1].text is empty", field="items[1].text"),
        QueueFull("the lane is full", retry_after=2.5),
        ModelNotFound("nobody has it", field="model"),
        NoCapacity("no worker"),
        WorkerLost("workers died"),
        RuntimeError("a fault"),
    ]
    async with edge(Script(act=act)) as http:
        reply = await http.post(EMBED, {"model": MODEL, "input": ["a", ""]})
        assert (reply.status, reply.json["error"]["param"], reply.json["error"]["message"]) == (
            400,
            "input[1]",
            "input[1] is empty",
        )
        assert reply.headers["x-should-retry"] == "false"
        reply = await http.post(EMBED, BODY)
        assert (reply.status, reply.headers["retry-after"], reply.headers["retry-after-ms"]) == (
            429,
            "3",
            "2500",
        )
        assert "x-should-retry" not in reply.headers
        assert (await http.post(EMBED, BODY)).json["error"]["code"] == "model_not_found"
        reply = await http.post("/v1/encode/org/model", {"items": [{"text": "a"}]})
        assert (reply.status, reply.json["detail"]["code"], reply.headers["retry-after"]) == (
            503,
            "PROVISIONING",
            "1",
        )
        reply = await http.post("/tei/org/model/embed", {"inputs": "a"})
        assert (reply.status, reply.json["error_type"], reply.headers["x-should-retry"]) == (
            424,
            "Backend",
            "false",
        )
        reply = await http.post(EMBED, BODY)
        assert (reply.status, reply.json["error"]["type"]) == (500, "server_error")
        assert "fault" not in reply.json["error"]["message"]


async def test_call_is_sent_once_and_a_lost_router_is_reported() -> None:
    calls = 0

    async def act() -> None:
        nonlocal calls
        calls += 1
        raise NoCapacity("no worker")

    async with edge(Script(act=act)) as http:
        assert (await http.post(EMBED, BODY)).status == 503
        assert calls == 1
    gone = Settings(
        edge_id="edge", address="127.0.0.1:0", routers=("127.0.0.1:1",), grace_seconds=0.1
    )
    async with running(gone) as address:
        reply = await Http(address).post(EMBED, BODY)
        assert (reply.status, reply.json["error"]["code"], reply.headers["retry-after"]) == (
            503,
            "overloaded",
            "1",
        )
        assert (await Http(address).get("/readyz")).status == 503
        assert (await Http(address).get("/livez")).status == 200


async def test_unreachable_router_is_skipped() -> None:
    script = Script()
    async with routing(script) as router:
        both = Settings(
            edge_id="edge",
            address="127.0.0.1:0",
            routers=("127.0.0.1:1", router),
            grace_seconds=0.1,
        )
        async with running(both) as address:
            assert (await Http(address).post(EMBED, BODY)).status == 200
    assert len(script.requests) == 1


async def test_deadline_is_exceeded() -> None:
    async def act() -> None:
        await asyncio.Event().wait()

    async with edge(Script(act=act)) as http:
        reply = await http.post(EMBED, BODY, x_request_timeout="0.2")
        assert (reply.status, reply.json["error"]["code"]) == (504, "timeout")
        assert "x-should-retry" not in reply.headers
        for wrong in ("soon", "-1", "0", "nan"):
            assert (await http.post(EMBED, BODY, x_request_timeout=wrong)).status == 400


async def test_disconnect_cancels_the_call(caplog: pytest.LogCaptureFixture) -> None:
    async def act() -> None:
        await asyncio.Event().wait()

    caplog.set_level(logging.INFO, asgi.__name__)
    script = Script(act=act)
    async with edge(script) as http:
        _, writer = await http.open()
        content = json.dumps(BODY).encode()
        writer.write(head("POST", EMBED, {"content-length": str(len(content))}) + content)
        await until(lambda: script.requests)
        writer.close()
        await until(lambda: script.cancelled == 1)
        await until(
            lambda: any(
                getattr(record, "shoal_fields", {}).get("status") == 499
                for record in caplog.records
            )
        )


async def test_disconnect_while_sending(caplog: pytest.LogCaptureFixture) -> None:
    script = Script()
    async with edge(script) as http:
        _, writer = await http.open()
        writer.write(head("POST", EMBED, {"content-length": "100"}) + b"{")
        await writer.drain()
        writer.close()
        assert (await http.post(EMBED, BODY)).status == 200
    assert len(script.requests) == 1


async def test_bodies_are_limited_before_and_while_they_are_read() -> None:
    script = Script()
    async with edge(script, body_bytes=2000) as http:
        reply = await http.post(EMBED, b" " * 2001)
        assert reply.status == 413
        assert "2,000 bytes" in reply.json["error"]["message"]
        reader, writer = await http.open()
        writer.write(head("POST", EMBED, {"transfer-encoding": "chunked"}))
        for _ in range(3):
            writer.write(b"3e8\r\n" + b" " * 1000 + b"\r\n")
        reply = await read_reply(reader)
        assert reply.status == 413
        writer.write(b"0\r\n\r\n")  # the rest is read and dropped; the connection stays open
        content = json.dumps(BODY).encode()
        writer.write(head("POST", EMBED, {"content-length": str(len(content))}) + content)
        assert (await read_reply(reader)).status == 200
        writer.close()
    assert len(script.requests) == 1


async def test_bodies_in_flight_are_limited() -> None:
    script = Script()
    async with edge(script, body_bytes=2000, in_flight_bytes=3000) as http:
        _, writer = await http.open()
        writer.write(head("POST", EMBED, {"content-length": "1900"}) + b" " * 1800)
        await writer.drain()

        async def is_full() -> bool:
            return (await http.post(EMBED, b" " * 1900)).status == 429

        await until(is_full)
        writer.close()

        async def has_room() -> bool:
            return not await is_full()

        await until(has_room)


async def test_unknown_encodings_of_bodies_are_refused() -> None:
    async with edge(Script()) as http:
        for encoding in ("br", "zstd", "gzip, gzip", "x" * 1000):
            reply = await http.post(
                EMBED, gzip.compress(json.dumps(BODY).encode()), content_encoding=encoding
            )
            assert (reply.status, reply.headers["accept-encoding"]) == (415, "gzip, deflate")
        assert (await http.post(EMBED, BODY, content_encoding="identity")).status == 200


async def test_metrics_name_routes_instead_of_callers_paths() -> None:
    async with edge(Script(), metrics_address="127.0.0.1:0") as http:
        await http.post(EMBED, BODY)
        await http.get("/made/up")
    from libs.telemetry.metrics import HTTP_REQUESTS

    routes = {
        sample.labels["route"] for family in HTTP_REQUESTS.collect() for sample in family.samples
    }
    assert EMBED in routes
    assert "other" in routes
    assert not [route for route in routes if "made" in route]
