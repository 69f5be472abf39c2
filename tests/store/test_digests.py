"""Digests of model directories: the files that count, caching, and changed files."""

from __future__ import annotations

import hashlib
import os
import shutil
import threading
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from libs.store import digests, local
from libs.store.digests import FileDigests, Stopped, joined

CONFIG, WEIGHTS = "config.json", "model.safetensors"


def write_model(directory: Path, value: float = 1.0) -> Path:
    directory.mkdir(parents=True)
    (directory / CONFIG).write_text('{"model_type": "bert"}')
    save_file({"w": np.full(8, value, np.float32)}, directory / WEIGHTS)
    return directory


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_model(tmp_path / "org" / "model")


@pytest.fixture
def hashed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the files that are hashed, one entry each time."""
    found: list[str] = []
    hash_file = FileDigests._hash

    def recorded(path: Path, *rest: object) -> object:
        found.append(path.name)
        return hash_file(path, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(FileDigests, "_hash", staticmethod(recorded))
    return found


def digest(directory: Path) -> str:
    return FileDigests().of_directory(directory).hex


def test_digest_is_that_of_the_documented_lines(model: Path) -> None:
    lines = "".join(
        f"{name} {hashlib.sha256((model / name).read_bytes()).hexdigest()}\n"
        for name in (CONFIG, WEIGHTS)
    )
    assert digest(model) == hashlib.sha256(lines.encode()).hexdigest()


def test_place_and_time_of_the_files_do_not_matter(model: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(model, tmp_path / "elsewhere", copy_function=shutil.copyfile)
    os.utime(copy / WEIGHTS, (1, 1))
    assert digest(copy) == digest(model)


def test_files_that_the_store_would_not_fetch_do_not_matter(model: Path) -> None:
    before = digest(model)
    (model / "README.md").write_text("about")
    (model / "pytorch_model.bin").write_bytes(b"another form of the weights")
    (model / "onnx").mkdir()
    (model / "onnx" / "model.onnx").write_bytes(b"onnx")
    (model / ".hidden.json").write_text("{}")
    assert digest(model) == before


def test_links_into_the_cache_of_the_hub_are_followed(model: Path, tmp_path: Path) -> None:
    cache = tmp_path / "models--org--model"
    snapshot = cache / "snapshots" / "main"
    snapshot.mkdir(parents=True)
    (cache / "blobs").mkdir()
    for name in (CONFIG, WEIGHTS):
        shutil.copyfile(model / name, cache / "blobs" / name)
        (snapshot / name).symlink_to(Path("../../blobs") / name)
    assert digest(snapshot) == digest(model)


def test_content_of_weights_matters(model: Path, tmp_path: Path) -> None:
    assert digest(write_model(tmp_path / "other", 2.0)) != digest(model)


def test_of_an_adapter_its_two_files_count(tmp_path: Path) -> None:
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (tmp_path / name).write_text("{}")
    found = FileDigests()
    before = found.of_directory(tmp_path, is_adapter=True).hex
    (tmp_path / "tokenizer.json").write_text("{}")
    assert found.of_directory(tmp_path, is_adapter=True).hex == before
    (tmp_path / "adapter_model.safetensors").write_text("{ }")
    assert found.of_directory(tmp_path, is_adapter=True).hex != before


def test_layout_that_the_store_does_not_know_counts_all_weights_and_texts(tmp_path: Path) -> None:
    (tmp_path / "own.json").write_text("{}")
    before = digest(tmp_path)
    (tmp_path / "own.json").write_text("[]")
    assert digest(tmp_path) != before


def test_unchanged_files_are_hashed_once(model: Path, hashed: list[str]) -> None:
    known = FileDigests()
    first = known.of_directory(model)
    assert known.of_directory(model) == first
    assert hashed == [CONFIG, WEIGHTS]
    os.utime(model / CONFIG)
    assert known.of_directory(model).hex == first.hex
    assert hashed == [CONFIG, WEIGHTS, CONFIG]


def test_file_changed_in_place_with_the_same_size_is_hashed_again(model: Path) -> None:
    known = FileDigests()
    first = known.of_directory(model)
    content = bytearray((model / WEIGHTS).read_bytes())
    content[-1] ^= 1
    with (model / WEIGHTS).open("r+b") as file:
        file.write(content)
    assert not first.is_current()
    assert known.of_directory(model).hex != first.hex


def test_number_of_remembered_files_is_limited(
    model: Path, hashed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(digests, "MAX_REMEMBERED_FILES", 1)
    known = FileDigests()
    for _ in range(2):
        known.of_directory(model)
    assert hashed == [CONFIG, WEIGHTS, CONFIG, WEIGHTS]


def test_removed_file_makes_a_digest_outdated(model: Path) -> None:
    found = FileDigests().of_directory(model)
    assert found.is_current()
    (model / WEIGHTS).unlink()
    assert not found.is_current()


def test_hashing_can_be_stopped(model: Path) -> None:
    stop = threading.Event()
    stop.set()
    with pytest.raises(Stopped):
        FileDigests().of_directory(model, stop=stop)


def test_link_out_of_the_directory_does_not_count(model: Path) -> None:
    before = digest(model)
    (model / "notes.txt").symlink_to("/etc/hostname")
    assert digest(model) == before


def test_directory_with_very_many_other_files_is_digested(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = digest(model)
    monkeypatch.setattr(local, "_MAX_FILES", 5)
    (model / "runs").mkdir()
    for number in range(10):
        (model / "runs" / f"{number}.log").write_text("")
    assert digest(model) == before


def test_digest_of_several_directories(model: Path, tmp_path: Path) -> None:
    known = FileDigests()
    one = known.of_directory(model)
    other = known.of_directory(write_model(tmp_path / "other", 2.0))
    assert joined([one]) == one
    assert len({one.hex, other.hex, joined([one, other]).hex, joined([other, one]).hex}) == 4
    (model / CONFIG).unlink()
    assert not joined([one, other]).is_current()
