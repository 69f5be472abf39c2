"""`shoal models convert`, and `shoal models check` of a directory with torch checkpoints."""

from __future__ import annotations

import os
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from shoal.cli import main, plugins
from typer.testing import CliRunner

from tests.conversion.hostile import MARKER, calling
from tests.parity.checkpoints import SentenceFiles, write_checkpoint

COMMANDS = (
    EntryPoint("models.check", "services.worker.check.command:check", plugins.GROUP),
    EntryPoint("models.convert", "services.worker.check.convert:convert", plugins.GROUP),
)


@pytest.fixture(autouse=True)
def commands(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(plugins, "entry_points", lambda group: COMMANDS)
    monkeypatch.setenv("SHOAL_STORE_DIR", str(tmp_path / "store"))
    monkeypatch.setenv("COLUMNS", "300")
    for name in ("SHOAL_MODELS", "SHOAL_STORES", "SHOAL_CATALOG"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def pickled(tmp_path: Path) -> Path:
    directory = write_checkpoint("bert", tmp_path / "org" / "pickled", sentence=SentenceFiles())
    tensors = load_file(directory / "model.safetensors")
    name = next(iter(tensors))
    torch.save(
        {**tensors, f"lm_head.{name}": tensors[name], "epoch": 3}, directory / "pytorch_model.bin"
    )
    (directory / "model.safetensors").rename(tmp_path / "model.safetensors")
    return directory


def run(*arguments: str | Path) -> tuple[int, str]:
    result = CliRunner().invoke(main.build(), ["models", *map(str, arguments)])
    return result.exit_code, result.stdout + result.stderr


def test_convert_writes_safetensors_and_reports_its_work(pickled: Path, tmp_path: Path) -> None:
    code, said = run("convert", pickled)
    assert code == 0, said
    made = pickled.with_name("pickled-safetensors")
    for words in (
        "pytorch_model.bin to model.safetensors",
        "written once",
        "epoch: skipped",
        f"written: {made}",
    ):
        assert words in said
    found, wanted = load_file(made / "model.safetensors"), load_file(tmp_path / "model.safetensors")
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    assert (made / "tokenizer.json").read_bytes() == (pickled / "tokenizer.json").read_bytes()
    assert not (made / "pytorch_model.bin").exists()
    assert run("check", made)[0] == 0
    code, said = run("convert", pickled)
    assert (code, "is there already" in said) == (1, True)
    code, said = run("convert", made, "--output", tmp_path / "again")
    assert (code, "already safetensors" in said, (tmp_path / "again").exists()) == (0, True, False)


def test_hostile_file_is_refused_without_output(pickled: Path, tmp_path: Path) -> None:
    (pickled / "pytorch_model.bin").write_bytes(calling(os.system, f"touch {tmp_path / MARKER}"))
    code, said = run("convert", pickled, "--output", tmp_path / "made")
    assert code == 1
    assert "asks for 'posix.system'" in said
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model.safetensors", "org"]


def test_check_reports_that_torch_checkpoints_were_converted(
    pickled: Path,
) -> None:
    code, said = run("check", pickled)
    assert code == 0, said
    assert "converted: pytorch_model.bin to model.safetensors" in said


def test_check_refuses_torch_checkpoints_if_so_configured(
    pickled: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHOAL_TORCH_CHECKPOINTS", "refuse")
    code, said = run("check", pickled)
    assert code == 1
    assert "shoal models convert DIR" in " ".join(said.split())
