"""The cost of a body before and after its caller is identified: memory, other callers' delay, and
their share.
"""

from __future__ import annotations

import asyncio
import json
import random
import zlib
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import pytest
from shoal.v1 import inference_pb2 as pb

from libs.serving import Security
from services.edge.intake import reading
from services.edge.intake.budget import Budget
from services.edge.intake.counting import MAX_OBJECTS, MAX_VALUES
from tests.edge.hostile.process import (
    MAX_DELAY_SECONDS,
    MAX_GROWTH_BYTES,
    MIB,
    EdgeProcess,
    edge_process,
    measured_delay,
)
from tests.edge.parts import (
    MODEL,
    Http,
    Reply,
    Script,
    dense,
    edge,
    head,
    read_reply,
    routing,
    vectors,
)
from tests.edge.test_server import BODY, EMBED, until
from tests.serving.parts import CLIENT, ROAMING, write_tokens
from tests.support.peak import Peak

LOADED_MACHINE: Final = 5
"""The factor of allowed delays on slow cores that other processes use, too."""
MAX_FACTOR: Final = 16
"""The memory that an identified caller's body may cost, as a multiple of its size, in addition to
MAX_GROWTH_BYTES.
"""
MSGPACK: Final = {"content_type": "application/msgpack"}
MANY: Final = 8 * MIB
RATIO: Final = 87


def repeated(begin: str, entry: str, end: str, size: int = MANY) -> bytes:
    """Return JSON with a list that repeats `entry`."""
    count = size // (len(entry) + 1)
    return (begin + ",".join([entry] * count) + end).encode()


def packed(items: bytes) -> bytes:
    """Return MessagePack of a map with `items`, a list of one byte each."""
    return b"\x81\xa5items\xdd" + len(items).to_bytes(4, "big") + items


def bomb(begin: str, entry: str, end: str, size: int, ratio: int = RATIO) -> bytes:
    """Return compressed JSON with a list that repeats `entry`, and enough noise for a compression
    factor of `ratio`.
    """
    noise, step = random.Random(1), 64 << 10
    packer = zlib.compressobj(9, zlib.DEFLATED, 31)
    pieces = [packer.compress(begin.encode())]
    for _ in range(size // step):
        chance = json.dumps(noise.randbytes(step // ratio - 100).hex())
        pieces.append(
            packer.compress((f"{entry}," * (step // (len(entry) + 1)) + f"{chance},").encode())
        )
    return b"".join((*pieces, packer.compress((entry + end).encode()), packer.flush()))


@dataclass(frozen=True)
class Attack:
    path: str
    body: Callable[[], bytes]
    headers: dict[str, str]


ATTACKS: Final = {
    "OpenAI": Attack(EMBED, lambda: repeated('{"model":"org/model","input":[', '"a"', "]}"), {}),
    "OpenAI, gzip": Attack(
        EMBED,
        lambda: bomb('{"model":"org/model","input":[', '"a"', "]}", 20 * MIB),
        {"content_encoding": "gzip"},
    ),
    "OpenAI, numbers": Attack(
        EMBED, lambda: repeated('{"model":"org/model","input":[', "300", "]}"), {}
    ),
    "chat": Attack(
        "/v1/chat/completions",
        lambda: repeated('{"model":"org/model","messages":[', '{"role":"user","content":""}', "]}"),
        {},
    ),
    "rerank": Attack(
        "/v2/rerank",
        lambda: repeated('{"model":"org/model","query":"a","documents":[', '{"a":"b"}', "]}"),
        {},
    ),
    "TEI": Attack("/tei/org/model/predict", lambda: repeated('{"inputs":[', '["a"]', "]}"), {}),
    "TEI, OpenAI's form": Attack(
        "/tei/org/model/v1/embeddings", lambda: repeated('{"input":[', '"a"', "]}"), {}
    ),
    "SIE, maps": Attack("/v1/encode/org/model", lambda: packed(b"\x80" * MANY), MSGPACK),
    "SIE, lists": Attack("/v1/encode/org/model", lambda: packed(b"\x90" * MANY), MSGPACK),
    "KServe": Attack(
        "/v2/models/org/model/infer", lambda: repeated('{"inputs":[{"data":[', "[]", "]}]}"), {}
    ),
    "Ollama": Attack(
        "/api/embed", lambda: repeated('{"model":"org/model","input":[', '"a"', "]}"), {}
    ),
    "Hugging Face": Attack(
        "/models/org/model", lambda: repeated('{"inputs":"a","parameters":{"a":[', "{}", "]}}"), {}
    ),
    "depth": Attack(EMBED, lambda: b'{"model":"org/model","input":' + b"[" * MANY, {}),
}


@asynccontextmanager
async def guarded(
    tmp_path: Path, environment: Mapping[str, str] = MappingProxyType({})
) -> AsyncIterator[EdgeProcess]:
    """Run an edge process in front of a router that requires tokens."""
    security = Security(tokens=write_tokens(tmp_path / "tokens.yaml"))
    async with AsyncExitStack() as stack:
        router = await stack.enter_async_context(routing(Script(), security))
        yield await stack.enter_async_context(
            edge_process(Script(), SHOAL_ROUTERS=router, **environment)
        )


async def sent(http: Http, attack: Attack, body: bytes, token: str = "") -> Reply:
    headers = {"content_type": "application/json", **attack.headers}
    if token:
        headers["authorization"] = f"Bearer {token}"
    return await http.send("POST", attack.path, body, headers)


async def opened(http: Http, begin: bytes) -> asyncio.StreamWriter:
    """Open a connection and send `begin`."""
    _, writer = await http.open()
    writer.write(begin)
    return writer


@pytest.mark.parametrize("name", ATTACKS)
async def test_body_without_a_credential_costs_neither_memory_nor_time(
    name: str, tmp_path: Path
) -> None:
    attack = ATTACKS[name]
    body = attack.body()
    async with guarded(tmp_path) as process:
        peak = Peak(process.pid)
        async with measured_delay(process) as delays:
            for _ in range(3):
                assert (await sent(process.http, attack, body)).status == 401
        assert peak.grown < MAX_GROWTH_BYTES
        assert max(delays) < MAX_DELAY_SECONDS * LOADED_MACHINE


@pytest.mark.parametrize("name", ATTACKS)
async def test_body_of_too_many_values_is_refused_by_their_number(
    name: str, tmp_path: Path
) -> None:
    attack = ATTACKS[name]
    body = attack.body()
    async with guarded(tmp_path) as process:
        peak = Peak(process.pid)
        for _ in range(3):
            reply = await sent(process.http, attack, body, CLIENT)
            assert reply.status in (400, 413, 422), reply
            assert any(
                limit in reply.body.decode()
                for limit in (f"{MAX_OBJECTS:,}", f"{MAX_VALUES:,}", "100 levels deep")
            )
        assert peak.grown < MAX_FACTOR * len(body) + MAX_GROWTH_BYTES


async def test_json_with_content_type_msgpack_is_not_decoded_as_json(tmp_path: Path) -> None:
    """It would count as one number of MessagePack."""
    body = ATTACKS["TEI, OpenAI's form"].body()
    async with guarded(tmp_path) as process:
        peak = Peak(process.pid)
        reply = await sent(
            process.http,
            Attack("/tei/org/model/v1/embeddings", lambda: body, MSGPACK),
            body,
            CLIENT,
        )
        assert reply.status == 400
        assert peak.grown < MAX_GROWTH_BYTES


async def test_largest_valid_request_stays_within_the_memory_limit(tmp_path: Path) -> None:
    body = json.dumps(
        {**BODY, "input": ["é🐟 " + "long text " * 80] * 10_000}, ensure_ascii=False
    ).encode()
    async with guarded(tmp_path) as process:
        peak = Peak(process.pid)
        reply = await process.http.post(EMBED, body, authorization=f"Bearer {CLIENT}")
        assert (reply.status, len(reply.json["data"])) == (200, 10_000)
        assert peak.grown < MAX_FACTOR * len(body) + MAX_GROWTH_BYTES


async def test_unfinished_bodies_of_unknown_callers_use_limited_memory(
    tmp_path: Path,
) -> None:
    """The bodies are just below the size at which an unknown caller is identified."""
    async with guarded(tmp_path) as process:
        peak = Peak(process.pid)
        writers = []
        for number in range(1000):
            headers = {
                "content-length": str(reading.UNIDENTIFIED_BODY_BYTES),
                "authorization": f"Bearer made-up-{number}",
            }
            writers.append(
                await opened(
                    process.http,
                    head("POST", EMBED, headers) + b" " * (reading.UNIDENTIFIED_BODY_BYTES - 1000),
                )
            )
        reply = await process.http.post(EMBED, BODY, authorization=f"Bearer {CLIENT}")
        assert reply.status == 200, "a caller that routers know is let in"
        assert peak.grown < MAX_GROWTH_BYTES
        for writer in writers:
            writer.close()


async def filled(http: Http, size: int, credential: dict[str, str]) -> list[asyncio.StreamWriter]:
    """Send unfinished gzip bodies, eight that inflate to `size` bytes each, then plain ones as
    large as still fit.
    """
    inflating = bomb('{"a":[', '"a"', "]}", size, 95)[:-100]
    begin = head(
        "POST",
        EMBED,
        {**credential, "content-length": str(len(inflating) + 100), "content-encoding": "gzip"},
    )
    writers = [await opened(http, begin + inflating) for _ in range(8)]
    while size > 1024:
        for _ in range(2):
            begin = head("POST", EMBED, {**credential, "content-length": str(size + 100)})
            writers.append(await opened(http, begin + b" " * size))
            await writers[-1].drain()
        size //= 2
    return writers


@pytest.mark.parametrize("token", ["", CLIENT], ids=["no credential", "a tenant's"])
async def test_unfinished_bodies_do_not_block_other_tenants(token: str, tmp_path: Path) -> None:
    """Unfinished bodies that together fill the budget are arriving while others send requests."""
    size = 14 * MIB
    limits = {"SHOAL_HTTP_IN_FLIGHT_BYTES": str(9 * size), "SHOAL_HTTP_BODY_BYTES": str(16 * MIB)}
    async with guarded(tmp_path, environment=limits) as process:
        writers = await filled(
            process.http, size, {"authorization": f"Bearer {token}"} if token else {}
        )
        large = {**BODY, "input": ["other " * 20_000] * 8}
        for _ in range(20):
            for body in (BODY, large):
                reply = await process.http.post(
                    EMBED, body, authorization=f"Bearer {ROAMING}", x_shoal_tenant="other"
                )
                assert reply.status == 200, reply
        for writer in writers:
            writer.close()


async def test_caller_over_its_share_is_refused_with_a_time_to_retry(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    budget = Budget(16 * MIB)
    monkeypatch.setattr("services.edge.app.Budget", lambda limit: budget)
    security = Security(tokens=write_tokens(tmp_path / "tokens.yaml"))
    body = json.dumps({**BODY, "input": "a" * (5 * MIB)}).encode()
    limits = {"body_bytes": 8 * MIB, "in_flight_bytes": 16 * MIB, "body_pause_seconds": 60.0}
    async with edge(Script(), security, **limits) as http:
        credential = {"authorization": f"Bearer {CLIENT}"}
        unfinished = (
            head("POST", EMBED, {**credential, "content-length": str(len(body))}) + body[:-1]
        )
        reader, writer = await http.open()
        writer.write(unfinished)
        await writer.drain()
        await until(lambda: budget.held_bytes >= len(body) - 1)
        reply = await http.post(EMBED, body, authorization=f"Bearer {CLIENT}")
        assert (reply.status, reply.headers["retry-after"]) == (429, "1")
        assert b"of this tenant" in reply.body
        other = await http.post(
            EMBED, body, authorization=f"Bearer {ROAMING}", x_shoal_tenant="other"
        )
        assert other.status == 200, other
        writer.write(body[-1:])
        assert (await read_reply(reader)).status == 200
        writer.close()


async def test_body_that_stops_arriving_ends_with_408() -> None:
    async with edge(Script(), body_pause_seconds=0.2, body_seconds=60.0) as http:
        reader, writer = await http.open()
        writer.write(head("POST", EMBED, {"content-length": "1000"}) + b"{")
        reply = await read_reply(reader)
        assert (reply.status, reply.headers["connection"]) == (408, "close")
        assert "0.2 s" in reply.json["detail"]
        writer.close()


async def test_refused_caller_gets_no_100_continue(tmp_path: Path) -> None:
    """A client that waits for 100 Continue sends no body."""
    security = Security(tokens=write_tokens(tmp_path / "tokens.yaml"))
    async with edge(Script(), security) as http:
        reader, writer = await http.open()
        headers = {
            "content-length": str(MIB),
            "expect": "100-continue",
            "authorization": "Bearer unknown-token",
        }
        writer.write(head("POST", EMBED, headers))
        assert (await read_reply(reader)).status == 401
        writer.close()


@pytest.mark.parametrize(
    "length", [reading.UNIDENTIFIED_BODY_BYTES // 2, 2 * reading.UNIDENTIFIED_BODY_BYTES]
)
async def test_known_caller_is_answered_for_any_size(length: int, tmp_path: Path) -> None:
    security = Security(tokens=write_tokens(tmp_path / "tokens.yaml"))
    script = Script()
    async with edge(script, security) as http:
        body: dict[str, Any] = {"model": MODEL, "input": "a" * length}
        assert (await http.post(EMBED, body, authorization=f"Bearer {CLIENT}")).status == 200
        assert (await http.post(EMBED, body)).status == 401
    assert len(script.requests) == 1


async def test_heads_of_unknown_callers_use_limited_memory(tmp_path: Path) -> None:
    """Each head is complete and nearly at the limit, and precedes a body that does not end."""
    async with guarded(tmp_path) as process:
        peak = Peak(process.pid)
        writers = []
        for number in range(1000):
            headers = {
                "content-length": "100",
                "authorization": f"Bearer made-up-{number}",
                "x-large": "a" * (60 << 10),
            }
            writers.append(await opened(process.http, head("POST", EMBED, headers) + b" "))
            await writers[-1].drain()
        reply = await process.http.post(EMBED, BODY, authorization=f"Bearer {CLIENT}")
        assert reply.status == 200, "a caller that routers know is let in"
        assert peak.grown < MAX_GROWTH_BYTES, peak.grown / MIB
        for writer in writers:
            writer.close()


async def test_request_head_counts_as_memory_in_flight() -> None:
    large = {"x_large": "a" * 7500}
    async with edge(Script(), body_bytes=2000, in_flight_bytes=32 << 10) as http:
        assert (await http.post(EMBED, BODY)).status == 200, "the caller is known from here on"
        reader, writer = await http.open()
        writer.write(
            head("POST", EMBED, {**large, "content-length": "100", "expect": "100-continue"})
        )
        assert b" 100 " in await reader.readuntil(b"\r\n\r\n"), (
            "the head is charged before the body is asked for"
        )
        reply = await http.post(EMBED, BODY, **large)
        assert (reply.status, b"of this tenant" in reply.body) == (429, True)
        writer.close()

        async def has_room() -> bool:
            return (await http.post(EMBED, BODY, **large)).status == 200

        await until(has_room)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_copies_of_prompts_are_limited(path: str, tmp_path: Path) -> None:
    security = Security(tokens=write_tokens(tmp_path / "tokens.yaml"))
    script = Script()
    prompt = "a" * (4 * MIB)
    body = {
        "model": MODEL,
        "n": 16,
        "prompt": prompt,
        "messages": [{"role": "user", "content": prompt}],
    }
    async with edge(script, security) as http:
        reply = await http.post(path, body, authorization=f"Bearer {CLIENT}")
    assert (reply.status, reply.json["error"]["param"]) == (413, "n")
    assert "16,777,216" in reply.json["error"]["message"]
    assert not script.requests


async def test_copies_of_a_prompt_are_charged_before_they_are_sent(tmp_path: Path) -> None:
    security = Security(tokens=write_tokens(tmp_path / "tokens.yaml"))
    script = Script(
        extract=lambda request: pb.ExtractResponse(
            results=[pb.Extraction(text="b")] * len(request.items)
        )
    )
    body = {"model": MODEL, "n": 16, "prompt": "a" * (MIB // 2)}
    limits = {"body_bytes": MIB, "in_flight_bytes": 12 * MIB, "body_pause_seconds": 60.0}
    async with edge(script, security, **limits) as http:
        credential = {
            "authorization": f"Bearer {ROAMING}",
            "x-shoal-tenant": "other",
            "content-length": str(MIB),
        }
        writer = await opened(http, head("POST", EMBED, credential) + b" " * (MIB // 2))
        await writer.drain()

        async def is_refused() -> bool:
            return (
                await http.post("/v1/completions", body, authorization=f"Bearer {CLIENT}")
            ).status == 429

        await until(is_refused)
        writer.close()

        async def is_answered() -> bool:
            return not await is_refused()

        await until(is_answered)
    assert len(script.requests[-1].items) == 16


async def test_large_answer_is_sent_while_unidentified_callers_fill_the_allowance(
    tmp_path: Path,
) -> None:
    security = Security(tokens=write_tokens(tmp_path / "tokens.yaml"))
    answer = pb.EncodeResponse(dense=dense(vectors(7000, 1024)), usage=pb.Usage(input_tokens=5))
    script = Script(encode=lambda request: answer)
    body = {**BODY, "input": ["a"] * 7000, "encoding_format": "base64"}
    async with edge(script, security) as http:
        stranger = await opened(http, head("POST", EMBED, {"content-length": "1000"}) + b" ")
        await stranger.drain()
        assert answer.ByteSize() > 24 * MIB
        assert (await http.post(EMBED, body, authorization=f"Bearer {CLIENT}")).status == 200
        stranger.close()
