"""`shoal models check`: its report on a directory, on a refused one, and on a model with wrong
answers.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.generation.served import write
from tests.parity.checkpoints import SentenceFiles, write_checkpoint
from tests.readers import florence_models, page_models
from tests.worker.conftest import Check


def test_folder_of_models_is_refused_with_its_models(check: Check, embedder: Path) -> None:
    folder = embedder.parents[1]
    ran = check(folder, "--no-test")
    assert ran.code == 1
    assert f"name one, such as {embedder}" in " ".join(ran.out.split())
    assert check(embedder, "--no-test").code == 0


@pytest.mark.parametrize("name", ["qwen3", "llama", "bart", "t5"])
def test_generative_model_is_run(check: Check, tmp_path: Path, name: str) -> None:
    write(name, tmp_path, {"num_beams": 2} if name == "bart" else None)
    ran = check(tmp_path, "--json")
    [report] = ran.json()
    assert (ran.code, report["good"], report["refused"], report["skipped"]) == (0, True, "", "")
    assert [test["name"] for test in report["tests"]] == [
        "loads in float32",
        "generate: finite in float32",
        "generate: tokens",
        "generate: together as alone",
        "generate: same input, same answer",
        "generate: answer",
        "loads in bfloat16",
        "generate: finite in bfloat16",
    ]
    assert "tokens for 3 prompts" in check(tmp_path).out


def test_generative_model_with_nan_weights_fails(check: Check, tmp_path: Path) -> None:
    write("qwen3", tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    name = next(name for name in tensors if "norm" in name)
    save_file(tensors | {name: torch.full_like(tensors[name], float("nan"))}, file)
    ran = check(tmp_path, "--json")
    failed = {test["name"] for test in ran.json()[0]["tests"] if not test["passed"]}
    assert ran.code == 1
    assert {"generate: finite in float32", "generate: finite in bfloat16"} <= failed


@pytest.mark.parametrize("make", [florence_models.write, page_models.write_donut])
def test_image_reader_is_run(check: Check, tmp_path: Path, make: Callable[[Path], Any]) -> None:
    make(tmp_path)
    ran = check(tmp_path, "--json")
    [report] = ran.json()
    assert (ran.code, report["good"]) == (0, True), report
    assert "generate: together as alone" in [test["name"] for test in report["tests"]]


def test_command_on_a_good_model(check: Check, embedder: Path) -> None:
    ran = check(embedder)
    assert ran.code == 0, ran.out
    for words in (
        "org/embedder",
        "good",
        "max_seq_length = 32",
        "parameters",
        "encode: packed as alone",
    ):
        assert words in ran.out
    assert "FAILS" not in ran.out


def test_several_models_as_json(check: Check, embedder: Path, tmp_path: Path) -> None:
    broken = write_checkpoint("bert", tmp_path / "org" / "broken")
    (broken / "model.safetensors").unlink()
    (broken / "pytorch_model.bin").write_bytes(b"pickle")
    (broken / "modeling.py").write_text("raise SystemExit(1)")
    ran = check(embedder, broken, "--no-test", "--json")
    assert ran.code == 1
    good, bad = ran.json()
    assert (good["model"], good["good"], good["skipped"], good["card"]["dimensions"]) == (
        "org/embedder",
        True,
        "--no-test",
        16,
    )
    assert bad["good"] is False
    assert bad["refused"].startswith(
        "pytorch_model.bin: is neither a zip archive of torch.save nor"
    )


def test_refusal_reports_the_facts_read_so_far(check: Check, tmp_path: Path) -> None:
    directory = write_checkpoint("bert", tmp_path / "org" / "name")
    (directory / "modules.json").write_text(
        '[{"type": "sentence_transformers.models.WordWeights", "path": ""}]'
    )
    ran = check(directory, "--no-test")
    assert ran.code == 1
    assert "modules.json: `type`" in ran.out
    assert "no self-test: the model is refused" in ran.out


def test_loading_detects_a_missing_tensor(check: Check, embedder: Path) -> None:
    file = embedder / "model.safetensors"
    tensors = load_file(file)
    del tensors["encoder.layer.1.output.dense.bias"]
    save_file(tensors, file)
    assert check(embedder, "--no-test").code == 0
    ran = check(embedder, "--json")
    assert ran.code == 1
    assert (
        ran.json()[0]["refused"]
        == "model.safetensors: tensor 'encoder.layer.1.output.dense.bias' is missing"
    )


def test_loading_detects_an_unsupported_architecture(check: Check, embedder: Path) -> None:
    config = json.loads((embedder / "config.json").read_text()) | {"model_type": "mamba"}
    (embedder / "config.json").write_text(json.dumps(config))
    untried = check(embedder, "--no-test")
    assert (untried.code, "weights were not tested" in untried.out) == (0, True)
    (report,) = check(embedder, "--json").json()
    assert report["refused"].startswith("config.json: model_type is 'mamba': supported are ")


def test_id_is_looked_up_in_the_folders(
    check: Check, embedder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHOAL_MODELS", str(tmp_path))
    (report,) = check("org/embedder", "--no-test", "--json").json()
    assert (report["directory"], report["refused"]) == (str(embedder), "")
    (missing,) = check("org/missing", "--json").json()
    assert missing["refused"].startswith(
        "org/missing is in no folder of SHOAL_MODELS; give its directory, or set SHOAL_STORES=hf"
    )
    (neither,) = check("nonsense", "--json").json()
    assert (
        neither["refused"] == "nonsense is neither a directory nor a model id of the form org/name"
    )


def test_id_is_fetched_if_stores_are_set(
    check: Check, embedder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHOAL_STORES", f"file://{tmp_path}")
    monkeypatch.setenv("SHOAL_STORE_DIR", str(tmp_path / "store"))
    (report,) = check("org/embedder", "--no-test", "--json").json()
    assert (report["refused"], report["card"]["dimensions"]) == ("", 16)


def test_as_option_selects_the_card(check: Check, tmp_path: Path) -> None:
    directory = write_checkpoint("bert", tmp_path / "anything", sentence=SentenceFiles())
    (report,) = check(directory, "--as", "intfloat/e5-base-v2", "--no-test", "--json").json()
    assert report["card"]["prompts"] == {"query": "query: ", "passage": "passage: "}
    assert check(directory, "--as", "nonsense").code == 2


def test_broken_card_is_a_usage_error(
    check: Check, embedder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cards").mkdir()
    (tmp_path / "cards/mine.yaml").write_text("modle: org/name\n")
    monkeypatch.setenv("SHOAL_CATALOG", str(tmp_path / "cards"))
    ran = check(embedder)
    assert (ran.code, ran.out) == (2, "")
    assert "mine.yaml:1: the card has no key 'modle': did you mean 'model'?" in ran.err


def test_model_too_large_for_this_memory_is_not_loaded(
    check: Check, embedder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.worker.check.command._free_bytes", lambda: 1000)
    (report,) = check(embedder, "--json").json()
    assert report["good"]
    assert "of memory, 1000 B are free" in report["skipped"]
