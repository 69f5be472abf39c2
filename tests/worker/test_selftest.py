"""The self-test of a model: outputs alone and in a batch, widths, finite numbers, int8."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from libs.catalog.cards import read_catalog
from libs.kernels.linear import int8
from libs.models import Head, Output, PackedModel, load_model
from libs.models.interface.sequences import InputSequence
from services.worker.check import selftest
from services.worker.check.explain import inspect
from tests.models.test_int8 import write_outliers
from tests.parity.checkpoints import write_checkpoint
from tests.parity.glirel_models import make_reference as make_glirel
from tests.parity.image_models import write_checkpoint as write_image_model
from tests.parity.image_repositories import write_repository
from tests.parity.v_splade_models import v_splade
from tests.worker.conftest import Check
from tests.worker.test_explain import LABELS, why


@pytest.mark.parametrize(
    ("kind", "head", "labels", "tasks"),
    [
        ("bert", "base", ("LABEL_0",), {"encode", "score", "classify"}),
        ("roberta", "sequence_classification", ("LABEL_0",), {"score"}),
        ("distilbert", "sequence_classification", ("bad", "good"), {"score", "classify"}),
        ("mpnet", "token_classification", LABELS, {"entities"}),
    ],
)
def test_sound_models_pass(
    tmp_path: Path, kind: str, head: Any, labels: Sequence[str], tasks: set[str]
) -> None:
    directory = write_checkpoint(kind, tmp_path, head=head, labels=labels)
    tests = list(selftest.run(directory, "org/name", None))
    assert [test for test in tests if not test.passed and "bfloat16" not in test.name] == []
    assert {test.name.partition(":")[0] for test in tests[1:]} == tasks
    names = {test.name.partition(": ")[2] for test in tests[1:]}
    assert names == {
        "finite",
        "packed as alone",
        "same text, same answer",
        "answer",
        "bfloat16 near float32",
        "int8 near float32",
    }


@pytest.mark.filterwarnings("ignore")  # glirel's dependencies warn of much
@pytest.mark.parametrize("family", ["clip", "siglip"])
def test_image_model_passes(tmp_path: Path, family: Literal["clip", "siglip"]) -> None:
    """Texts and images of one job, and models with images only."""
    write_repository(family, tmp_path / "both")
    write_image_model("dinov2", tmp_path / "alone")
    for name, inputs in (("both", "text, image"), ("alone", "image")):
        report = inspect(tmp_path / name, f"tests/{name}", None)
        assert why(report)["inputs"] == (
            inputs,
            (f'config.json model_type = "{family if name == "both" else "dinov2"}"',),
        )
        tests = list(selftest.run(tmp_path / name, f"tests/{name}", None))
        assert [test for test in tests if not test.passed and "bfloat16" not in test.name] == []
        assert {test.name.split(":")[0] for test in tests} >= {"encode", "score"}
        assert "encode: same text, same answer" in {test.name for test in tests}


@pytest.mark.filterwarnings("ignore")  # transformers deprecation warnings
def test_model_with_text_queries_only_passes(tmp_path: Path) -> None:
    """V-SPLADE: its texts need no forward pass, and cannot be documents of a score."""
    v_splade().save(tmp_path)
    assert why(inspect(tmp_path, "tests/v-splade", None))["inputs"][0] == "text, image"
    tests = list(selftest.run(tmp_path, "tests/v-splade", None))
    assert [test for test in tests if not test.passed and "bfloat16" not in test.name] == []
    assert {"encode: answer", "score: answer", "encode: same text, same answer"} <= {
        test.name for test in tests
    }


def test_model_with_entities_as_input_passes(tmp_path: Path) -> None:
    tests = list(selftest.run(make_glirel(tmp_path, {}).directory, "org/name", None))
    assert [test for test in tests if not test.passed and "bfloat16" not in test.name] == []
    assert "relations: answer" in {test.name for test in tests}


def test_nan_weights_fail(embedder: Path) -> None:
    file = embedder / "model.safetensors"
    tensors = load_file(file)
    tensors["encoder.layer.0.output.dense.bias"][0] = float("nan")
    save_file(tensors, file)
    failed = {test.name for test in selftest.run(embedder, "org/name", None) if not test.passed}
    assert {"encode: finite", "encode: packed as alone"} <= failed
    # Outputs with NaN have no answer to check.
    assert "encode: answer" not in failed


def test_model_that_depends_on_its_batch_fails(
    embedder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sound = PackedModel.forward

    def leaking(model: PackedModel, head: Head, sequences: Sequence[InputSequence]) -> list[Output]:
        """Simulate visible padding or neighbours: answers depend on the size and order of the
        batch.
        """
        found = sound(model, head, sequences)
        return [
            np.asarray(output, np.float32) + np.float32(0.01 * number)
            for number, output in enumerate(found)
        ]

    monkeypatch.setattr(PackedModel, "forward", leaking)
    failed = {test.name for test in selftest.run(embedder, "org/name", None) if not test.passed}
    assert {"encode: packed as alone", "encode: same text, same answer"} <= failed
    assert "encode: finite" not in failed


def test_wrong_width_fails(embedder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sound = load_model

    def lying(*arguments: Any) -> PackedModel:
        model = sound(*arguments)
        model.card = replace(model.card, dimensions=17)
        return model

    monkeypatch.setattr(selftest, "load_model", lying)
    failed = {
        test.name: test.detail
        for test in selftest.run(embedder, "org/name", None)
        if not test.passed
    }
    assert failed["encode: answer"] == "dense vectors have shape (4, 16), not (4, 17)"


def test_int8_loss_is_reported(embedder: Path) -> None:
    found = {test.name: test for test in selftest.run(embedder, "org/embedder", None)}
    reported = found["encode: int8 near float32"]
    assert reported.passed
    assert 0.99 <= float(reported.detail.removeprefix("lowest cosine ")) < 1


def test_large_int8_loss_fails_if_the_card_selects_int8(
    check: Check, tmp_path: Path, monkeypatch: Any
) -> None:
    directory = write_outliers(tmp_path / "org" / "lossy")
    monkeypatch.setattr(selftest, "BFLOAT16_COSINE", 0.0)  # it also loses quality in bfloat16
    (report,) = check(directory, "--json").json()
    (reported,) = (test for test in report["tests"] if "int8" in test["name"])
    assert (
        reported["passed"],
        "loses too much in int8: encode: lowest cosine 0." in reported["detail"],
    ) == (True, True)
    assert report["good"]
    (tmp_path / "cards").mkdir()
    (tmp_path / "cards/mine.yaml").write_text("model: org/lossy\ndtype: int8\n")
    monkeypatch.setenv("SHOAL_CATALOG", str(tmp_path / "cards"))
    ran = check(directory, "--json")
    assert (ran.code, [test["name"] for test in ran.json()[0]["tests"] if not test["passed"]]) == (
        1,
        ["loads in int8"],
    )
    monkeypatch.delenv("SHOAL_CATALOG")
    monkeypatch.setenv("SHOAL_DTYPE", "int8")
    assert check(directory).code == 1, "a worker with these settings would load it so"


def test_missing_int8_support_is_reported(embedder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(int8, "_choice", lambda: "this CPU has nothing")
    (reported,) = (
        test for test in selftest.run(embedder, "org/embedder", None) if "int8" in test.name
    )
    assert (reported.passed, reported.detail) == (True, "not available: this CPU has nothing")


def test_card_dtype_is_used(embedder: Path, tmp_path: Path) -> None:
    (tmp_path / "cards").mkdir()
    (tmp_path / "cards/mine.yaml").write_text(
        "model: org/embedder\ndtype: bfloat16\nmemory_bytes: 123456789\n"
    )
    overrides = read_catalog([tmp_path / "cards"]).overrides("org/embedder")
    whole = load_model(embedder, "org/embedder", torch.device("cpu"), torch.float32)
    half = load_model(embedder, "org/embedder", torch.device("cpu"), torch.float32, overrides)
    assert half.bytes == 123_456_789 > whole.bytes
    assert half.card.dtype == "bfloat16"
    assert {
        test.detail.partition(" bytes")[0]
        for test in selftest.run(embedder, "org/embedder", overrides)
        if "loads" in test.name
    } == {"123,456,789"}
