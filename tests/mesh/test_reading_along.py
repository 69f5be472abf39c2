"""ExtractStream: texts during generation, over real gRPC, Redis and workers, through the router
that has the worker's stream, through another one, and through a single router
(`test_killed_workers_text_restarts`).
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import shoal
from shoal import errors
from shoal.extractions import Delta
from shoal.results import ExtractResult

from tests.generation.served import write
from tests.mesh.test_chat import edge, events, said
from tests.parity.checkpoints import SentenceFiles, write_checkpoint
from tests.support.cluster import Cluster
from tests.support.waiting import rounds

pytestmark = pytest.mark.filterwarnings("ignore")

CHAT, SUMMARY, BEAMS, ENCODER = (
    "random/qwen3-chat",
    "random/t5-writes",
    "random/bart-beams",
    "random/bert-beside",
)
TEXTS = ["the first text", "another one, which is longer than the first"]
LONG = shoal.ReadText(max_tokens=400)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("writers")
    write("qwen3", root / CHAT)
    write("t5", root / SUMMARY)
    write("bart", root / BEAMS, {"num_beams": 2})
    write_checkpoint("bert", root / ENCODER, sentence=SentenceFiles())
    return root


@pytest.fixture(scope="module")
def mesh(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with Cluster(tmp_path_factory.mktemp("mesh"), models=str(models), routers=2) as cluster:
        yield cluster


async def read(
    client: shoal.AsyncClient, model: str, texts: list[str], task: shoal.ReadText
) -> tuple[list[Delta], ExtractResult]:
    """Return the deltas, and the final answer."""
    parts = [part async for part in client.extract_stream(model, texts, task)]
    result = parts.pop()
    assert isinstance(result, ExtractResult)
    assert all(isinstance(part, Delta) for part in parts)
    return [part for part in parts if isinstance(part, Delta)], result


def joined(deltas: list[Delta], item: int) -> str:
    text = ""
    for delta in deltas:
        if delta.item == item:
            text = delta.text if delta.restarted else text + delta.text
    return text


async def read_in_parts(
    client: shoal.AsyncClient, texts: list[str], task: shoal.ReadText, least: int
) -> tuple[list[Delta], ExtractResult]:
    """Read until every item has at least this number of deltas. Each answer must be complete, but
    its deltas are fewer if a process has no core while the text is generated.
    """
    for _ in rounds(10, f"every text arrived in {least} deltas"):
        deltas, result = await read(client, SUMMARY, texts, task)
        for item, one in enumerate(result):
            assert joined(deltas, item) == one.text
        counts = Counter(delta.item for delta in deltas)
        if all(counts[item] >= least for item in range(len(texts))):
            break
    return deltas, result


@pytest.mark.parametrize("name", [CHAT, SUMMARY, BEAMS])
async def test_deltas_add_up_to_the_answer_through_every_router(name: str, mesh: Cluster) -> None:
    task = shoal.ReadText(max_tokens=60)
    for address in mesh.addresses:  # the worker's stream is to one of them
        async with shoal.AsyncClient(address, timeout=300) as client:
            unary = await client.extract(name, TEXTS, task)
            deltas, result = await read(client, name, TEXTS, task)
            assert all(one.text for one in unary)
            assert [one.text for one in result] == [one.text for one in unary]
            assert [joined(deltas, item) for item in range(2)] == [one.text for one in unary]
            assert result.usage == unary.usage
            assert not any(delta.restarted for delta in deltas)


async def test_long_text_is_streamed_before_its_end(mesh: Cluster) -> None:
    async with shoal.AsyncClient(mesh.address, timeout=300) as client:
        await read_in_parts(client, TEXTS, shoal.ReadText(max_tokens=800), 2)


@pytest.mark.parametrize("name", [CHAT, BEAMS])
async def test_http_streams_and_clients_get_the_whole_text_through_every_router(
    name: str, mesh: Cluster
) -> None:
    body = {
        "model": name,
        "messages": [{"role": "user", "content": TEXTS[0]}],
        "max_tokens": 60,
        "stream": True,
    }
    for address in mesh.addresses:
        async with shoal.AsyncClient(address, timeout=300) as client, edge(address) as http:
            text = (await client.extract(name, TEXTS[:1], shoal.ReadText(max_tokens=60)))[0].text
            assert text
            assert said(events((await http.post("/v1/chat/completions", body)).body)) == text
            lines = (
                await http.post("/api/chat", {**body, "options": {"num_predict": 60}})
            ).body.splitlines()
            assert "".join(json.loads(line)["message"]["content"] for line in lines) == text


async def test_beam_search_is_one_delta(mesh: Cluster) -> None:
    async with shoal.AsyncClient(mesh.address, timeout=300) as client:
        deltas, result = await read(client, BEAMS, TEXTS, shoal.ReadText(max_tokens=40))
        assert [(delta.item, delta.text) for delta in deltas] == [
            (item, one.text) for item, one in enumerate(result)
        ]


async def test_errors_equal_those_of_extract(mesh: Cluster) -> None:
    async with shoal.AsyncClient(mesh.address, timeout=300) as client:
        with pytest.raises(errors.InvalidInput) as refused:
            await read(client, SUMMARY, ["a text", "  "], LONG)
        assert refused.value.field == "items[1].text"
        with pytest.raises(errors.TaskNotSupported):
            await read(client, ENCODER, TEXTS, LONG)
        with pytest.raises(errors.DeadlinePassed):
            async for _ in client.extract_stream(
                SUMMARY, TEXTS * 8, shoal.ReadText(max_tokens=4000), timeout=0.5
            ):
                pass


async def cancelled(client: shoal.AsyncClient) -> int:
    return sum(lane.cancelled_jobs for lane in (await client.mesh()).lanes if lane.model == SUMMARY)


async def test_abandoned_stream_is_cancelled(mesh: Cluster) -> None:
    async with shoal.AsyncClient(mesh.address, timeout=300) as client:
        before = await cancelled(client)
        stream = client.extract_stream(SUMMARY, TEXTS, shoal.ReadText(max_tokens=4000))
        async for part in stream:
            assert isinstance(part, Delta)
            break
        await stream.aclose()
        async with asyncio.timeout(60):
            while await cancelled(client) == before:  # noqa: ASYNC110  # the router counts them
                await asyncio.sleep(0.02)
        assert (await client.extract(SUMMARY, TEXTS[:1], shoal.ReadText(max_tokens=4)))[0].text


async def test_slow_reader_gets_longer_deltas(mesh: Cluster) -> None:
    async with shoal.AsyncClient(mesh.address, timeout=300) as client:
        _, result = await read_in_parts(client, TEXTS[:1], shoal.ReadText(max_tokens=800), 5)
        slow = []
        async for part in client.extract_stream(SUMMARY, TEXTS[:1], shoal.ReadText(max_tokens=800)):
            if isinstance(part, Delta):
                slow.append(part)
                await asyncio.sleep(0.3)
        assert joined(slow, 0) == result[0].text


def test_blocking_client_streams_text(mesh: Cluster) -> None:
    with shoal.Client(mesh.address, timeout=300) as client:
        # Fewer if a process has no core while the text is generated.
        for _ in rounds(10, "a text arrived in two deltas"):
            *parts, result = client.extract_stream(SUMMARY, TEXTS[:1], LONG)
            assert isinstance(result, ExtractResult)
            deltas = [part for part in parts if isinstance(part, Delta)]
            assert joined(deltas, 0) == result[0].text
            if len(deltas) >= 2:
                break


async def test_killed_workers_text_restarts(models: Path, tmp_path: Path) -> None:
    with Cluster(tmp_path, models=str(models), workers=2) as cluster:
        async with shoal.AsyncClient(cluster.address, timeout=300) as client:
            task = shoal.ReadText(max_tokens=1000)
            (alone,) = await client.extract(SUMMARY, TEXTS[:1], task)
            for _ in rounds(10, "the workers were killed before the end of the text"):
                parts: list[Delta] = []
                result = None
                async for part in client.extract_stream(SUMMARY, TEXTS[:1], task):
                    if isinstance(part, ExtractResult):
                        result = part
                        continue
                    parts.append(part)
                    if len(parts) == 1:
                        for worker in cluster.workers:  # either of them may be generating
                            await asyncio.to_thread(cluster.kill, worker)
                        await asyncio.to_thread(cluster.start, cluster.workers[0])
                assert result is not None
                assert result[0].text == alone.text
                assert joined(parts, 0) == alone.text
                if any(part.restarted for part in parts):
                    break
