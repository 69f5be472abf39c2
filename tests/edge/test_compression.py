"""Compressed bodies: inflation and its limits, and the choice of compressed answers."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from shoal.v1 import inference_pb2 as pb

from libs.errors import InvalidInput
from services.edge import asgi
from services.edge.compression import (
    MIN_COMPRESSED_BYTES,
    MIN_RATIO_BYTES,
    STEP_BYTES,
    Inflater,
    compress,
    negotiate_encoding,
)
from services.edge.messages.base import Answer, HttpError
from services.edge.messages.names import AliasNames
from services.edge.routers import Routers
from services.edge.settings import Settings
from tests.edge.parts import MODEL, Script, dense, edge, vectors

EMBED = "/v1/embeddings"
BODY: dict[str, Any] = {"model": MODEL, "input": "text"}


def bare(content: bytes) -> bytes:
    packer = zlib.compressobj(wbits=-15)
    return packer.compress(content) + packer.flush()


KINDS = pytest.mark.parametrize(
    ("encoding", "pack"),
    [
        ("gzip", gzip.compress),
        ("x-gzip", gzip.compress),
        ("deflate", zlib.compress),
        ("deflate", bare),
    ],
)


def inflated(encoding: str, content: bytes, step: int = 1 << 20) -> bytes:
    inflating = Inflater(encoding)
    parts = [
        piece
        for first in range(0, len(content), step)
        for piece in inflating.feed(content[first : first + step])
    ]
    assert all(len(part) <= STEP_BYTES for part in parts)
    inflating.end()
    return b"".join(parts)


def texts(size: int) -> bytes:
    """Return bytes that compress like JSON numbers."""
    return np.random.default_rng(7).integers(48, 58, size, np.uint8).tobytes()


@KINDS
@pytest.mark.parametrize("step", [1, 7, 1 << 20])
def test_bodies_are_inflated_in_steps_of_any_size(
    encoding: str, pack: Callable[[bytes], bytes], step: int
) -> None:
    content = json.dumps({"input": ["text"] * 50}).encode()
    assert inflated(encoding, pack(content), step) == content


@KINDS
@pytest.mark.parametrize("size", [0, 1, STEP_BYTES - 1, STEP_BYTES, STEP_BYTES + 1, 5 * STEP_BYTES])
def test_bodies_of_any_size(encoding: str, pack: Callable[[bytes], bytes], size: int) -> None:
    content = texts(size)
    assert inflated(encoding, pack(content)) == content


@KINDS
def test_truncated_continued_or_invalid_body_is_refused(
    encoding: str, pack: Callable[[bytes], bytes]
) -> None:
    whole = pack(texts(1000))
    for content in (whole[:-1], whole[:5], b"", whole + b"x", whole + whole, b"\xff" * 100, b"{}"):
        with pytest.raises(HttpError) as caught:
            inflated(encoding, content)
        assert caught.value.reason == "INVALID_INPUT"


@KINDS
def test_bomb_is_refused_before_it_is_inflated(
    encoding: str, pack: Callable[[bytes], bytes]
) -> None:
    grown: list[int] = []
    pieces = Inflater(encoding).feed(pack(bytes(100 << 20)))
    with pytest.raises(HttpError) as caught:
        grown.extend(map(len, pieces))
    assert (caught.value.reason, caught.value.status) == ("TOO_LARGE", 413)
    assert sum(grown) <= MIN_RATIO_BYTES + STEP_BYTES
    few = bytes(MIN_RATIO_BYTES)
    assert inflated(encoding, pack(few)) == few


@pytest.mark.parametrize(
    ("accepted", "encoding"),
    [
        ("gzip", "gzip"),
        ("gzip, deflate, br, zstd", "gzip"),
        ("deflate", "deflate"),
        ("GZIP;q=0.5, deflate;q=0.8", "deflate"),
        ("gzip;q=0", ""),
        ("gzip;q=x", ""),
        ("identity", ""),
        ("br", ""),
        ("*", ""),
        ("", ""),
        (";;,,q=", ""),
    ],
)
def test_accept_encoding_is_negotiated(accepted: str, encoding: str) -> None:
    assert negotiate_encoding(accepted) == encoding


def content(answer: Answer) -> bytes:
    return answer.body if isinstance(answer.body, bytes) else b"".join(answer.body)


@pytest.mark.parametrize("size", [MIN_COMPRESSED_BYTES, 20_000, 500_000])
@pytest.mark.parametrize(
    ("encoding", "unpack"), [("gzip", gzip.decompress), ("deflate", zlib.decompress)]
)
def test_answers_that_shrink_are_compressed(
    size: int, encoding: str, unpack: Callable[[bytes], bytes]
) -> None:
    reported = texts(size)
    for body in (
        reported,
        iter([reported]),
        iter([reported[:1], reported[1:9000], reported[9000:]]),
    ):
        found = compress(Answer(body, 200, headers=((b"x-a", b"b"),)), encoding)
        headers = dict(found.headers)
        assert (headers[b"content-encoding"], headers[b"vary"], headers[b"x-a"]) == (
            encoding.encode(),
            b"accept-encoding",
            b"b",
        )
        packed = content(found)
        assert unpack(packed) == reported
        assert len(packed) < 0.6 * size


def test_small_or_incompressible_answers_are_not_compressed() -> None:
    noise = np.random.default_rng(7).bytes(50_000)
    for body in (b"{}", texts(MIN_COMPRESSED_BYTES - 1), noise):
        for given in (body, iter([body])):
            found = compress(Answer(given), "gzip")
            assert content(found) == body
            assert b"content-encoding" not in dict(found.headers)
    answer = Answer(texts(5000))
    assert compress(answer, "") is answer


async def test_over_http() -> None:
    script = Script(
        encode=lambda request: pb.EncodeResponse(dense=dense(vectors(len(request.items), 1024)))
    )
    async with edge(script, compression="on") as http:
        for pack, encoding in ((gzip.compress, "gzip"), (zlib.compress, "deflate")):
            reply = await http.post(
                EMBED,
                pack(json.dumps(BODY).encode()),
                content_encoding=encoding,
                accept_encoding=encoding,
            )
            assert (reply.status, reply.headers["content-encoding"]) == (200, encoding)
            unpacked = zlib.decompress(reply.body, 47)
            assert np.array_equal(
                np.array(json.loads(unpacked)["data"][0]["embedding"], np.float32),
                vectors(1, 1024)[0],
            )
        many = BODY | {"input": ["text"] * 200}
        reply = await http.post(EMBED, many, accept_encoding="gzip")
        assert len(json.loads(gzip.decompress(reply.body))["data"]) == 200
        reply = await http.post(EMBED, BODY | {"encoding_format": "base64"}, accept_encoding="gzip")
        assert "content-encoding" not in reply.headers
        assert reply.json["data"]
        assert "content-encoding" not in (await http.post(EMBED, BODY)).headers
        for body in (b"{}", gzip.compress(b"{")[:-2]):
            assert (await http.post(EMBED, body, content_encoding="gzip")).status == 400


async def test_bomb_over_http() -> None:
    async with edge(Script(), body_bytes=4096, in_flight_bytes=8192) as http:
        for size in (5000, 100 << 20):
            reply = await http.post(EMBED, gzip.compress(bytes(size)), content_encoding="gzip")
            assert reply.status == 413 if size > 8192 else reply.status in (413, 429)
        assert (
            await http.post(
                EMBED, gzip.compress(json.dumps(BODY).encode()), content_encoding="gzip"
            )
        ).status == 200
    async with edge(Script()) as http:
        reply = await http.post(EMBED, gzip.compress(bytes(50 << 20)), content_encoding="gzip")
        assert (reply.status, "100 times" in reply.json["message"]) == (413, True)


@pytest.mark.parametrize(
    ("setting", "host", "is_compressed"),
    [
        ("auto", "127.0.0.1", False),
        ("auto", "::1", False),
        ("auto", "10.0.0.7", True),
        ("on", "127.0.0.1", True),
        ("off", "10.0.0.7", False),
    ],
)
async def test_local_callers_get_uncompressed_answers(
    setting: Any, host: str, is_compressed: bool
) -> None:
    application: Any = asgi.Application(
        Routers(("127.0.0.1:1",), None), lambda: AliasNames({}), asgi.State(), compression=setting
    )
    exchange = asgi._Exchange("POST", {"accept-encoding": "gzip"}, 0.0)
    assert bool(application._encoding(exchange, {"client": (host, 5)})) is is_compressed


def test_setting() -> None:
    assert Settings.from_env({"SHOAL_HTTP_COMPRESSION": "off"}).compression == "off"
    with pytest.raises(InvalidInput, match="auto, on, off"):
        Settings.from_env({"SHOAL_HTTP_COMPRESSION": "yes"})
