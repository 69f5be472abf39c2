"""Models that write through the mesh: among encoders on one worker, cancelled, and when their worker is killed."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import shoal
import transformers
from shoal import errors
from shoal.tasks import Document

from tests.generation.served import reference, write
from tests.parity.checkpoints import SentenceFiles, write_checkpoint
from tests.support import pdfs
from tests.support.cluster import Cluster

pytestmark = pytest.mark.filterwarnings("ignore")

CHAT, SUMMARY, ENCODER = "random/qwen3-chat", "random/t5-writes", "random/bert-beside"
TEXTS = ["the first text", "another one, which is longer than the first", "a third"]
LONG = shoal.ReadText(max_tokens=2000)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, transformers.PreTrainedModel]]:
    root = tmp_path_factory.mktemp("writers")
    made = {CHAT: write("qwen3", root / CHAT), SUMMARY: write("t5", root / SUMMARY)}
    write_checkpoint("bert", root / ENCODER, sentence=SentenceFiles())
    return root, made


@pytest.fixture(scope="module")
def writers(models: tuple[Path, object], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with Cluster(tmp_path_factory.mktemp("mesh"), models=str(models[0]), workers=2) as cluster:
        yield cluster


@pytest.fixture
def client(writers: Cluster) -> Iterator[shoal.Client]:
    with shoal.Client(writers.address, timeout=120) as made:
        yield made


@pytest.mark.parametrize("name", [CHAT, SUMMARY])
def test_writes_what_transformers_writes(
    name: str, client: shoal.Client, models: tuple[Path, dict[str, transformers.PreTrainedModel]]
) -> None:
    root, made = models
    found = client.extract(name, TEXTS, shoal.ReadText(max_tokens=24, instruction="shorten it:"))
    assert [one.text for one in found] == [reference(made[name], root / name, text, 24, "shorten it:") for text in TEXTS]
    assert [one.finish_reason for one in found] == ["length"] * 3
    assert found.usage.output_tokens == 72
    assert found.usage.input_tokens > 0


def test_what_it_cannot_do_is_refused_with_its_path(client: shoal.Client) -> None:
    with pytest.raises(errors.InvalidInput) as caught:
        client.extract(CHAT, ["a text", "  "], shoal.ReadText())
    assert caught.value.field == "items[1].text"
    with pytest.raises(errors.TaskNotSupported):
        client.encode(CHAT, ["a text"])
    with pytest.raises(errors.TaskNotSupported, match="takes no documents"):
        client.extract(CHAT, Document(pdfs.document(["a page"])), shoal.ReadText())


async def test_encoders_are_answered_while_it_writes(writers: Cluster) -> None:
    """Requests of both kinds are answered rightly, and half of the writers are cancelled on the way."""
    async with shoal.AsyncClient(writers.address, timeout=120) as client:
        wanted = (await client.encode(ENCODER, TEXTS)).dense
        alone = [(await client.extract(SUMMARY, [text], LONG))[0].text for text in TEXTS]
        going = [asyncio.create_task(client.extract(SUMMARY, [TEXTS[number % 3]], LONG)) for number in range(8)]
        answers, began = 0, time.monotonic()
        while time.monotonic() - began < 2 or not all(task.done() for task in going[4:]):
            vectors = (await client.encode(ENCODER, TEXTS)).dense
            assert float(np.abs(vectors - wanted).max()) <= 1e-5
            answers += 1
            if answers == 5:
                for task in going[:4]:
                    task.cancel()
        written = await asyncio.gather(*going, return_exceptions=True)
        assert [one[0].text for one in written[4:] if not isinstance(one, BaseException)] == [alone[n % 3] for n in range(4, 8)]
        assert answers > 5


async def test_a_killed_workers_texts_are_written_by_another(models: tuple[Path, object], tmp_path: Path) -> None:
    """Each request is answered once, from the beginning."""
    with Cluster(tmp_path, models=str(models[0]), workers=2) as cluster:
        async with shoal.AsyncClient(cluster.address, timeout=120) as client:
            alone = [(await client.extract(SUMMARY, [text], LONG))[0].text for text in TEXTS]
            going = [asyncio.create_task(client.extract(SUMMARY, [TEXTS[number % 3]], LONG)) for number in range(6)]
            await asyncio.sleep(0.5)
            is_early = not any(task.done() for task in going)
            await asyncio.to_thread(cluster.kill, cluster.workers[0])
            found = await asyncio.gather(*going)
            assert is_early
            assert [one[0].text for one in found] == [alone[number % 3] for number in range(6)]
