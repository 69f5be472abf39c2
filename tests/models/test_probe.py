"""Activation memory of a batch's token on the device."""

from __future__ import annotations

import sys
from dataclasses import replace
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from libs.models import EncodeWork, PackedModel, Part, load_model
from libs.models.runtime.loaded.probe import LiveBytes
from libs.models.runtime.loaded.tiers import find_tensors
from tests.parity.checkpoints import SentenceFiles, write_checkpoint
from tests.parity.image_repositories import Family, write_repository
from tests.parity.recipes import RECIPES
from tests.parity.vlm_models import small


def test_peak_counts_tensors_that_live_at_one_time() -> None:
    before = torch.zeros(1000)
    with LiveBytes([before]) as live:
        first = before + 1  # 4,000
        second = first * 2  # 8,000
        del first
        view = second.view(10, 100)
        third = view + before.view(10, 100)  # 8,000
        del second, view, third
        torch.zeros(1500)  # 6,000
    assert live.peak == 8000


def test_existing_tensors_are_not_counted() -> None:
    weight = torch.zeros(100, 100)
    with LiveBytes([weight]) as live:
        assert weight.T.reshape(-1)[:10].view(10).sum() == 0
        weight.add_(1)
    assert live.peak <= weight.nbytes + 8, "only the copy that reshape makes"


@pytest.mark.parametrize("kind", RECIPES)
def test_every_family_can_be_probed(tmp_path: Path, kind: str) -> None:
    """Its states alone are of the hidden size, in and out of a feed-forward of twice that."""
    model = load_model(
        write_checkpoint(kind, tmp_path, sentence=SentenceFiles()),
        "test/model",
        torch.device("cpu"),
        torch.float32,
    )
    taken = model.probe()
    assert 2 * 64 * 4 <= taken <= 100 * 64 * 4
    assert model.probe() == taken


def test_wider_models_take_more(tmp_path: Path) -> None:
    models = [
        load_model(
            write_checkpoint("bert", tmp_path / str(hidden), hidden=hidden),
            "test/model",
            torch.device("cpu"),
            torch.float32,
        )
        for hidden in (64, 256)
    ]
    narrow, wide = (model.probe() for model in models)
    assert 2.5 < wide / narrow < 4.5


def test_short_positions_and_a_small_vocabulary(tmp_path: Path) -> None:
    directory = write_checkpoint(
        "bert", tmp_path, positions=8, vocabulary=30, head="sequence_classification"
    )
    assert load_model(directory, "test/model", torch.device("cpu"), torch.float32).probe() > 0


def test_probe_does_not_import_the_compiler(embedder: PackedModel) -> None:
    had = "torch._dynamo" in sys.modules
    embedder.probe()
    assert had == ("torch._dynamo" in sys.modules)


def test_model_of_texts_needs_nothing_for_images(embedder: PackedModel) -> None:
    assert embedder.image_bytes(2048) == 0


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["colpali", "idefics3", "qwen2_5_vl"])
def test_memory_of_a_batch_of_pages(tmp_path: Path, kind: str) -> None:
    """The estimate for an image far larger than the sample, including its tower, is an upper bound
    within a factor of four.
    """
    small(kind).save(tmp_path)
    model = load_model(tmp_path, "test/model", torch.device("cpu"), torch.float32)
    pixels = np.random.default_rng(0).integers(0, 256, (900, 700, 3), np.uint8)
    out = BytesIO()
    Image.fromarray(pixels).save(out, "PNG")
    prepared = model.prepare(
        EncodeWork(
            [""] * 3, parts={i: (Part(out.getvalue(), f"items[{i}].image"),) for i in range(3)}
        )
    )
    with LiveBytes(find_tensors(*model.modules())) as live:
        model.forward_all(prepared)
    model.card = replace(model.card, images=replace(model.card.images, max_tokens=1))  # type: ignore[type-var]
    model.max_tower_tokens = 1
    reserved = model.image_bytes(prepared.tokens)
    assert reserved / 6 <= live.peak <= 1.25 * reserved
    model.max_tower_tokens = 100_000
    assert model.image_bytes(prepared.tokens) > reserved, "of one picture that is larger"


@pytest.mark.parametrize("family", ["clip", "siglip"])
def test_memory_of_a_batch_of_images(tmp_path: Path, family: Family) -> None:
    model = load_model(
        write_repository(family, tmp_path).directory,
        "test/model",
        torch.device("cpu"),
        torch.float32,
    )
    few, many = model.image_bytes(1000), model.image_bytes(4000)
    assert 3.9 * few <= many <= 4.1 * few
    assert few >= 1000 * 40 * 4, "at least a state of each token"
