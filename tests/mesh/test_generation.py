"""Generative models through the mesh: with encoders on one worker, cancelled, and when their worker
is killed.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import jsonschema
import numpy as np
import pytest
import shoal
import transformers
from shoal import errors
from shoal.tasks import Document, Turn

from tests.generation.served import reference, write, write_ending
from tests.mesh.test_rolling import known_workers, wait_replaced
from tests.parity.checkpoints import SentenceFiles, write_checkpoint
from tests.support import pdfs
from tests.support.cluster import Cluster
from tests.support.waiting import rounds, wait_until

pytestmark = pytest.mark.filterwarnings("ignore")

CHAT, SUMMARY, FORMS, ENCODER = (
    "random/qwen3-chat",
    "random/t5-writes",
    "random/qwen3-forms",
    "random/bert-beside",
)
TEXTS = ["the first text", "another one, which is longer than the first", "a third"]
LONG = shoal.ReadText(max_tokens=800)


@pytest.fixture(scope="module")
def models(
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[Path, dict[str, transformers.PreTrainedModel]]:
    root = tmp_path_factory.mktemp("writers")
    made = {CHAT: write("qwen3", root / CHAT), SUMMARY: write("t5", root / SUMMARY)}
    write_ending("qwen3", root / FORMS)
    write_checkpoint("bert", root / ENCODER, sentence=SentenceFiles())
    return root, made


@pytest.fixture(scope="module")
def writers(
    models: tuple[Path, object], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Cluster]:
    with Cluster(tmp_path_factory.mktemp("mesh"), models=str(models[0]), workers=2) as cluster:
        yield cluster


@pytest.fixture
def client(writers: Cluster) -> Iterator[shoal.Client]:
    with shoal.Client(writers.address, timeout=300) as made:
        yield made


def test_seed_determines_the_text_alone_and_in_a_batch(client: shoal.Client) -> None:
    """Two workers run batches of varying composition, with requests of other sizes."""
    task = shoal.ReadText(max_tokens=40, temperature=1.2, top_p=0.95, seed=(1 << 64) - 1)
    alone = [client.extract(CHAT, [text], task)[0].text for text in TEXTS]
    others = shoal.ReadText(max_tokens=60, temperature=1.0)
    with ThreadPoolExecutor(8) as threads:
        pending = [threads.submit(client.extract, CHAT, TEXTS * 3, others) for _ in range(3)]
        together = client.extract(CHAT, TEXTS * 4, task)
        assert [one.text for one in together] == alone * 4
        drawn = {one.text for each in pending for one in each.result()}
    assert len(drawn) > 20  # without a seed each item has a different one
    greedy = client.extract(CHAT, TEXTS, shoal.ReadText(max_tokens=40))
    assert not {one.text for one in greedy} & set(alone)


def test_stop_strings_end_texts_and_their_deltas(client: shoal.Client) -> None:
    whole = client.extract(CHAT, TEXTS[:1], shoal.ReadText(max_tokens=60))[0].text
    stop = whole[30:37]
    parts = list(client.extract_stream(CHAT, TEXTS[:1], shoal.ReadText(max_tokens=60, stop=stop)))
    reported = "".join(part.text for part in parts if isinstance(part, shoal.Delta))
    assert isinstance(parts[-1], shoal.ExtractResult)
    found = parts[-1][0]
    assert found.text == whole[: whole.index(stop)].strip()
    assert found.text.startswith(reported)
    assert found.finish_reason == "stop"
    assert parts[-1].usage.output_tokens < 60


def test_log_probabilities_are_returned(client: shoal.Client) -> None:
    found = client.extract(CHAT, TEXTS, shoal.ReadText(max_tokens=5, top_logprobs=2))
    assert all(0 < len(one.tokens) <= 5 and len(one.tokens[0].top) == 2 for one in found)
    with pytest.raises(errors.InvalidInput, match="temperature is 11"):
        client.extract(CHAT, TEXTS, shoal.ReadText(temperature=11))


@pytest.mark.parametrize("name", [CHAT, SUMMARY])
def test_generated_text_equals_transformers(
    name: str, client: shoal.Client, models: tuple[Path, dict[str, transformers.PreTrainedModel]]
) -> None:
    root, made = models
    found = client.extract(name, TEXTS, shoal.ReadText(max_tokens=24, instruction="shorten it:"))
    assert [one.text for one in found] == [
        reference(made[name], root / name, text, 24, "shorten it:") for text in TEXTS
    ]
    assert [one.finish_reason for one in found] == ["length"] * 3
    assert found.usage.output_tokens == 72
    assert found.usage.input_tokens > 0


def test_conversation_equals_transformers(
    client: shoal.Client, models: tuple[Path, dict[str, transformers.PreTrainedModel]]
) -> None:
    root, made = models
    turns = [("user", "a question"), ("assistant", "an answer")]
    given: list[Turn] = [("user", "a question"), ("assistant", "an answer")]
    task = shoal.ReadText(max_tokens=24, instruction="shorten it:", turns=given)
    found = client.extract(CHAT, TEXTS, task)
    assert [one.text for one in found] == [
        reference(made[CHAT], root / CHAT, text, 24, "shorten it:", turns) for text in TEXTS
    ]
    alone = client.extract(CHAT, TEXTS, replace(task, turns=()))
    assert [one.text for one in alone] != [one.text for one in found]
    with pytest.raises(errors.TaskNotSupported) as caught:
        client.extract(SUMMARY, TEXTS, task)
    assert caught.value.field == "text.turns"


def test_unsupported_requests_are_refused_with_their_path(client: shoal.Client) -> None:
    with pytest.raises(errors.InvalidInput) as caught:
        client.extract(CHAT, ["a text", "  "], shoal.ReadText())
    assert caught.value.field == "items[1].text"
    with pytest.raises(errors.TaskNotSupported):
        client.encode(CHAT, ["a text"])
    with pytest.raises(errors.TaskNotSupported, match="takes no documents"):
        client.extract(CHAT, Document(pdfs.document(["a page"])), shoal.ReadText())


SCHEMA = {
    "type": "object",
    "properties": {
        "who": {"type": "string", "maxLength": 6},
        "paid": {"type": "boolean"},
        "sum": {"enum": [1.5, 20]},
    },
    "required": ["who", "paid", "sum"],
    "additionalProperties": False,
}


async def test_answers_follow_a_json_schema(writers: Cluster) -> None:
    held, free = shoal.ReadText(max_tokens=90, schema=SCHEMA), shoal.ReadText(max_tokens=24)
    async with shoal.AsyncClient(writers.address, timeout=300) as client:
        alone = await client.extract(FORMS, TEXTS, free)
        together = await asyncio.gather(
            *(client.extract(FORMS, TEXTS, task) for task in (held, free) * 4)
        )
        for answers in together[0::2]:
            assert [one.finish_reason for one in answers] == ["stop"] * 3
            for one in answers:
                assert one.form == json.loads(one.text)
                jsonschema.validate(one.form, SCHEMA)
                assert list(json.loads(one.text)) == ["who", "paid", "sum"]  # the schema's order
        for answers in together[1::2]:
            assert [one.text for one in answers] == [one.text for one in alone]
            assert [one.form for one in answers] == [None] * 3
        parts = [part async for part in client.extract_stream(FORMS, TEXTS[:1], held)]
        assert isinstance(result := parts.pop(), shoal.ExtractResult)
        assert (
            "".join(part.text for part in parts if isinstance(part, shoal.Delta))
            == result[0].text
            == together[0][0].text
        )


def test_unsupported_schemas_are_refused_with_their_path(client: shoal.Client) -> None:
    def refusal(
        model: str, schema: dict[str, object] | str, field: str = "text.json_schema"
    ) -> errors.InvalidInput:
        with pytest.raises(errors.InvalidInput) as caught:
            client.extract(model, TEXTS, shoal.ReadText(schema=schema))
        assert caught.value.field == field
        return caught.value

    found = refusal(FORMS, SCHEMA | {"properties": {"a": {"type": "array", "uniqueItems": True}}})
    assert "at #/properties/a: the keyword 'uniqueItems' is not supported" in str(found)
    assert "is not valid JSON" in str(refusal(FORMS, "{"))
    assert isinstance(refusal(SUMMARY, SCHEMA), errors.TaskNotSupported)
    assert isinstance(refusal(ENCODER, SCHEMA, "text"), errors.TaskNotSupported)


async def test_encoders_are_served_during_generation(writers: Cluster) -> None:
    """Requests of both kinds are answered correctly, and half of the generative ones are
    cancelled.
    """
    async with shoal.AsyncClient(writers.address, timeout=300) as client:
        wanted = (await client.encode(ENCODER, TEXTS)).dense
        alone = [(await client.extract(SUMMARY, [text], LONG))[0].text for text in TEXTS]
        going = [
            asyncio.create_task(client.extract(SUMMARY, [TEXTS[number % 3]], LONG))
            for number in range(8)
        ]
        during = 0
        while not all(task.done() for task in going[4:]):
            vectors = (await client.encode(ENCODER, TEXTS)).dense
            assert float(np.abs(vectors - wanted).max()) <= 1e-5
            during += not all(task.done() for task in going[4:])
            if during == 1:
                for task in going[:4]:
                    task.cancel()
        assert during >= 1, "the encoder's texts have waited for the end of the generation"
        written = await asyncio.gather(*going, return_exceptions=True)
        assert [one[0].text for one in written[4:] if not isinstance(one, BaseException)] == [
            alone[n % 3] for n in range(4, 8)
        ]


def start_again(cluster: Cluster, name: str) -> None:
    """Start a killed worker again, once the mesh has forgotten it, and wait until it is known."""
    wait_until(lambda: name not in known_workers(cluster), 60, f"the mesh to forget {name}")
    cluster.start(name)
    wait_replaced(cluster, name)


async def test_killed_workers_texts_are_generated_by_another(
    models: tuple[Path, object], tmp_path: Path
) -> None:
    """Each request is answered once, from the beginning."""
    with Cluster(tmp_path, models=str(models[0]), workers=2) as cluster:
        async with shoal.AsyncClient(cluster.address, timeout=300) as client:
            alone = [(await client.extract(SUMMARY, [text], LONG))[0].text for text in TEXTS]
            for _ in rounds(10, "a worker was killed before any text was complete"):
                going = [
                    asyncio.create_task(client.extract(SUMMARY, [TEXTS[number % 3]], LONG))
                    for number in range(6)
                ]
                await asyncio.sleep(0.3)
                is_early = not any(task.done() for task in going)
                await asyncio.to_thread(cluster.kill, cluster.workers[0])
                found = await asyncio.gather(*going)
                assert [one[0].text for one in found] == [alone[number % 3] for number in range(6)]
                if is_early:
                    break
                await asyncio.to_thread(start_again, cluster, cluster.workers[0])
