"""EncodeStream of long documents in chunks: first chunks before the last ones are computed, over
real gRPC, Redis and workers, through the router that has the worker's stream, through another one,
and through a single router (`test_killed_workers_chunks_are_sent_once`).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

import numpy as np
import pytest
import shoal
from shoal import Chunking, Document, errors
from shoal.results import EncodeResult
from shoal.tasks import Item

from services.local.settings import MINILM
from tests.mesh.test_families import relative_error
from tests.support import offices, pdfs
from tests.support.cluster import Cluster
from tests.support.texts import texts
from tests.support.waiting import rounds

WORDS = " ".join(texts(500, shortest=5, longest=30, seed=9))
PAGES = [
    "\n".join(
        WORDS[place : place + 60].encode("ascii", "replace").decode()
        for place in range(start, start + 900, 60)
    )
    for start in range(0, 18_000, 900)
]
FILE = pdfs.document(PAGES, size=(1600.0, 792.0))
BOOK = Document(FILE)
CHUNKING = Chunking(max_tokens=60)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory, minilm: Path) -> Path:
    root = tmp_path_factory.mktemp("models")
    (root / MINILM).parent.mkdir(parents=True)
    (root / MINILM).symlink_to(minilm)
    return root


@pytest.fixture(scope="module")
def mesh(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with Cluster(tmp_path_factory.mktemp("mesh"), models=str(models), routers=2) as cluster:
        yield cluster


def places(result: EncodeResult, item: int) -> list[tuple[Any, ...]]:
    """Return the chunks of an item of a result without their rows."""
    return [(one.start, one.end, one.tokens, one.text, one.page) for one in result.chunks[item]]


def joined(parts: list[EncodeResult]) -> list[list[tuple[Any, ...]]]:
    """Return the chunks of each item, with their vectors, from the parts of a stream."""
    items: list[list[tuple[Any, ...]]] = []
    for part in parts:
        for number, own in enumerate(part.chunks):
            if part.first_item + number == len(items):
                items.append([])
            vectors = [tuple(part.dense[chunk.row].tolist()) for chunk in own]
            items[part.first_item + number] += zip(places(part, number), vectors, strict=True)
    return items


def check(parts: list[EncodeResult], whole: EncodeResult) -> None:
    """Check that the parts add up to the answer of `encode`."""
    found = joined(parts)
    assert [[place for place, _ in own] for own in found] == [
        places(whole, item) for item in range(len(whole.chunks))
    ]
    rows = np.array([vector for own in found for _, vector in own])
    assert relative_error(rows, np.asarray(whole.dense)) <= 1e-5
    assert [part.usage.input_tokens for part in parts[:-1]] == [0] * (len(parts) - 1)
    assert parts[-1].usage == whole.usage


async def read(
    client: shoal.AsyncClient, items: list[Any], chunking: Chunking
) -> list[EncodeResult]:
    return [part async for part in client.encode_stream(MINILM, items, chunking=chunking)]


@pytest.mark.parametrize("late", [False, True])
async def test_stream_adds_up_to_the_answer_through_every_router(late: bool, mesh: Cluster) -> None:
    items: list[Item] = ["One sentence.", BOOK, WORDS[:3000]]
    chunking = Chunking(max_tokens=60, late=late)
    async with shoal.AsyncClient(mesh.address, timeout=300) as client:
        whole = await client.encode(MINILM, items, chunking=chunking)
    for address in mesh.addresses:  # the worker's stream is to one of them
        async with shoal.AsyncClient(address, timeout=300) as client:
            # Fewer if a process has no core while the chunks are computed.
            for _ in rounds(10, "a document arrives in three messages"):
                parts = await read(client, items, chunking)
                check(parts, whole)
                if sum(part.first_item <= 1 for part in parts) >= 3:
                    break


def test_blocking_client_streams_whole_items_too(mesh: Cluster) -> None:
    with shoal.Client(mesh.address, timeout=300) as client:
        whole = client.encode(MINILM, ["a", "b", "c"])
        parts = list(client.encode_stream(MINILM, ["a", "b", "c"]))
        rows = np.concatenate([np.asarray(part.dense) for part in parts])
        assert relative_error(rows, np.asarray(whole.dense)) <= 1e-5
        assert parts[0].first_item == 0
        check(list(client.encode_stream(MINILM, [BOOK], chunking=CHUNKING)),
              client.encode(MINILM, [BOOK], chunking=CHUNKING))  # fmt: skip


async def cancelled(client: shoal.AsyncClient) -> int:
    return sum(lane.cancelled_jobs for lane in (await client.mesh()).lanes)


async def test_abandoned_stream_is_cancelled(mesh: Cluster) -> None:
    async with shoal.AsyncClient(mesh.address, timeout=300) as client:
        before = await cancelled(client)
        items: list[Item] = [Document(FILE, 1, 16), *(WORDS[place:] for place in range(8))]
        async with aclosing(client.encode_stream(MINILM, items, chunking=CHUNKING)) as stream:
            async for part in stream:
                assert part.first_item == 0
                break
        async with asyncio.timeout(60):
            while await cancelled(client) == before:  # noqa: ASYNC110  # the router counts them
                await asyncio.sleep(0.02)
        assert len((await client.encode(MINILM, ["text"])).dense) == 1


async def test_document_that_fails_in_the_middle_fails_the_stream(
    mesh: Cluster,
) -> None:
    """The last pages have more text than the size of the archive admits."""
    text = escape(WORDS[:20_000])
    data = offices.word_with(f"<w:p><w:r><w:t>{text}</w:t></w:r></w:p>" * 60)
    async with shoal.AsyncClient(mesh.address, timeout=300) as client:
        with pytest.raises(errors.InvalidInput, match="bytes of text") as caught:
            await read(client, [Document(data)], CHUNKING)
        assert caught.value.field == "items[0].parts[0].document"


async def paused(stream: AsyncIterator[EncodeResult], cluster: Cluster) -> list[EncodeResult]:
    """Read a stream, and replace all workers by another one after its first message."""
    parts: list[EncodeResult] = []
    async for part in stream:
        parts.append(part)
        if len(parts) == 1:
            for worker in cluster.workers:  # either of them may have the job
                await asyncio.to_thread(cluster.kill, worker)
            await asyncio.to_thread(cluster.start, cluster.workers[0])
    return parts


async def test_killed_workers_chunks_are_sent_once(models: Path, tmp_path: Path) -> None:
    with Cluster(tmp_path, models=str(models), workers=2) as cluster:
        async with shoal.AsyncClient(cluster.address, timeout=300) as client:
            whole = await client.encode(MINILM, [BOOK], chunking=CHUNKING)
            for _ in rounds(10, "the workers were killed before the last chunk"):
                stream = client.encode_stream(MINILM, [BOOK], chunking=CHUNKING)
                parts = await paused(stream, cluster)
                check(parts, whole)
                if len(parts) > 1:
                    break
