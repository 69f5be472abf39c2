"""Generative vision-language models against transformers: token ids with and without images, and
refusals.
"""

from __future__ import annotations

import json
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from libs.catalog.detect import read_card
from libs.catalog.overrides import Hints, Overrides
from libs.errors import InputTooLong, InvalidInput, ModelBroken, ShoalError, TaskNotSupported
from libs.models.generation.decoding.loop import DecodeLoop
from libs.models.interface.sequences import never_yield
from libs.models.interface.work import Part, RegionsWork, TextWork, Turn
from libs.models.loading import load_served_model
from libs.models.readers.conversation import ConversationReader
from tests.parity.image_models import awkward_pictures, pictures
from tests.readers.conversation_models import KINDS, QWEN, write, written
from tests.readers.support import MAX_TOKENS, load, run_work, work_on, written_for

ASKED = "What is in it?"
THIN = ("1 x 300", "300 x 1", "1 x 1")


def images_for(kind: str) -> list[bytes]:
    """Return 16 images, without those that are too thin for the family."""
    found = [
        *pictures()[:5],
        *(image for name, image in awkward_pictures().items() if name not in THIN),
    ]
    return (found * 2)[:16]


@pytest.mark.parametrize("kind", KINDS)
def test_generated_tokens_equal_transformers(kind: str, tmp_path: Path) -> None:
    reference = write(kind, tmp_path)
    model, images = load(tmp_path), images_for(kind)
    wanted = [written(reference, tmp_path, [image], ASKED, MAX_TOKENS) for image in images]
    assert written_for(model, work_on(images, instruction=ASKED)) == [wanted]
    assert written_for(model, work_on(images[:1], instruction=ASKED)) == [wanted[:1]]  # and alone
    assert len({tuple(each) for each in wanted}) > 8  # the images are seen
    assert max(map(len, wanted)) >= 32


def test_image_sides_are_multiples_of_the_processors_unit(tmp_path: Path) -> None:
    """Sides are multiples of squares of patches, of patches, or of neither (LightOnOCR)."""
    reference, file = write("lighton_ocr", tmp_path), tmp_path / "preprocessor_config.json"
    values = json.loads(file.read_text())
    images = [make_png(height, width) for height, width in ((40, 56), (41, 43), (30, 44), (9, 63))]
    found = []
    for side in (8, {"height": 4, "width": 4}):
        file.write_text(json.dumps(values | {"patch_size": side}))
        wanted = [written(reference, tmp_path, [image], ASKED, 20) for image in images]
        found.append(
            written_for(
                load(tmp_path), work_on([*images, images[1]], instruction=ASKED, max_tokens=20)
            )[0]
        )
        assert found[-1] == [*wanted, wanted[1]]
    assert found[0][0] == found[1][0]
    assert found[0][1] != found[1][1]
    with pytest.raises(InvalidInput, match="too small: 40 x 3 pixels"):
        load(tmp_path).prepare(work_on([make_png(3, 40)]))
    file.write_text(json.dumps(values | {"patch_size": 6}))
    with pytest.raises(ModelBroken, match=r"patch_size.*side, 4 pixels"):
        load(tmp_path)


def make_png(height: int, width: int) -> bytes:
    """Noise."""
    out = BytesIO()
    Image.fromarray(
        np.random.default_rng(height * width).integers(0, 256, (height, width, 3), np.uint8)
    ).save(out, "PNG")
    return out.getvalue()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("settings", [{"tied": True}, {"num_beams": 3}])
def test_beams_and_tied_tables_equal_transformers(
    settings: dict[str, Any], kind: str, tmp_path: Path
) -> None:
    reference = write(kind, tmp_path, **settings)
    images = images_for(kind)[:4]
    wanted = [written(reference, tmp_path, [image], ASKED, 33) for image in images]
    assert written_for(load(tmp_path), work_on(images, instruction=ASKED, max_tokens=33)) == [
        wanted
    ]


@pytest.mark.parametrize("kind", KINDS)
def test_several_images_and_texts_are_one_item(kind: str, tmp_path: Path) -> None:
    reference, model, images = write(kind, tmp_path), load(tmp_path), images_for(kind)[:2]
    parts = tuple(
        Part(image, f"items[0].parts[{place}].image") for place, image in enumerate(images)
    )
    reported = (*parts, Part("It is late.", "items[0].parts[2].text"))
    works = [
        TextWork([""], parts={0: parts}, instruction=ASKED, max_tokens=MAX_TOKENS),
        TextWork([""], parts={0: reported}, instruction=ASKED, max_tokens=MAX_TOKENS),
        TextWork(["It is late."], instruction=ASKED, max_tokens=MAX_TOKENS),
    ]
    wanted = [
        [written(reference, tmp_path, images, ASKED, MAX_TOKENS)],
        [written(reference, tmp_path, images, f"It is late.\n{ASKED}", MAX_TOKENS)],
        [written(reference, tmp_path, [], f"It is late.\n{ASKED}", MAX_TOKENS)],
    ]
    assert written_for(model, *works) == wanted


@pytest.mark.parametrize("kind", KINDS)
def test_turns_precede_an_item(kind: str, tmp_path: Path) -> None:
    reference, model, images = write(kind, tmp_path), load(tmp_path), images_for(kind)[:2]
    said = [
        ("user", "It is late."),
        ("assistant", " So it is. "),
        ("user", "Is it?"),
        ("assistant", "No."),
    ]
    turns = tuple(Turn(role, text) for role, text in said)  # type: ignore[arg-type]
    parts = tuple(
        Part(image, f"items[0].parts[{place}].image") for place, image in enumerate(images)
    )
    works = [
        TextWork(
            [""], parts={0: parts[:1]}, instruction=ASKED, max_tokens=MAX_TOKENS, turns=turns[:2]
        ),
        TextWork([""], parts={0: parts}, instruction=ASKED, max_tokens=MAX_TOKENS, turns=turns),
        TextWork([ASKED], max_tokens=MAX_TOKENS, turns=turns[:2]),
    ]
    wanted = [
        [written(reference, tmp_path, images[:1], ASKED, MAX_TOKENS, said[:2])],
        [written(reference, tmp_path, images, ASKED, MAX_TOKENS, said)],
        [written(reference, tmp_path, [], ASKED, MAX_TOKENS, said[:2])],
    ]
    assert written_for(model, *works) == wanted
    alone = [written(reference, tmp_path, images[:1], ASKED, MAX_TOKENS)]
    assert wanted[0] != alone
    assert written_for(model, replace(works[0], turns=())) == [alone]


def test_image_token_in_a_turn_is_refused(tmp_path: Path) -> None:
    """A turn with the image's token in its text is refused, with an image and without one."""
    write("qwen2_vl", tmp_path)
    model, turns = load(tmp_path), (Turn("user", "<|image_pad|>"), Turn("assistant", "a"))
    for work in (
        work_on(images_for("qwen2_vl")[:1], instruction=ASKED, turns=turns),
        TextWork([ASKED], turns=turns),
    ):
        with pytest.raises(InvalidInput, match="image token"):
            model.prepare(work)


@pytest.mark.parametrize("kind", KINDS)
def test_schema_constrains_answers_to_json(kind: str, tmp_path: Path) -> None:
    write(kind, tmp_path)
    images = images_for(kind)[:3]
    name = {"type": "string", "maxLength": 8}
    schema = {
        "type": "object",
        "properties": {"name": name, "n": {"enum": [1, 2]}},
        "required": ["name", "n"],
    }
    held = work_on(
        images,
        instruction=ASKED,
        json_schema=json.dumps(schema | {"additionalProperties": False}),
        max_tokens=90,
    )
    model = load(tmp_path)
    found = run_work(model, held)
    for one in found.items:
        assert one.finish_reason == "stop"
        jsonschema.validate(json.loads(one.text), schema)
        assert one.form == json.loads(one.text)
    free = work_on(images, instruction=ASKED)
    alone = written_for(load(tmp_path), free)
    assert written_for(model, free, held)[0] == alone[0]  # others are as ever


@pytest.mark.parametrize("kind", KINDS)
def test_prefill_in_pieces_equals_one_prefill(kind: str, tmp_path: Path) -> None:
    """Rows of images and their positions are divided with the prompt."""
    write(kind, tmp_path)
    model = load(tmp_path)
    reader = model._reader
    assert isinstance(reader, ConversationReader)
    prepared = model.prepare(work_on(images_for(kind)[:3], instruction=ASKED))
    found = []
    for most in (7, 2048):
        loop = DecodeLoop(reader.language_model, 400, most_rows=most)
        texts: dict[int, list[int]] = {}
        going = [loop.add(request) for request in reader.requests(prepared.sequences, never_yield)]
        while loop.sequences:
            for each in loop.step():
                texts.setdefault(id(each.sequence), []).extend(each.ids)
        found.append([texts[id(each)] for each in going])
    assert found[0] == found[1]


@pytest.mark.parametrize("kind", KINDS)
def test_logits_equal_transformers(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reference = write(kind, tmp_path)
    reader = load(tmp_path)._reader
    assert isinstance(reader, ConversationReader)
    sequences, _ = reader.prepare(work_on(images_for(kind)[:1], instruction=ASKED), lambda: None)
    loop = DecodeLoop(reader.language_model, 100)
    seen: list[torch.Tensor] = []
    forward = reader.language_model.forward

    def kept(*arguments: Any) -> torch.Tensor:
        seen.append(forward(*arguments).clone())
        return seen[-1].clone()

    monkeypatch.setattr(reader.language_model, "forward", kept)
    loop.add(reader.requests(sequences, never_yield)[0])
    loop.step()
    theirs: list[torch.Tensor] = []
    hook = reference.lm_head.register_forward_hook(
        lambda module, given, made: theirs.append(made[:, -1])
    )
    written(reference, tmp_path, images_for(kind)[:1], ASKED, 1)
    hook.remove()
    assert float((seen[0].double() - theirs[0].double()).norm() / theirs[0].double().norm()) < 1e-5


def test_token_prediction_layers_are_dropped(tmp_path: Path) -> None:
    """GLM-OCR is published with one more layer than config.json counts."""
    reference = write("glm_ocr", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    spare = {
        name.replace("layers.0.", "layers.3."): tensor.clone()
        for name, tensor in tensors.items()
        if ".layers.0." in name
    }
    spare = {name: tensor for name, tensor in spare.items() if "language_model" in name}
    assert len(spare) > 5
    save_file(
        tensors | spare | {"model.language_model.layers.3.eh_proj.weight": torch.zeros(2, 2)},
        tmp_path / "model.safetensors",
    )
    image = images_for("glm_ocr")[0]
    wanted = written(reference, tmp_path, [image], ASKED, MAX_TOKENS)
    assert written_for(load(tmp_path), work_on([image], instruction=ASKED)) == [[wanted]]


@pytest.mark.parametrize("kind", KINDS)
def test_card_selects_generation_or_retrieval(kind: str, tmp_path: Path) -> None:
    write(kind, tmp_path)
    card = read_card(tmp_path, "a/reader")
    assert (card.kind, card.tasks, card.inputs, card.family) == (
        "generative",
        ("text",),
        ("text", "image"),
        kind,
    )
    # It serves retrieval if a card says so or its files are sentence-transformers'.
    assert (
        read_card(tmp_path, "a/reader", Overrides("card.yaml:1", detect=Hints(kind="dense"))).kind
        == "images"
    )
    (tmp_path / "modules.json").write_text("[]")
    assert read_card(tmp_path, "a/reader").kind == "images"


def test_default_instruction_is_used(tmp_path: Path) -> None:
    reference = write("qwen2_vl", tmp_path)
    image = pictures()[0]
    wanted = written(reference, tmp_path, [image], "Read the text in the image.", MAX_TOKENS)
    assert written_for(load(tmp_path), work_on([image], text_kind="ocr")) == [[wanted]]
    card = Overrides("card.yaml:1", prompts={"ocr": "Text Recognition:"})
    model = load_served_model(tmp_path, "a/reader", torch.device("cpu"), torch.float32, card)
    wanted = written(reference, tmp_path, [image], "Text Recognition:", MAX_TOKENS)
    assert written_for(model, work_on([image], text_kind="ocr")) == [[wanted]]  # type: ignore[arg-type]


def test_document_tags_are_kept(tmp_path: Path) -> None:
    """SmolDocling's are special tokens, which other models remove from their answers."""
    write("idefics3", tmp_path)
    image, asked = pictures()[0], {"instruction": ASKED}
    plain = run_work(load(tmp_path), work_on([image], **asked)).items[0].text
    tokenizer = json.loads((tmp_path / "tokenizer.json").read_text())
    last = max(token["id"] for token in tokenizer["added_tokens"])
    next(token for token in tokenizer["added_tokens"] if token["id"] == last)["content"] = (
        "<doctag>"
    )
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    kept = run_work(load(tmp_path), work_on([image], **asked)).items[0].text
    assert len(kept) >= len(plain)


@pytest.mark.parametrize(
    ("work", "field", "kind"),
    [
        (work_on([b"no image"]), "items[0].image", InvalidInput),
        (work_on([pictures()[0]], region=(0, 0, 9, 9)), "text.region", TaskNotSupported),
        (work_on([pictures()[0]], text_kind="ocr_regions"), "text.kind", TaskNotSupported),
        (work_on([pictures()[0]], instruction="word " * 3000), "items[0].image", InputTooLong),
        (
            work_on([pictures()[0]], instruction="a <|image_pad|> too many"),
            "text.instruction",
            InvalidInput,
        ),
        (TextWork(["  "]), "items[0].text", InvalidInput),
    ],
)
def test_unsupported_requests_are_refused(
    work: TextWork, field: str, kind: type[ShoalError], tmp_path: Path
) -> None:
    write("qwen2_5_vl", tmp_path)
    model = load(tmp_path)
    with pytest.raises(kind) as refused:
        model.prepare(work)
    assert refused.value.field == field
    with pytest.raises(TaskNotSupported):
        model.prepare(RegionsWork([""], ("cat",), parts=work_on([pictures()[0]]).parts))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (
            lambda text: text.replace("<|vision_start|><|image_pad|><|vision_end|>", ""),
            "no place for the image",
        ),
        (
            lambda text: text.replace("{{ content['text'] }}", "{{ content['text'] | upper }}"),
            "changes the text",
        ),
        (lambda text: "{{ raise_exception('no') }}" + text, "the chat template"),
    ],
)
def test_unusable_template_is_refused(change: Any, reason: str, tmp_path: Path) -> None:
    write("qwen2_vl", tmp_path)
    (tmp_path / "chat_template.jinja").write_text(change(QWEN))
    with pytest.raises(ModelBroken, match=reason):
        load(tmp_path)
