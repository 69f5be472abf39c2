"""Requests for files and batches, as OpenAI's clients send them."""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from shoal.v1 import inference_pb2 as pb

from libs.errors import InvalidInput
from services.edge.app import running
from services.edge.batches.settings import BatchSettings
from services.edge.settings import Settings
from tests.edge.parts import MODEL, Http, Reply, Script, dense, vectors

BOUNDARY = "a0b1c2d3e4f5"
EMBEDDINGS = "/v1/embeddings"
ENDED = ("completed", "failed", "expired", "cancelled")


def form(content: bytes, name: str = "in.jsonl", **fields: str) -> bytes:
    """Return a form with a file, in which `__` in a field's name stands for brackets."""
    parts = []
    for field, value in {"purpose": "batch", **fields}.items():
        first, _, second = field.partition("__")
        field = f"{first}[{second}]" if second else first
        parts.append(f'Content-Disposition: form-data; name="{field}"\r\n\r\n{value}'.encode())
    head = (
        f'Content-Disposition: form-data; name="file"; filename="{name}"\r\n'
        "Content-Type: application/octet-stream\r\n\r\n"
    )
    parts.append(head.encode() + content)
    begin = f"--{BOUNDARY}\r\n".encode()
    return b"".join(begin + part + b"\r\n" for part in parts) + f"--{BOUNDARY}--\r\n".encode()


async def upload(http: Http, content: bytes, tenant: str = "", **fields: str) -> Reply:
    """Send a file."""
    return await send_form(http, form(content, **fields), **named(tenant))


async def send_form(http: Http, body: bytes, **headers: str) -> Reply:
    kind = f"multipart/form-data; boundary={BOUNDARY}"
    return await http.send("POST", "/v1/files", body, {"content-type": kind, **headers})


def named(tenant: str) -> dict[str, str]:
    """Return the header that names a tenant."""
    return {"x-shoal-tenant": tenant} if tenant else {}


def line(custom_id: str, text: Any, /, **more: Any) -> bytes:
    """Return a line that requests the vector of a text."""
    body = {"model": MODEL, "input": text}
    request = {"custom_id": custom_id, "method": "POST", "url": EMBEDDINGS, "body": body, **more}
    return json.dumps(request).encode() + b"\n"


def lines(count: int, text: str = "text") -> bytes:
    return b"".join(line(f"id-{number}", f"{text} {number}") for number in range(count))


async def start(http: Http, content: bytes, tenant: str = "", **more: Any) -> dict[str, Any]:
    """Upload a file, start a batch and return it."""
    file = (await upload(http, content, tenant)).json
    reply = await create(http, file["id"], tenant, **more)
    assert reply.status == 200, reply.body
    batch: dict[str, Any] = reply.json
    return batch


async def create(http: Http, file: str, tenant: str = "", **more: Any) -> Reply:
    body = {"input_file_id": file, "endpoint": EMBEDDINGS, "completion_window": "24h", **more}
    return await http.post("/v1/batches", body, **named(tenant))


async def retrieve(http: Http, batch: dict[str, Any], **headers: str) -> dict[str, Any]:
    reply = await http.get(f"/v1/batches/{batch['id']}", **headers)
    assert reply.status == 200, reply.body
    found: dict[str, Any] = reply.json
    return found


async def wait_for(
    http: Http, batch: dict[str, Any], statuses: Sequence[str], seconds: float = 300.0
) -> dict[str, Any]:
    """Return a batch once it has one of these states."""
    end = time.monotonic() + seconds
    while True:
        found = await retrieve(http, batch)
        if found["status"] in statuses:
            return found
        assert time.monotonic() < end, found
        await asyncio.sleep(0.05)


async def results(http: Http, file: str, **headers: str) -> list[dict[str, Any]]:
    """Return the lines of a file."""
    reply = await http.get(f"/v1/files/{file}/content", **headers)
    assert reply.status == 200, reply.body
    return [json.loads(text) for text in reply.body.splitlines()]


def embed(request: pb.EncodeRequest) -> pb.EncodeResponse:
    """Refuse the text "bad"."""
    if any(item.text == "bad" for item in request.items):
        raise InvalidInput("items[0].text is bad", field="items[0].text")
    return pb.EncodeResponse(
        dense=dense(vectors(len(request.items))), usage=pb.Usage(input_tokens=5)
    )


def texts(script: Script) -> Counter[str]:
    """Return how often each text was sent."""
    return Counter(item.text for request in script.requests for item in request.items)


async def sent(script: Script, count: int) -> None:
    """Wait until the router has received requests."""
    for _ in range(3000):
        if len(script.requests) >= count:
            return
        await asyncio.sleep(0.02)
    raise AssertionError(f"{len(script.requests)} requests were sent")


@asynccontextmanager
async def serving_edge(router: str, folder: BatchSettings, **more: Any) -> AsyncIterator[Http]:
    """Run an edge in front of a router."""
    settings = Settings(
        edge_id="edge",
        address="127.0.0.1:0",
        routers=(router,),
        grace_seconds=1.0,
        batches=folder,
        **more,
    )
    async with running(settings) as address:
        yield Http(address)
