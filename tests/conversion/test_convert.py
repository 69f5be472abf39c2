"""Torch checkpoints become safetensors files with the same tensors, in little memory, whole or not
at all.
"""

from __future__ import annotations

import json
import mmap
import os
import subprocess
import sys
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from libs.conversion import ConversionStep, convert, plan_steps, process, read_record
from libs.conversion import tensors as torch_files
from libs.conversion.convert import RECORD, file_sha256
from libs.conversion.writing import ConversionReport
from libs.errors import ModelBroken, NoCapacity
from tests.conversion.watching import watch_children

SOURCE, OUTPUT = "pytorch_model.bin", "model.safetensors"
MAX_BYTES = 256 << 20
"""Maximum memory of the conversion (RssAnon), in addition to the largest tensor."""

LARGE_BYTES = 320 << 20


def ignore(file: str, done: int, total: int) -> None:
    return


def converted(directory: Path, value: object, *, legacy: bool = False) -> dict[str, torch.Tensor]:
    torch.save(value, directory / SOURCE, _use_new_zipfile_serialization=not legacy)
    convert(directory, directory, plan_steps([SOURCE]), ignore)
    return load_file(directory / OUTPUT)


def converted_here(
    directory: Path, value: object
) -> tuple[dict[str, torch.Tensor], ConversionReport]:
    """Convert in this process: the child, which others test, takes seconds to start."""
    torch.save(value, directory / SOURCE)
    with (
        (directory / SOURCE).open("rb") as source,
        mmap.mmap(source.fileno(), 0, access=mmap.ACCESS_COPY) as mapping,
        (directory / OUTPUT).open("wb", buffering=0) as output,
    ):
        report = torch_files.convert(source, mapping, output, lambda done, total: None)
    return load_file(directory / OUTPUT), report


def tensors() -> dict[str, torch.Tensor]:
    """Every type that is served, and every form that a view may have."""
    base = torch.randn(40, 30, generator=torch.Generator().manual_seed(0))
    made = {
        "whole": base,
        "transposed": base.t(),
        "slice": base[10:20, 5:7],
        "every_second": base[::2],
        "repeated": torch.ones(1, 3).expand(4, 3),
        "permuted": torch.arange(60.0).view(3, 4, 5).permute(2, 0, 1),
        "number": torch.tensor(3),
        "empty": torch.zeros(0, 4),
        "parameter": torch.nn.Parameter(torch.full((3,), 0.5)),
    }
    for dtype in (
        torch.float64,
        torch.float16,
        torch.bfloat16,
        torch.int64,
        torch.int32,
        torch.int16,
        torch.int8,
        torch.uint8,
    ):
        made[str(dtype)] = torch.arange(7).to(dtype)
    return made | {
        "bool": torch.tensor([True, False, True]),
        "odd.t": torch.arange(15, dtype=torch.uint8)[1:].view(2, 7).t(),
    }


def assert_same(found: Mapping[str, torch.Tensor], wanted: Mapping[str, torch.Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name], tensor.detach()), name


@pytest.mark.parametrize("legacy", [False, True], ids=["zip", "stacked pickles"])
def test_every_type_and_view_is_converted_to_the_same_numbers(legacy: bool, tmp_path: Path) -> None:
    assert_same(converted(tmp_path, tensors(), legacy=legacy), tensors())


@pytest.mark.parametrize(
    "wrap",
    [
        lambda state: OrderedDict(state),
        lambda state: {"state_dict": state, "epoch": 3, "optimizer_state_dict": {"lr": 1.0}},
        lambda state: {"model": state},
        lambda state: {"model_state_dict": state, "scheduler": {"last": [1]}},
        lambda state: {"pruning_head": state},
        lambda state: {f"module.{name}": tensor for name, tensor in state.items()},
        lambda state: {
            "state_dict": {f"_orig_mod.{name}": tensor for name, tensor in state.items()}
        },
        lambda state: {name: torch.nn.Parameter(tensor) for name, tensor in state.items()},
        lambda state: {**state, "version": 2},
    ],
    ids=[
        "ordered",
        "state_dict",
        "model",
        "model_state_dict",
        "one_entry",
        "module.",
        "_orig_mod.",
        "parameters",
        "numbers",
    ],
)
def test_wrappers_and_prefixes_of_trainers_are_taken_off(wrap: object, tmp_path: Path) -> None:
    state = {"a.weight": torch.randn(3, 4), "a.bias": torch.randn(3)}
    assert callable(wrap)
    found, _ = converted_here(tmp_path, wrap(state))
    assert_same(found, state)


def test_state_dict_of_a_module_with_its_metadata_is_converted(tmp_path: Path) -> None:
    module = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.LayerNorm(4))
    found, _ = converted_here(tmp_path, module.state_dict())
    assert_same(found, module.state_dict())


@pytest.mark.parametrize(
    ("names", "kept"),
    [
        (("lm_head.weight", "model.embed_tokens.weight"), "model.embed_tokens.weight"),
        (
            ("cls.predictions.decoder.weight", "bert.embeddings.word_embeddings.weight"),
            "bert.embeddings.word_embeddings.weight",
        ),
        (
            (
                "decoder.embed_tokens.weight",
                "encoder.embed_tokens.weight",
                "lm_head.weight",
                "shared.weight",
            ),
            "shared.weight",
        ),
    ],
)
def test_of_tied_tensors_the_embedding_is_written_once(
    names: tuple[str, ...], kept: str, tmp_path: Path
) -> None:
    weight = torch.randn(5, 4)
    found, report = converted_here(tmp_path, dict.fromkeys(names, weight))
    assert list(found) == [kept]
    assert report.tied == {name: kept for name in names if name != kept}


def test_record_names_sources_digests_and_the_converter(tmp_path: Path) -> None:
    weight = torch.zeros(3)
    converted(tmp_path, {"lm_head.weight": weight, "embed_tokens.weight": weight, "epoch": 4})
    (record,) = read_record(tmp_path)
    assert record.tied == {"lm_head.weight": "embed_tokens.weight"}
    assert (record.source, record.output, record.tensors, record.left_out) == (
        SOURCE,
        OUTPUT,
        1,
        ["epoch"],
    )
    assert record.source_sha256 == file_sha256(tmp_path / SOURCE)
    assert record.output_sha256 == file_sha256(tmp_path / OUTPUT)
    assert record.converter == f"shoal 1, torch {torch.__version__}"
    with safe_open(tmp_path / OUTPUT, "pt") as opened:
        assert opened.metadata() == {"format": "pt"}


def test_shards_are_converted_with_an_index_of_their_tensors(tmp_path: Path) -> None:
    names = [f"pytorch_model-{number:05}-of-00002.bin" for number in (1, 2)]
    for number, name in enumerate(names):
        torch.save({f"layer.{number}": torch.full((2, 2), number)}, tmp_path / name)
    convert(tmp_path, tmp_path, plan_steps(names), ignore)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["weight_map"] == {
        "layer.0": "model-00001-of-00002.safetensors",
        "layer.1": "model-00002-of-00002.safetensors",
    }
    torch.save({"layer.0": torch.zeros(2)}, tmp_path / names[1])
    (tmp_path / RECORD).unlink()
    with pytest.raises(ModelBroken, match=r"'layer\.0', which is in another shard too"):
        convert(tmp_path, tmp_path, plan_steps(names), ignore)


def test_conversion_continues_with_the_next_file(tmp_path: Path) -> None:
    for name in ("sparse_linear.pt", "colbert_linear.pt"):
        torch.save({"weight": torch.ones(1, 2)}, tmp_path / name)
    seen: list[str] = []
    convert(tmp_path, tmp_path, plan_steps(["colbert_linear.pt"]), ignore)
    convert(
        tmp_path,
        tmp_path,
        plan_steps(["colbert_linear.pt", "sparse_linear.pt"]),
        lambda file, done, total: seen.append(file),
    )
    assert set(seen) == {"sparse_linear.pt"}
    assert {one.output for one in read_record(tmp_path)} == {
        "colbert_linear.safetensors",
        "sparse_linear.safetensors",
    }


def test_result_that_the_disk_changed_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.save({"w": torch.ones(1000)}, tmp_path / SOURCE)
    run = process.run

    def flip(*arguments: object) -> Mapping[str, object]:
        report = run(*arguments)  # type: ignore[arg-type]
        with next(tmp_path.glob("*.part")).open("r+b") as file:
            file.seek(-5, os.SEEK_END)
            file.write(b"\x01")
        return report

    monkeypatch.setattr(sys.modules[read_record.__module__], "run", flip)
    with pytest.raises(
        ModelBroken, match=r"pytorch_model\.bin: its conversion was not written as it was computed"
    ):
        convert(tmp_path, tmp_path, plan_steps([SOURCE]), ignore)
    assert not (tmp_path / OUTPUT).exists()


def test_child_that_the_system_ends_is_tried_again_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.save({"w": torch.ones(1000)}, tmp_path / SOURCE)
    start = subprocess.Popen

    def killed(*arguments: object, **options: object) -> object:
        child = start(*arguments, **options)  # type: ignore[call-overload]
        child.kill()
        return child

    monkeypatch.setattr(subprocess, "Popen", killed)
    with pytest.raises(
        NoCapacity, match=r"pytorch_model\.bin: its conversion was ended by the system"
    ):
        convert(tmp_path, tmp_path, plan_steps([SOURCE]), ignore)
    monkeypatch.setattr(subprocess, "Popen", start)
    convert(tmp_path, tmp_path, plan_steps([SOURCE]), ignore)


def test_child_does_not_inherit_our_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "secret")
    torch.save({"w": torch.ones(1000)}, tmp_path / SOURCE)
    seen: list[bytes] = []
    start = subprocess.Popen

    def watched(*arguments: object, **options: object) -> object:
        child = start(*arguments, **options)  # type: ignore[call-overload]
        seen.append(Path(f"/proc/{child.pid}/environ").read_bytes())
        assert os.getsid(child.pid) == child.pid
        return child

    monkeypatch.setattr(subprocess, "Popen", watched)
    convert(tmp_path, tmp_path, plan_steps([SOURCE]), ignore)
    assert b"secret" not in seen[0]
    assert b"HOME" not in seen[0]


@pytest.mark.parametrize("form", ["zip", "stacked pickles", "transposed"])
def test_conversion_holds_little_memory_whatever_the_file_has(
    form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bounds are the largest tensor and 256 MiB; the measured memory is printed."""
    large = torch.zeros(LARGE_BYTES // 4 // 1024, 1024)
    state = {"large": large.t() if form == "transposed" else large, "small": torch.ones(10, 10)}
    torch.save(state, tmp_path / SOURCE, _use_new_zipfile_serialization=form != "stacked pickles")
    del large, state
    watches = watch_children(monkeypatch)
    convert(tmp_path, tmp_path, [ConversionStep("torch", SOURCE, OUTPUT)], ignore)
    watches[0].thread.join()
    print(
        f"{form}: RssAnon {watches[0].anonymous >> 20} MiB, VmHWM {watches[0].resident >> 20} "
        f"MiB of {LARGE_BYTES >> 20} MiB"
    )
    assert watches[0].anonymous < MAX_BYTES
    assert watches[0].resident < LARGE_BYTES + (512 << 20)
