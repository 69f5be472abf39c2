"""CLIP and SigLIP as served models: texts and images of one job, against transformers; and models
of images alone.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from libs.catalog.overrides import Overrides
from libs.errors import InputTooLong, InvalidInput, ModelBroken, TaskNotSupported
from libs.kinds.images.card import IMAGES_ALONE, TEXTS_AND_IMAGES
from libs.models import (
    ClassifyWork,
    EncodeResult,
    EncodeWork,
    ExtractResult,
    PackedModel,
    Part,
    ScoreResult,
    ScoreWork,
    load_model,
)
from libs.models.images.loading import model_types
from tests.parity.image_models import pictures, write_checkpoint
from tests.parity.image_repositories import LONG, TEXTS, Family, Reference, write_repository

CPU = torch.device("cpu")
FILES = pictures()
Loaded = tuple[PackedModel, Reference]


@pytest.fixture(scope="module", params=["clip", "siglip", "openclip"])
def loaded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Loaded:
    family: Family = request.param
    reference = write_repository(family, tmp_path_factory.mktemp(family))
    return load_model(reference.directory, f"tests/{family}", CPU, torch.float32), reference


def image(number: int, index: int, name: str = "items") -> tuple[Part, ...]:
    return (Part(FILES[number], f"{name}[{index}].image"),)


def close(ours: object, theirs: object) -> bool:
    ours, theirs = np.asarray(ours), np.asarray(theirs)
    return bool(np.abs(ours - theirs).max() <= 1e-5 * np.abs(theirs).max())


def test_catalog_knows_every_family() -> None:
    assert sorted((*TEXTS_AND_IMAGES, *IMAGES_ALONE)) == sorted(model_types())


def test_texts_and_images_of_one_job(loaded: Loaded) -> None:
    """Results are in the order of items, each with the vector of its encoder; image tokens are
    counted separately.
    """
    model, theirs = loaded
    work = EncodeWork(
        ["", TEXTS[0], "", TEXTS[2], TEXTS[3]], parts={0: image(1, 0), 2: image(4, 2)}
    )
    prepared = model.prepare(work)
    result = model.finish(prepared, model.forward_all(prepared))
    assert isinstance(result, EncodeResult)
    assert result.dense is not None
    texts, images = (
        theirs.texts([TEXTS[0], TEXTS[2], TEXTS[3]]),
        theirs.images([FILES[1], FILES[4]]),
    )
    assert close(result.dense.values[[1, 3, 4]], texts)
    assert close(result.dense.values[[0, 2]], images)
    assert prepared.image_tokens == 2 * (16 + (theirs.family == "clip"))
    assert prepared.image_tokens < prepared.tokens
    assert isinstance(prepared.work, EncodeWork)
    assert not prepared.work.parts, "the files' bytes are not held until the answer"


def test_scores(loaded: Loaded) -> None:
    """A text to images and texts, and an image to images."""
    model, theirs = loaded
    for query in (TEXTS[1], ""):
        parts = () if query else (Part(FILES[0], "query.image"),)
        work = ScoreWork(
            query,
            ["", TEXTS[0], ""],
            query_parts=parts,
            parts={0: image(1, 0, "documents"), 2: image(3, 2)},
        )
        prepared = model.prepare(work)
        result = model.finish(prepared, model.forward_all(prepared))
        assert isinstance(result, ScoreResult)
        first = theirs.texts([query]) if query else theirs.images([FILES[0]])
        rows = np.concatenate(
            [theirs.images([FILES[1]]), theirs.texts([TEXTS[0]]), theirs.images([FILES[3]])]
        )
        wanted = rows @ first[0] / np.linalg.norm(rows, axis=-1) / np.linalg.norm(first)
        assert close(result.scores, wanted)


@pytest.mark.parametrize("multi", [None, True, False])
def test_labels_of_images(loaded: Loaded, multi: bool | None) -> None:
    """CLIP compares labels with each other, SigLIP scores each alone, unless the request says
    otherwise.
    """
    model, theirs = loaded
    labels = ["cat", "dog", "two fishes"]
    work = ClassifyWork(
        ["", ""],
        labels=tuple(labels),
        multi_label=multi,
        parts={0: image(0, 0), 1: image(1, 1)},
        hypothesis="a {}",
    )
    prepared = model.prepare(work)
    result = model.finish(prepared, model.forward_all(prepared))
    assert isinstance(result, ExtractResult)
    alone = theirs.family != "clip" if multi is None else multi
    wanted = theirs.labels(FILES[:2], [f"a {label}" for label in labels], alone=alone)
    for item, row in zip(result.items, wanted, strict=True):
        found = {one.label: one.score for one in item.labels}
        assert close([found[label] for label in labels], row)


def test_unsupported_work_is_refused(loaded: Loaded) -> None:
    model, _ = loaded
    both = (Part("text", "items[1].parts[0].text"), Part(FILES[0], "items[1].parts[1].image"))
    cases: list[tuple[EncodeWork, type[Exception], str]] = [
        (EncodeWork(["a", ""], parts={1: both}), TaskNotSupported, "items[1].parts[1]"),
        (
            EncodeWork(["a", ""], parts={1: (Part(b"none", "items[1].image"),)}),
            InvalidInput,
            "items[1].image",
        ),
        (EncodeWork(["a", LONG], truncation="none"), InputTooLong, "items[1].text"),
    ]
    for work, error, field in cases:
        with pytest.raises(error) as caught:
            model.prepare(work)
        assert getattr(caught.value, "field") == field  # noqa: B009


def test_model_of_images_alone(tmp_path: Path) -> None:
    """It takes no texts and no labels; its card says how its images become tokens."""
    write_checkpoint("dinov2", tmp_path)
    model = load_model(tmp_path, "tests/dinov2", CPU, torch.float32)
    assert model.card.inputs == ("image",)
    assert model.card.tasks == ("encode", "score")
    assert model.card.images is not None
    assert (
        model.card.images.short_side,
        model.card.images.patch,
        model.card.images.extra_tokens,
    ) == (40, 7, 1)
    with pytest.raises(TaskNotSupported, match="reads images, not texts") as caught:
        model.prepare(EncodeWork(["a"]))
    assert caught.value.field == "items[0].text"
    with pytest.raises(TaskNotSupported):
        model.prepare(ClassifyWork(["a"], labels=("b",)))


def test_model_of_texts_takes_no_images(embedder: PackedModel) -> None:
    with pytest.raises(TaskNotSupported, match="reads texts, not images") as caught:
        embedder.prepare(EncodeWork(["a", ""], parts={1: image(0, 1)}))
    assert caught.value.field == "items[1].image"


def test_adapters_and_int8_are_not_for_images(
    loaded: Loaded, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model, theirs = loaded
    with pytest.raises(ModelBroken):
        model.add_adapter("tests/adapter", tmp_path)
    small = load_model(
        theirs.directory, "tests/int8", CPU, torch.int8, Overrides("here", dtype="int8")
    )
    assert small.data_type in ("float32", "bfloat16")
    assert "was requested in int8, which only text encoders support" in caplog.text


ALONE = (
    "clip-projected",
    "clip-vision",
    "dinov2-registers",
    "dinov3",
    "siglip-vision",
    "siglip2-vision",
    "vit",
)


@pytest.mark.parametrize("kind", ALONE)
def test_models_of_images_alone(kind: str, tmp_path: Path) -> None:
    """Their cards say how long a vector is, and a router's price for an image is that of the
    worker.
    """
    write_checkpoint(kind, tmp_path)
    model = load_model(tmp_path, f"tests/{kind}", CPU, torch.float32)
    prepared = model.prepare(EncodeWork(["", ""], parts={0: image(1, 0), 1: image(6, 1)}))
    result = model.finish(prepared, model.forward_all(prepared))
    assert isinstance(result, EncodeResult)
    assert result.dense is not None
    assert result.dense.values.shape == (2, model.card.dimensions)
    assert model.card.inputs == ("image",)
    assert model.card.images is not None
    assert all(sequence.tokens <= model.card.images.max_tokens for sequence in prepared.sequences)
