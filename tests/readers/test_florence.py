"""Florence-2 against transformers: token ids, the encoder's states, and parsed answers."""

from __future__ import annotations

import json
import random
import shutil
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from PIL import Image
from transformers.models.florence2.processing_florence2 import Florence2PostProcessor

from libs.errors import InputTooLong, InvalidInput, ModelBroken, ShoalError, TaskNotSupported
from libs.models.generation.model import GenerativeModel
from libs.models.interface.sequences import GeneratedIds, never_yield
from libs.models.interface.work import Part, RegionsWork, TextWork, never_cancelled
from libs.models.readers.florence import FlorenceReader
from libs.models.readers.florence_tasks import TASKS, Form, parse_regions
from tests.parity.image_models import awkward_pictures, pictures
from tests.readers import florence_models
from tests.readers.support import MAX_TOKENS, apart, load, run_work, work_on, written_for


@pytest.fixture(scope="module", params=["transformers", "microsoft"])
def written(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Any, Path, GenerativeModel]:
    directory = tmp_path_factory.mktemp("florence")
    model = florence_models.write(directory, request.param)
    return model, directory, load(directory)


def test_every_task_equals_transformers(
    written: tuple[Any, Path, GenerativeModel],
) -> None:
    reference, directory, model = written
    image = pictures()[1]
    works, prompts = [], []
    for name, task in TASKS.items():
        given = " a lorry, and more" if "{}" in task.prompt else ""
        works.append(work_on([image], instruction=name + given))
        prompts.append(task.prompt.format(given.strip()))
    wanted = [
        florence_models.written(reference, directory, image, prompt, MAX_TOKENS)
        for prompt in prompts
    ]
    found = written_for(model, *works)
    assert [answer for (answer,) in found] == wanted
    assert len({tuple(each) for each in wanted}) > 8  # the prompts are read
    assert max(map(len, wanted)) >= 32


def test_mixed_images_in_a_batch_equal_transformers(
    written: tuple[Any, Path, GenerativeModel],
) -> None:
    reference, directory, model = written
    images = [*pictures(), *awkward_pictures().values()][:16]
    (found,) = written_for(model, work_on(images, text_kind="ocr"))
    wanted = [
        florence_models.written(
            reference, directory, each, "What is the text in the image?", MAX_TOKENS
        )
        for each in images
    ]
    assert found == wanted
    assert len({tuple(each) for each in wanted}) > 8  # the images are seen


def test_encoder_states_equal_transformers(written: tuple[Any, Path, GenerativeModel]) -> None:
    reference, directory, model = written
    image = pictures()[0]
    reader = model._reader
    assert isinstance(reader, FlorenceReader)
    (sequence,) = model.prepare(work_on([image], instruction="What is it?")).sequences
    found = reader.requests([sequence], never_yield)[0].states
    pixels = florence_models.processor(directory)(Image.open(BytesIO(image)), return_tensors="pt")[
        "pixel_values"
    ]
    with torch.inference_mode():
        seen = reference.get_image_features(pixels).pooler_output
        assert sequence.rows is not None
        (ours,) = reader._model.images.states([sequence.rows.values], never_yield)
        rows = reference.get_input_embeddings()(
            torch.from_numpy(sequence.ids[len(sequence.rows.places) :]).long()
        )
        wanted = reference.model.language_model.encoder(
            inputs_embeds=torch.cat([seen, rows[None]], dim=1)
        ).last_hidden_state[0]
    assert apart(ours, seen[0]) < 1e-5
    assert found is not None
    assert apart(found, wanted) < 1e-5


def test_beams_of_the_checkpoint_are_used(tmp_path: Path) -> None:
    reference = florence_models.write(tmp_path, num_beams=3)
    images = pictures()
    (found,) = written_for(load(tmp_path), work_on(images, text_kind="caption", max_tokens=33))
    wanted = [
        florence_models.written(reference, tmp_path, each, "What does the image describe?", 33)
        for each in images
    ]
    assert found == wanted


def test_text_config_applies_without_a_generation_config(tmp_path: Path) -> None:
    """Microsoft's repositories have no generation_config.json."""
    florence_models.write(tmp_path, "microsoft", num_beams=3)
    said = tmp_path / "generation_config.json"
    values, settings = (
        json.loads((tmp_path / "config.json").read_text()),
        json.loads(said.read_text()),
    )
    values["text_config"] |= {
        key: value
        for key, value in settings.items()
        if key in ("num_beams", "no_repeat_ngram_size")
    }
    (tmp_path / "config.json").write_text(json.dumps(values))
    said.unlink()
    reference, images = florence_models.read(tmp_path), pictures()
    assert reference.generation_config.num_beams == 3
    (found,) = written_for(load(tmp_path), work_on(images, text_kind="caption", max_tokens=33))
    assert found == [
        florence_models.written(reference, tmp_path, each, "What does the image describe?", 33)
        for each in images
    ]


def test_bfloat16_is_as_near_as_transformers(tmp_path: Path) -> None:
    reference = florence_models.write(tmp_path)
    image = pictures()[0]
    sequence = load(tmp_path).prepare(work_on([image])).sequences[0]
    assert sequence.rows is not None
    states = {}
    for dtype in (torch.float32, torch.bfloat16):
        reader = load(tmp_path, dtype)._reader
        assert isinstance(reader, FlorenceReader)
        (states[dtype],) = reader._model.images.states([sequence.rows.values], never_yield)
    pixels = florence_models.processor(tmp_path)(Image.open(BytesIO(image)), return_tensors="pt")[
        "pixel_values"
    ]
    with torch.inference_mode():
        theirs = reference.bfloat16().get_image_features(pixels.bfloat16()).pooler_output[0]
    wanted = states[torch.float32]
    assert apart(states[torch.bfloat16], wanted) <= 3 * apart(theirs, wanted)


_POST: dict[Form, str] = {
    "lines": "ocr",
    "boxes": "description_with_bboxes",
    "phrases": "phrase_grounding",
    "proposals": "bboxes",
    "polygons": "polygons",
    "any": "description_with_bboxes_or_polygons",
}


@pytest.mark.parametrize("form", list(_POST))
def test_parsed_answers_equal_transformers(form: Form, tmp_path: Path) -> None:
    florence_models.write(tmp_path)
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(tmp_path / "tokenizer.json")
    )
    banned = {"phrase_grounding": {"banned_grounding_tokens": ["x", "two wörds"]}}
    post = Florence2PostProcessor({name: {} for name in _POST.values()} | banned, tokenizer)
    chance = random.Random(5)
    some = 0
    for _ in range(300):
        size = (chance.randint(1, 4000), chance.randint(1, 4000))
        text = _random_answer(chance, form)
        found = [
            _known(form, each)
            for each in post(text=text, image_size=size, parse_tasks=[_POST[form]])[_POST[form]]
        ]
        ours = parse_regions(text, form, *size, frozenset({"x", "two wörds"}))
        made = [
            (
                each.label,
                list(each.polygon)
                if each.polygon
                else [each.left, each.top, each.right, each.bottom],
            )
            for each in ours
        ]
        assert made == [one for each in found for one in each], text
        some += len(made)
    assert some > 100


def test_phrases_without_location_are_dropped(
    written: tuple[Any, Path, GenerativeModel], tmp_path: Path
) -> None:
    _, directory, model = written
    text = "".join(
        f"{phrase}<loc_1><loc_2><loc_30><loc_40>"
        for phrase in ("the image", "a lorry", "it", "xyz")
    )

    def labels(model: GenerativeModel) -> list[str]:
        reader = model._reader
        assert isinstance(reader, FlorenceReader)
        ids = np.array(reader.tokenizer.encode(text, add_special_tokens=False).ids, np.int32)
        work = work_on([pictures()[0]], instruction="<CAPTION_TO_PHRASE_GROUNDING> it")
        _, notes = reader.prepare(work, never_cancelled)
        return [
            region.label
            for region in reader.finish(work, notes, [GeneratedIds(ids, "stop")]).items[0].regions
        ]

    # Microsoft's layout has the words in code, transformers' in a file.
    is_microsoft = (
        "dim_embed" in json.loads((directory / "config.json").read_text())["vision_config"]
    )
    assert labels(model) == (
        ["a lorry", "xyz"] if is_microsoft else ["the image", "a lorry", "it", "xyz"]
    )
    shutil.copytree(directory, tmp_path / "banned")
    settings = {"post_processor_config": {"phrase_grounding": {"banned_grounding_tokens": ["xyz"]}}}
    (tmp_path / "banned" / "processor_config.json").write_text(json.dumps(settings))
    assert labels(load(tmp_path / "banned")) == (
        ["a lorry", "xyz"] if is_microsoft else ["the image", "a lorry", "it"]
    )


def test_texts_are_streamed_and_regions_are_not(
    written: tuple[Any, Path, GenerativeModel],
) -> None:
    _, _, model = written
    image = pictures()[0]
    plain = ["<CAPTION>", "<DETAILED_CAPTION>", "<MORE_DETAILED_CAPTION>", "<OCR>", "What?"]
    for instruction in plain:
        job = model.prepare(work_on([image, image], instruction=instruction))
        assert model.places(job) == [(0, 0), (1, 0)]
    for task in ("<OCR_WITH_REGION>", "<OD>", "<CAPTION_TO_PHRASE_GROUNDING> a lorry"):
        assert model.places(model.prepare(work_on([image], instruction=task))) == ()
    job = model.prepare(work_on([image], text_kind="ocr"))
    ((ids,),) = written_for(model, work_on([image], text_kind="ocr"))
    whole = run_work(model, work_on([image], text_kind="ocr")).items[0].text
    texts = [model.text(job, ids[:count]) for count in range(len(ids) + 1)]
    assert all(whole.startswith(text) for text in texts)
    assert len(set(texts)) > 8
    assert texts[-1] == whole


def test_location_tokens_are_not_streamed(written: tuple[Any, Path, GenerativeModel]) -> None:
    _, _, model = written
    reader = model._reader
    assert isinstance(reader, FlorenceReader)
    ids = reader.tokenizer.encode("a <pa b <pad> c </s", add_special_tokens=False).ids
    job = model.prepare(work_on(pictures()[:1], text_kind="ocr"))
    whole = model.text(job, [*ids, *reader.tokenizer.encode("> d", add_special_tokens=False).ids])
    assert all(whole.startswith(model.text(job, ids[:count])) for count in range(len(ids) + 1))


def _random_answer(chance: random.Random, form: Form) -> str:
    """Return an answer that is mostly well formed."""
    pieces = []
    is_outlined = form == "polygons" or (form == "any" and chance.random() < 0.7)
    for _ in range(chance.randint(0, 4)):
        if form not in ("proposals", "polygons"):
            pieces.append(chance.choice(["a lorry", " two wörds ", "a\nb", "x", "café 99"]))
        if not is_outlined:
            pieces.append(
                "".join(
                    f"<loc_{chance.randint(0, 999)}>"
                    for _ in range(chance.choice([3, 4, 4, 5, 8, 8, 8, 9]))
                )
            )
            continue
        rings = [
            "".join(f"<loc_{chance.randint(0, 999)}>" for _ in range(chance.randint(6, 11)))
            for _ in range(chance.randint(1, 3))
        ]
        whole = "<sep>".join(rings)
        pieces.append(f"<poly>{whole}</poly>" if form == "any" or chance.random() < 0.5 else whole)
    return (
        "".join(["<s>"] * chance.randint(0, 1) + pieces + ["</s>"])
        .replace("<s>", "")
        .replace("</s>", "")
    )


def _known(form: Form, instance: dict[str, Any]) -> list[tuple[str, list[float]]]:
    if form == "lines":
        return [(instance["text"], instance["quad_box"])]
    if "polygons" in instance:
        return [(instance["cat_name"], each) for each in instance["polygons"]]
    boxes = instance["bbox"] if form == "phrases" else [instance["bbox"]]
    return [
        (instance["cat_name"], [min(a, c), min(b, d), max(a, c), max(b, d)]) for a, b, c, d in boxes
    ]


def test_regions_are_found_by_label(written: tuple[Any, Path, GenerativeModel]) -> None:
    reference, directory, model = written
    image = pictures()[0]
    parts = {place: (Part(image, f"items[{place}].image"),) for place in range(2)}
    work = RegionsWork(["", ""], ("cat", "a red lorry"), parts=parts)
    (outputs,) = written_for(model, work)
    result = run_work(model, work)
    wanted = [
        florence_models.written(reference, directory, image, f"Locate {label} in the image.", 250)
        for label in ("cat", "a red lorry")
    ]
    assert [each[:40] for each in outputs] == [each[:40] for each in wanted * 2]
    assert [
        {region.label for region in item.regions} <= {"cat", "a red lorry"} for item in result.items
    ] == [True, True]
    assert result.output_tokens == sum(map(len, outputs))


def test_region_is_written_in_thousandths(written: tuple[Any, Path, GenerativeModel]) -> None:
    reference, directory, model = written
    image = pictures()[0]  # 36 x 36
    work = work_on([image], text_kind="ocr", region=(0.0, 9.0, 18.0, 36.0))
    prompt = "What text is in the region <loc_0><loc_250><loc_500><loc_999>?"
    (found,) = written_for(model, work)
    assert found == [florence_models.written(reference, directory, image, prompt, MAX_TOKENS)]


@pytest.mark.parametrize(
    ("settings", "field", "kind"),
    [
        ({"instruction": "<OD> a lorry"}, "text.instruction", InvalidInput),
        ({"instruction": "<REGION_TO_OCR>"}, "text.instruction", InvalidInput),
        ({"instruction": "<CAPTION_TO_PHRASE_GROUNDING>"}, "text.instruction", InvalidInput),
        (
            {"instruction": "<CAPTION_TO_PHRASE_GROUNDING>", "region": (0, 0, 9, 9)},
            "text.region",
            InvalidInput,
        ),
        ({"instruction": "What is it?", "region": (0, 0, 9, 9)}, "text.region", InvalidInput),
        ({"instruction": "<OD>", "region": (0, 0, 9, 9)}, "text.region", InvalidInput),
        ({"text_kind": "ocr", "region": (0, 0, 99, 9)}, "text.region", InvalidInput),
        ({"text_kind": "ocr_regions", "region": (0, 0, 9, 9)}, "text.region", InvalidInput),
        ({"instruction": "word " * 400}, "text.instruction", InputTooLong),
    ],
)
def test_unsupported_requests_are_refused(
    settings: dict[str, Any],
    field: str,
    kind: type[ShoalError],
    written: tuple[Any, Path, GenerativeModel],
) -> None:
    with pytest.raises(kind) as refused:
        written[2].prepare(work_on([pictures()[0]], **settings))
    assert refused.value.field == field


def test_items_are_single_images(written: tuple[Any, Path, GenerativeModel]) -> None:
    model, image = written[2], pictures()[0]
    with pytest.raises(TaskNotSupported, match="reads images, not texts") as refused:
        model.prepare(TextWork(["a text"]))
    assert refused.value.field == "items[0].text"
    two = (Part(image, "items[0].parts[0].image"), Part(image, "items[0].parts[1].image"))
    with pytest.raises(TaskNotSupported, match="one image per item"):
        model.prepare(TextWork([""], parts={0: two}))
    with pytest.raises(InvalidInput, match="format") as unread:
        model.prepare(work_on([b"no image"]))
    assert unread.value.field == "items[0].image"


def test_inconsistent_checkpoint_is_refused(tmp_path: Path) -> None:
    florence_models.write(tmp_path)
    config = (tmp_path / "config.json").read_text()
    (tmp_path / "config.json").write_text(
        config.replace('"max_position_embeddings": 8', '"max_position_embeddings": 1')
    )
    with pytest.raises(ModelBroken, match="positions a side"):
        load(tmp_path)
    (tmp_path / "config.json").write_text(config.replace('"window_size": 6', '"window_size": 1000'))
    with pytest.raises(ModelBroken, match="window_size"):
        load(tmp_path)
