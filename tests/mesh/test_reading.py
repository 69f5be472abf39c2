"""Models that read images and generate text, through the mesh: directories without specific code,
next to an encoder on one worker.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
import shoal
from shoal import errors
from shoal.tasks import Document, Turn
from tokenizers import Tokenizer

from libs.models.readers.florence_tasks import TASKS, parse_regions
from tests.parity.checkpoints import SentenceFiles, write_checkpoint
from tests.parity.image_models import pictures
from tests.readers import conversation_models, florence_models, page_models
from tests.support import pdfs
from tests.support.cluster import Cluster

pytestmark = pytest.mark.filterwarnings("ignore")

FLORENCE, MICROSOFT, LINES, FORMS, DOCLING, QWEN, ENCODER = (
    f"random/{name}"
    for name in (
        "florence",
        "florence-microsoft",
        "trocr",
        "donut",
        "idefics3",
        "qwen2_5_vl",
        "bert-beside",
    )
)
MAX_TOKENS = 33


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    root = tmp_path_factory.mktemp("readers")
    for name in (FLORENCE, MICROSOFT, LINES, FORMS, DOCLING, QWEN):
        (root / name).mkdir(parents=True)
    made = {
        FLORENCE: florence_models.write(root / FLORENCE),
        MICROSOFT: florence_models.write(root / MICROSOFT, "microsoft"),
        LINES: page_models.write_trocr(root / LINES),
        FORMS: page_models.write_donut(root / FORMS, "docvqa"),
        DOCLING: conversation_models.write("idefics3", root / DOCLING),
        QWEN: conversation_models.write("qwen2_5_vl", root / QWEN),
    }
    write_checkpoint("bert", root / ENCODER, sentence=SentenceFiles())
    return root, made


@pytest.fixture(scope="module")
def readers(
    models: tuple[Path, object], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Cluster]:
    with Cluster(tmp_path_factory.mktemp("mesh"), models=str(models[0])) as cluster:
        yield cluster


@pytest.fixture
def client(readers: Cluster) -> Iterator[shoal.Client]:
    with shoal.Client(readers.address, timeout=300) as made:
        yield made


def plain(directory: Path, ids: list[int]) -> str:
    text = Tokenizer.from_file(str(directory / "tokenizer.json")).decode(
        ids, skip_special_tokens=False
    )
    return text.replace("<s>", "").replace("</s>", "")


@pytest.mark.parametrize("name", [FLORENCE, MICROSOFT])
def test_florence(name: str, client: shoal.Client, models: tuple[Path, dict[str, Any]]) -> None:
    root, made = models
    images, directory = (
        pictures()[:3],
        root / FLORENCE,
    )  # microsoft's tokenizer lacks tokens that its code adds

    def wanted(prompt: str) -> list[str]:
        ids = [
            florence_models.written(made[name], root / name, image, prompt, MAX_TOKENS)
            for image in images
        ]
        return [plain(directory, each) for each in ids]

    found = client.extract(
        name, images, shoal.ReadText(kind="detailed_caption", max_tokens=MAX_TOKENS)
    )
    assert [one.text for one in found] == [
        each.strip() for each in wanted(TASKS["<MORE_DETAILED_CAPTION>"].prompt)
    ]
    assert found.usage.output_tokens > 3 * 20
    found = client.extract(
        name, images, shoal.ReadText(instruction="<REGION_PROPOSAL>", max_tokens=MAX_TOKENS)
    )
    sizes = [(36, 36), (60, 120), (121, 60)]
    boxes = [
        parse_regions(text, "proposals", *size)
        for text, size in zip(wanted(TASKS["<REGION_PROPOSAL>"].prompt), sizes, strict=True)
    ]
    assert any(boxes)
    assert [
        [(each.left, each.top, each.right, each.bottom) for each in one.regions] for one in found
    ] == [
        [(each.left, each.top, each.right, each.bottom) for each in of_image] for of_image in boxes
    ]
    found = client.extract(name, images[:1], shoal.Regions(labels=["a lorry", "a cat"]))
    assert {region.label for region in found[0].regions} <= {"a lorry", "a cat"}


def test_deltas_add_up_to_texts_and_to_those_of_regions(client: shoal.Client) -> None:
    images = pictures() * 4
    captions, lines = (
        shoal.ReadText(kind="detailed_caption", max_tokens=200),
        shoal.ReadText(kind="ocr_regions", max_tokens=200),
    )
    for task in (captions, lines):
        parts = list(client.extract_stream(FLORENCE, images, task))
        result = parts.pop()
        assert isinstance(result, shoal.ExtractResult)
        assert [one.text for one in result] == [
            one.text for one in client.extract(FLORENCE, images, task)
        ]
        reported = [""] * len(images)
        for part in parts:
            assert isinstance(part, shoal.Delta)
            reported[part.item] = part.text if part.restarted else reported[part.item] + part.text
        assert reported == [one.text for one in result]


def test_lines_and_forms(client: shoal.Client, models: tuple[Path, dict[str, Any]]) -> None:
    root, made = models
    images = pictures()[:3]
    lines = client.extract(LINES, images, shoal.ReadText(kind="ocr", max_tokens=MAX_TOKENS))
    tokenizer = Tokenizer.from_file(str(root / LINES / "tokenizer.json"))
    wanted = [page_models.written(made[LINES], root / LINES, image, MAX_TOKENS) for image in images]
    assert [one.text for one in lines] == [tokenizer.decode(each).strip() for each in wanted]
    forms = client.extract(
        FORMS, images, shoal.ReadText(instruction="who pays?", max_tokens=MAX_TOKENS)
    )
    prompt = "<s_docvqa><s_question>who pays?</s_question><s_answer>"
    tokenizer = Tokenizer.from_file(str(root / FORMS / "tokenizer.json"))
    for form, image in zip(forms, images, strict=True):
        ids = page_models.written(made[FORMS], root / FORMS, image, MAX_TOKENS, prompt)
        text = tokenizer.decode(ids, skip_special_tokens=False).replace("</s>", "").strip()
        assert form.text.endswith(text)
        assert form.form is not None
        assert form.form["question"] == "who pays?"


@pytest.mark.parametrize("name", [DOCLING, QWEN])
def test_conversations_match_transformers(
    name: str, client: shoal.Client, models: tuple[Path, dict[str, Any]]
) -> None:
    root, made = models
    asked, images = "Convert this page to docling.", pictures()[:3]
    tokenizer = Tokenizer.from_file(str(root / name / "tokenizer.json"))
    wanted = [
        conversation_models.written(made[name], root / name, [image], asked, MAX_TOKENS)
        for image in images
    ]
    found = client.extract(name, images, shoal.ReadText(instruction=asked, max_tokens=MAX_TOKENS))
    assert [one.text for one in found] == [tokenizer.decode(each).strip() for each in wanted]
    both = shoal.Parts(images[0], "It is late.")
    wanted = [
        conversation_models.written(
            made[name], root / name, images[:1], f"It is late.\n{asked}", MAX_TOKENS
        )
    ]
    found = client.extract(name, [both], shoal.ReadText(instruction=asked, max_tokens=MAX_TOKENS))
    assert [one.text for one in found] == [tokenizer.decode(each).strip() for each in wanted]


def test_pages_of_a_document(client: shoal.Client) -> None:
    """Each page is a separate image. Pages with a text layer use it if requested."""
    document = Document(pdfs.document(["a page", "another one"]))
    [read] = client.extract(
        LINES, [document], shoal.ReadText(kind="ocr", text_layer="never", max_tokens=8)
    )
    assert [(page.page, page.is_text_layer) for page in read.pages] == [(1, False), (2, False)]
    assert all(page.text for page in read.pages)
    [layers] = client.extract(LINES, [document], shoal.ReadText(kind="ocr"))
    assert [page.text.strip() for page in layers.pages] == ["a page", "another one"]


def test_pages_with_a_schema_are_read_despite_a_text_layer(client: shoal.Client) -> None:
    name = {"type": "string", "maxLength": 5}
    schema = {
        "type": "object",
        "properties": {"a": name},
        "required": ["a"],
        "additionalProperties": False,
    }
    document = Document(pdfs.document(["a page", "another one"], size=(60, 60)))
    [found] = client.extract(QWEN, [document], shoal.ReadText(schema=schema, max_tokens=60))
    assert [(page.page, page.is_text_layer) for page in found.pages] == [(1, False), (2, False)]
    for page in found.pages:
        jsonschema.validate(json.loads(page.text), schema)
    only = shoal.ReadText(schema=schema, text_layer="only")
    turns: list[Turn] = [("user", "a"), ("assistant", "b")]
    for model, task, field in (
        (QWEN, only, "text.text_layer"),
        (LINES, shoal.ReadText(schema=schema), "text.json_schema"),
        (FORMS, shoal.ReadText(schema=schema, instruction="who?"), "text.json_schema"),
        (FLORENCE, shoal.ReadText(schema=schema), "text.json_schema"),
        (QWEN, shoal.ReadText(turns=turns, text_layer="only"), "text.text_layer"),
        *((model, shoal.ReadText(turns=turns), "text.turns") for model in (LINES, FORMS, FLORENCE)),
    ):
        with pytest.raises(errors.InvalidInput) as refused:
            client.extract(model, pictures()[:1], task)
        assert refused.value.field == field


def test_image_in_a_conversation(client: shoal.Client) -> None:
    image = pictures()[0]
    turns: list[Turn] = [("user", "hello"), ("assistant", "a word")]
    alone = client.extract(QWEN, image, shoal.ReadText(max_tokens=20))
    after = client.extract(QWEN, image, shoal.ReadText(max_tokens=20, turns=turns))
    assert after.usage.input_tokens > alone.usage.input_tokens
    assert after[0].text != alone[0].text
    # The model reads pages even if they have a text layer.
    [page] = client.extract(
        QWEN,
        [Document(pdfs.document(["a page"], size=(60, 60)))],
        shoal.ReadText(max_tokens=5, turns=turns),
    )
    assert not page.pages[0].is_text_layer


def test_errors_have_a_path_and_affect_nothing_else(client: shoal.Client) -> None:
    image = pictures()[0]
    wrong: list[tuple[list[bytes | str], shoal.ReadText, str]] = [
        ([image, b"no image"], shoal.ReadText(), "items[1].image"),
        ([image, "a text"], shoal.ReadText(), "items[1].text"),
        ([image], shoal.ReadText(instruction="<REGION_TO_OCR>"), "text.instruction"),
        ([image], shoal.ReadText(kind="ocr", region=(0, 0, 99, 9)), "text.region"),
        ([image], shoal.ReadText(kind="ocr", region=(0, 0, float("nan"), 9)), "text.region"),
    ]
    for items, task, path in wrong:
        with pytest.raises((errors.InvalidInput, errors.TaskNotSupported)) as refused:
            client.extract(FLORENCE, items, task)
        assert refused.value.field == path
        assert client.extract(FLORENCE, [image], shoal.ReadText(max_tokens=8))[0].text
    with pytest.raises(errors.TaskNotSupported):
        client.encode(FLORENCE, [image])


async def test_readers_and_encoders_share_a_worker(readers: Cluster) -> None:
    texts = ["the first text", "another one"]
    async with shoal.AsyncClient(readers.address, timeout=300) as client:
        wanted = (await client.encode(ENCODER, texts)).dense
        alone = {
            name: (await client.extract(name, pictures()[:2], shoal.ReadText(max_tokens=40)))
            for name in (FLORENCE, LINES)
        }
        going = [
            asyncio.create_task(client.extract(name, pictures()[:2], shoal.ReadText(max_tokens=40)))
            for name in (FLORENCE, LINES) * 4
        ]  # fmt: skip
        vectors = [(await client.encode(ENCODER, texts)).dense for _ in range(10)]
        written = await asyncio.gather(*going)
        assert all(float(np.abs(each - wanted).max()) <= 1e-5 for each in vectors)
        for name, found in zip((FLORENCE, LINES) * 4, written, strict=True):
            assert [one.text for one in found] == [one.text for one in alone[name]]
