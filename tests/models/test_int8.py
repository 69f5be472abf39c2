"""Accuracy of int8 models: refused below the bounds, loaded in another type if the CPU lacks int8,
and the bounds.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from libs.catalog.overrides import Overrides
from libs.errors import ModelBroken
from libs.kernels.linear import int8 as kernels
from libs.models import EncodeWork, PackedModel, ScoreWork, load_model
from libs.models.runtime.precision.agreement import agreement, cosine
from libs.models.text.registry import default_dtype
from tests.parity.checkpoints import SentenceFiles, write_checkpoint

CPU = torch.device("cpu")
INT8 = Overrides("here", dtype="int8")


def write_outliers(directory: Path) -> Path:
    """Return a model with one number a thousand times as large as all others, which has no
    weight.
    """
    write_checkpoint("bert", directory, sentence=SentenceFiles())
    file = directory / "model.safetensors"
    tensors = load_file(file)
    for name, tensor in tensors.items():
        if name.endswith("LayerNorm.weight"):
            tensor[0] = 0.0 if "layer.1.output" in name else 1000.0
        elif tensor.dim() == 2 and "embeddings" not in name:
            tensor[:, 0] = 0.0
            tensor *= 20
    save_file(tensors, file)
    return directory


def test_model_that_loses_too_much_is_refused(tmp_path: Path) -> None:
    directory = write_outliers(tmp_path)
    with pytest.raises(ModelBroken) as caught:
        load_model(directory, "org/name", CPU, torch.float32, INT8)
    for words in (
        "org/name loses too much in int8: encode: lowest cosine 0.",
        "at least 0.99",
        "`dtype: bfloat16`",
    ):
        assert words in caught.value.message
    assert load_model(directory, "org/name", CPU, torch.float32).data_type == "float32"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
def test_check_without_int8_names_the_type_that_is_used(
    tmp_path: Path,
    dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    directory = write_checkpoint("bert", tmp_path, sentence=SentenceFiles())
    monkeypatch.setattr(kernels, "_choice", lambda: "this CPU has nothing")
    own = str(default_dtype(CPU) if dtype is torch.int8 else dtype).removeprefix("torch.")
    with caplog.at_level(logging.WARNING):
        model = load_model(directory, "org/name", CPU, dtype, INT8)
    assert (model.data_type, model.card.dtype) == (own, "auto")
    assert (
        f"org/name was requested in int8 and is loaded in {own} instead: this CPU has nothing"
        in caplog.text
    )


def test_memory_is_about_a_quarter_of_float32s(tmp_path: Path) -> None:
    directory = write_checkpoint(
        "bert", tmp_path, hidden=256, vocabulary=3000, layers=3, sentence=SentenceFiles()
    )
    wide, half, small = (
        load_model(directory, "org/name", CPU, dtype)
        for dtype in (torch.float32, torch.bfloat16, torch.int8)
    )
    assert half.bytes < 0.51 * wide.bytes
    assert small.bytes < 0.3 * wide.bytes
    reserved = load_model(
        directory, "org/name", CPU, torch.int8, Overrides("here", memory_bytes=10 * wide.bytes)
    )
    assert reserved.bytes == 10 * wide.bytes
    parked = small.park()
    assert parked.host_bytes == small.bytes
    assert parked.resume() is small


def test_activations_are_measured_in_int8(tmp_path: Path) -> None:
    """Memory includes the rows that are quantised, its lower bound."""
    directory = write_checkpoint("bert", tmp_path, sentence=SentenceFiles())
    plain, small = (
        load_model(directory, "org/name", CPU, torch.float32, overrides)
        for overrides in (None, INT8)
    )
    assert 0.5 * plain.probe() < small.probe() < 3 * plain.probe()


def test_one_forward_makes_full_short_and_binary_answers(tmp_path: Path) -> None:
    """Dimensions and data types do not change the forward pass on the device."""
    model = load_model(
        write_checkpoint("bert", tmp_path, sentence=SentenceFiles()), "org/name", CPU, torch.int8
    )
    wishes: tuple[dict[str, Any], ...] = (
        {},
        {"dimensions": 16},
        {"data_type": "binary"},
        {"data_type": "int8", "dimensions": 8},
    )
    prepared = [model.prepare(EncodeWork(["A shoal of fish."], **wish)) for wish in wishes]
    assert {one.head for one in prepared} == {"dense"}
    assert all(
        np.array_equal(one.sequences[0].ids, prepared[0].sequences[0].ids) for one in prepared
    )
    outputs = model.forward("dense", [one.sequences[0] for one in prepared])
    results = [model.finish(one, [output]) for one, output in zip(prepared, outputs, strict=True)]
    assert [result.dense.shape for result in results] == [(1, 64), (1, 16), (1, 64), (1, 8)]  # type: ignore[union-attr]


class TestAgreement:
    @staticmethod
    def reranker(tmp_path: Path) -> PackedModel:
        directory = write_checkpoint(
            "bert", tmp_path, head="sequence_classification", labels=("LABEL_0",)
        )
        return load_model(directory, "org/name", CPU, torch.float32)

    def test_of_scores_it_is_a_difference_and_their_order(self, tmp_path: Path) -> None:
        model = self.reranker(tmp_path)
        prepared = model.prepare(ScoreWork("query", ["one", "two", "three"]))
        wanted = [np.array([value], np.float32) for value in (0.0, 1.0, 3.0)]
        same = agreement(model, prepared, wanted, wanted)
        assert (same.figure, same.is_good) == (
            "largest difference of a probability 0.0000, 3 of 3 pairs ranked alike",
            True,
        )
        other = agreement(model, prepared, [wanted[1], wanted[0], wanted[2]], wanted)
        assert (other.figure, other.is_good) == (
            "largest difference of a probability 0.2311, 2 of 3 pairs ranked alike",
            False,
        )

    def test_nan_is_not_good(self, tmp_path: Path) -> None:
        model = self.reranker(tmp_path)
        prepared = model.prepare(ScoreWork("query", ["one"]))
        bad, good = [np.array([np.nan], np.float32)], [np.array([1.0], np.float32)]
        assert not agreement(model, prepared, bad, good).is_good
        directory = write_checkpoint("bert", tmp_path / "dense", sentence=SentenceFiles())
        dense = load_model(directory, "org/name", CPU, torch.float32)
        of_text = dense.prepare(EncodeWork(["one"]))
        assert not agreement(dense, of_text, bad, good).is_good
        assert agreement(dense, of_text, good, good).is_good
        assert cosine(good[0], good[0]) == 1.0
