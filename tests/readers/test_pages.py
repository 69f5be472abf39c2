"""TrOCR and Donut against transformers: pixels, states, token ids, and the forms of tags."""

from __future__ import annotations

import json
import random
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from PIL import Image

from libs.errors import InputTooLong, InvalidInput, ModelBroken, ShoalError, TaskNotSupported
from libs.models.interface.sequences import GeneratedIds, never_yield
from libs.models.interface.work import RegionsWork, TextWork
from libs.models.readers.donut import parse_form, read_processing
from libs.models.readers.encoder_decoder import EncoderDecoderReader
from tests.parity.image_models import awkward_pictures, pictures
from tests.readers.page_models import processed, write_donut, write_trocr, written
from tests.readers.support import MAX_TOKENS, apart, load, run_work, work_on, written_for

QUESTION = "<s_docvqa><s_question>who pays?</s_question><s_answer>"
THIN = ("1 x 300", "300 x 1")


SMALL = {"distilled": True, "activation_function": "relu", "scale_embedding": True}
"""Use settings of TrOCR's small models."""


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"sinusoidal": True},
        {"projected": True},
        {"activation_function": "relu"},
        {"distilled": True},
        SMALL,
    ],
)
def test_trocr_equals_transformers(settings: dict[str, Any], tmp_path: Path) -> None:
    reference = write_trocr(tmp_path, **settings)
    images = [*pictures(), *awkward_pictures().values()][:16]
    wanted = [written(reference, tmp_path, image, MAX_TOKENS) for image in images]
    model = load(tmp_path)
    assert written_for(model, work_on(images, text_kind="ocr")) == [wanted]
    assert written_for(model, work_on(images[:1])) == [wanted[:1]]  # and alone
    assert len({tuple(each) for each in wanted}) > 8  # the images are seen
    assert max(map(len, wanted)) >= 32


@pytest.mark.parametrize(
    ("task", "prompt", "instruction", "settings"),
    [
        ("cord", "<s_cord>", "", {}),
        ("cord", "<s_synthdog>", "<s_synthdog>", {"turns": True}),
        ("docvqa", QUESTION, "who pays?", {"old_size": True}),
    ],
)
def test_donut_equals_transformers(
    task: str, prompt: str, instruction: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    reference = write_donut(tmp_path, task, **settings)
    images = [
        *pictures()[:5],
        *(image for name, image in awkward_pictures().items() if name not in THIN),
    ][:16]
    wanted = [written(reference, tmp_path, image, MAX_TOKENS, prompt) for image in images]
    model = load(tmp_path)
    assert written_for(model, work_on(images, instruction=instruction)) == [wanted]
    assert len({tuple(each) for each in wanted}) > 8
    assert max(map(len, wanted)) >= 32


def test_beams_of_the_checkpoint_are_used(tmp_path: Path) -> None:
    reference = write_trocr(tmp_path)
    values = json.loads((tmp_path / "generation_config.json").read_text())
    (tmp_path / "generation_config.json").write_text(
        json.dumps(values | {"num_beams": 4, "early_stopping": True, "length_penalty": 2.0})
    )
    reference.generation_config.update(num_beams=4, early_stopping=True, length_penalty=2.0)
    images = pictures()
    wanted = [written(reference, tmp_path, image, 33) for image in images]
    assert written_for(load(tmp_path), work_on(images, max_tokens=33)) == [wanted]


@pytest.mark.parametrize(
    "said",
    [
        {"forced_eos_token_id": 2},
        {"no_repeat_ngram_size": 3, "forced_eos_token_id": None},
        {"num_beams": 3},
    ],
)
def test_decoder_config_applies_without_a_generation_config(
    said: dict[str, Any], tmp_path: Path
) -> None:
    """Early repositories have no generation_config.json, and transformers' default of a length."""
    write_donut(tmp_path)
    (tmp_path / "generation_config.json").unlink()
    values = json.loads((tmp_path / "config.json").read_text())
    values["decoder"] |= said
    (tmp_path / "config.json").write_text(json.dumps(values))
    reference, images = (
        transformers.VisionEncoderDecoderModel.from_pretrained(tmp_path).eval(),
        pictures(),
    )
    wanted = [written(reference, tmp_path, image, 33, "<s_cord>") for image in images]
    assert written_for(load(tmp_path), work_on(images, max_tokens=33)) == [wanted]
    values["decoder"]["max_length"] = 20
    (tmp_path / "config.json").write_text(json.dumps(values))
    ((longest, *_),) = written_for(load(tmp_path), work_on(images[:1], max_tokens=0))
    assert len(longest) > 33


@pytest.mark.parametrize("turns", [False, True])
def test_fitted_pages_equal_transformers(turns: bool, tmp_path: Path) -> None:
    write_donut(tmp_path, turns=turns)
    processing = read_processing(tmp_path)
    sizes = (
        (128, 96),
        (96, 128),
        (300, 200),
        (200, 300),
        (97, 97),
        (31, 77),
        (2000, 1500),
        (640, 41),
    )
    noise = np.random.default_rng(0)
    for height, width in sizes:
        pixels = noise.integers(0, 256, (height, width, 3), np.uint8)
        found = processing.apply(pixels, "items[0].image").astype(np.float32)
        wanted = (processed(tmp_path, _png(pixels))[0].permute(1, 2, 0).numpy() * 0.5 + 0.5) * 255
        assert np.abs(found - wanted).max() < 1e-3, (height, width)
    with pytest.raises(InvalidInput, match="too thin"):
        processing.apply(np.zeros((1, 40_000, 3), np.uint8), "items[0].image")


def _png(pixels: np.ndarray[Any, Any]) -> bytes:
    out = BytesIO()
    Image.fromarray(pixels).save(out, "PNG")
    return out.getvalue()


@pytest.mark.parametrize("write", [write_trocr, partial(write_trocr, distilled=True), write_donut])
def test_encoder_states_equal_transformers(write: Any, tmp_path: Path) -> None:
    reference = write(tmp_path)
    image = pictures()[4]
    pixels = processed(tmp_path, image)
    with torch.inference_mode():
        wanted = reference.encoder(pixels).last_hidden_state[0]
        theirs = reference.bfloat16().encoder(pixels.bfloat16()).last_hidden_state[0]
    found = {}
    for dtype in (torch.float32, torch.bfloat16):
        model = load(tmp_path, dtype)
        (sequence,) = model.prepare(work_on([image])).sequences
        reader = model._reader
        assert isinstance(reader, EncoderDecoderReader)
        states = reader.requests([sequence], never_yield)[0].states
        assert states is not None
        found[dtype] = states
    assert apart(found[torch.float32], wanted) < 1e-5
    assert apart(found[torch.bfloat16], wanted) <= 3 * apart(theirs, wanted)


def test_parsed_forms_equal_transformers() -> None:
    """Forms equal those that transformers parses."""
    tokenizer = type("Tokenizer", (), {"get_added_vocab": lambda _: ["<paid/>"]})()
    reader = transformers.DonutProcessor.__new__(transformers.DonutProcessor)
    reader.tokenizer = tokenizer
    chance = random.Random(1)
    nested = 0
    for _ in range(500):
        text = "".join(_tagged(chance, 3) for _ in range(chance.randint(0, 3)))
        wanted = reader.token2json(text)
        found = parse_form(text, frozenset({"<paid/>"}))
        if isinstance(wanted, list):
            wanted = wanted[0] if len(wanted) == 1 else {"items": wanted}
        assert found == wanted, text
        nested += "{" in str(wanted)[1:]
    assert nested > 50
    deep = "<s_a>" * 2000 + "x" + "</s_a>" * 2000
    assert parse_form(deep)  # the depth does not exceed Python's stack


def _tagged(chance: random.Random, depth: int) -> str:
    """Return tags that are mostly well formed."""
    kind = chance.random()
    if depth == 0 or kind < 0.3:
        return chance.choice(["x", " two words ", "<paid/>", "a<sep/>b", "", "1.00"])
    name = chance.choice(["menu", "nm", "Price"])
    inner = "".join(_tagged(chance, depth - 1) for _ in range(chance.randint(0, 3)))
    if kind < 0.4:
        return f"<s_{name}>{inner}"  # no end
    return f"<s_{name}>{inner}</s_{name}>" + chance.choice(["", "", "<sep/>"])


def test_form_too_deep_for_a_message_is_returned_as_text(tmp_path: Path) -> None:
    write_donut(tmp_path, "docvqa")
    model = load(tmp_path)
    reader = model._reader
    assert isinstance(reader, EncoderDecoderReader)
    for levels, whole in ((20, True), (40, False)):
        names = [f"<s_{'a' * number}>" for number in range(1, levels)]
        tags = "".join(
            [
                "<s_answer>",
                *names,
                "x",
                *(name.replace("<", "</") for name in reversed(names)),
                "</s_answer>",
            ]
        )
        ids = np.array(reader.tokenizer.encode(tags, add_special_tokens=False).ids, np.int32)
        found = reader._extraction("<s_docvqa>", GeneratedIds(ids, "stop"))
        assert found.text == tags
        assert (found.form is not None) == whole


def test_form_is_returned(tmp_path: Path) -> None:
    reference = write_donut(tmp_path, "docvqa")
    model, image = load(tmp_path), pictures()[0]
    result = run_work(model, work_on([image], instruction="who pays?"))
    assert result.items[0].form is not None
    assert result.items[0].form["question"] == "who pays?"
    ids = written(reference, tmp_path, image, MAX_TOKENS, QUESTION)
    assert result.items[0].finish_reason == ("stop" if ids[-1] == 2 else "length")
    assert result.output_tokens == len(ids)


@pytest.mark.parametrize(
    ("settings", "field", "kind"),
    [
        ({}, "text.instruction", InvalidInput),
        ({"instruction": "who?", "region": (0.0, 0.0, 1.0, 1.0)}, "text.region", TaskNotSupported),
        ({"instruction": "who?", "text_kind": "ocr_regions"}, "text.kind", TaskNotSupported),
        ({"instruction": "word " * 90}, "text.instruction", InputTooLong),
    ],
)
def test_unsupported_donut_requests_are_refused(
    settings: dict[str, Any], field: str, kind: type[ShoalError], tmp_path: Path
) -> None:
    write_donut(tmp_path, "docvqa")
    model = load(tmp_path)
    with pytest.raises(kind) as refused:
        model.prepare(work_on([pictures()[0]], **settings))
    assert refused.value.field == field
    with pytest.raises(TaskNotSupported):
        model.prepare(RegionsWork([""], ("cat",), parts=work_on([pictures()[0]]).parts))
    with pytest.raises(TaskNotSupported, match="not texts"):
        model.prepare(TextWork(["a text"], instruction="who?"))


def test_models_with_one_task_refuse_an_instruction(tmp_path: Path) -> None:
    for name, write in (("donut", write_donut), ("trocr", write_trocr)):
        (tmp_path / name).mkdir()
        write(tmp_path / name)
    for name in ("donut", "trocr"):
        with pytest.raises((InvalidInput, TaskNotSupported), match="no instruction"):
            load(tmp_path / name).prepare(work_on([pictures()[0]], instruction="what is it?"))


def test_unsupported_checkpoint_is_refused(tmp_path: Path) -> None:
    write_donut(tmp_path)
    path = tmp_path / "config.json"
    values = json.loads(path.read_text())
    path.write_text(json.dumps(values | {"encoder": values["encoder"] | {"window_size": 3}}))
    with pytest.raises(ModelBroken, match="more than a window"):
        load(tmp_path)
    path.write_text(json.dumps(values | {"encoder": values["encoder"] | {"model_type": "beit"}}))
    with pytest.raises(ModelBroken, match=r"encoder\.model_type"):
        load(tmp_path)
