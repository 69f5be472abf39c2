"""Digests of model directories: the files that count, caching, and changed files."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import threading
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from libs.errors import ModelBroken
from libs.store import digests, local
from libs.store.digests import (
    FileDigests,
    FilesChanged,
    FilesDigest,
    HashingStopped,
    list_files,
)

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


def digest_with(
    known: FileDigests,
    directory: Path,
    *,
    is_adapter: bool = False,
    stop: threading.Event | None = None,
) -> FilesDigest:
    return known.hash_files([list_files(directory, is_adapter=is_adapter)], stop)


def digest(directory: Path) -> str:
    return digest_with(FileDigests(), directory).hex


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
    before = digest_with(found, tmp_path, is_adapter=True).hex
    (tmp_path / "tokenizer.json").write_text("{}")
    assert digest_with(found, tmp_path, is_adapter=True).hex == before
    (tmp_path / "adapter_model.safetensors").write_text("{ }")
    assert digest_with(found, tmp_path, is_adapter=True).hex != before


def test_layout_that_the_store_does_not_know_counts_all_weights_and_texts(tmp_path: Path) -> None:
    (tmp_path / "own.json").write_text("{}")
    before = digest(tmp_path)
    (tmp_path / "own.json").write_text("[]")
    assert digest(tmp_path) != before


def test_unchanged_files_are_hashed_once(model: Path, hashed: list[str]) -> None:
    known = FileDigests()
    first = digest_with(known, model)
    assert digest_with(known, model) == first
    assert hashed == [CONFIG, WEIGHTS]
    os.utime(model / CONFIG)
    assert digest_with(known, model).hex == first.hex
    assert hashed == [CONFIG, WEIGHTS, CONFIG]


def test_file_changed_in_place_with_the_same_size_is_hashed_again(model: Path) -> None:
    known = FileDigests()
    first = digest_with(known, model)
    content = bytearray((model / WEIGHTS).read_bytes())
    content[-1] ^= 1
    with (model / WEIGHTS).open("r+b") as file:
        file.write(content)
    assert not first.is_current()
    assert digest_with(known, model).hex != first.hex


def test_number_of_remembered_files_is_limited(
    model: Path, hashed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(digests, "MAX_REMEMBERED_FILES", 1)
    known = FileDigests()
    for _ in range(2):
        digest_with(known, model)
    assert hashed == [CONFIG, WEIGHTS, CONFIG, WEIGHTS]


def test_removed_file_makes_a_digest_outdated(model: Path) -> None:
    found = digest_with(FileDigests(), model)
    assert found.is_current()
    (model / WEIGHTS).unlink()
    assert not found.is_current()


def test_hashing_can_be_stopped(model: Path) -> None:
    stop = threading.Event()
    stop.set()
    with pytest.raises(HashingStopped):
        digest_with(FileDigests(), model, stop=stop)


def test_link_out_of_the_directory_does_not_count(model: Path) -> None:
    before = digest(model)
    (model / "notes.json").symlink_to("/etc/hostname")
    assert digest(model) == before


def test_directory_with_very_many_other_files_is_digested(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = digest(model)
    monkeypatch.setattr(local, "_MAX_MODEL_FILES", 5)
    (model / "runs").mkdir()
    for number in range(10):
        (model / "runs" / f"{number}.log").write_text("")
    assert digest(model) == before


@pytest.mark.parametrize(
    "name",
    [
        "README.json",
        "trainer_state.json",
        "training_args.json",
        "eval_results.json",
        "all_results.json",
        "results.json",
        "requirements.txt",
        "notes.txt",
        "LICENSE.txt",
    ],
)
def test_files_that_no_loader_reads_do_not_matter(model: Path, name: str) -> None:
    before = digest(model)
    (model / name).write_text("{}")
    assert digest(model) == before


@pytest.mark.parametrize(
    "name",
    ["vocab.txt", "merges.txt", "tokenizer.json", "special_tokens_map.json", "spm.model", "a.json"],
)
def test_files_that_a_loader_may_read_matter(model: Path, name: str) -> None:
    before = digest(model)
    (model / name).write_text("{}")
    assert digest(model) != before


def test_folders_of_modules_count_among_very_many_other_files(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    types = {"query_0_Dense": "sentence_transformers.models.Dense"}
    modules = [{"path": "", "type": "Transformer"}, {"path": "router", "type": "models.Router"}]
    (model / "modules.json").write_text(json.dumps(modules))
    dense = model / "router" / "query_0_Dense"
    dense.mkdir(parents=True)
    (model / "router" / "router_config.json").write_text(json.dumps({"types": types}))
    (dense / "config.json").write_text("{}")
    before = digest(model)
    monkeypatch.setattr(local, "_MAX_MODEL_FILES", 5)
    (model / "runs").mkdir()
    for number in range(10):
        (model / "runs" / f"{number}.json").write_text("{}")
    assert digest(model) == before
    (dense / "config.json").write_text("{ }")
    assert digest(model) != before
    (model / "modules.json").write_text('{"a": 1}')
    with pytest.raises(ModelBroken, match=r"modules\.json"):
        list_files(model)


def replace_file(path: Path, content: bytes) -> None:
    path.with_suffix(".new").write_bytes(content)
    path.with_suffix(".new").rename(path)


def test_file_replaced_between_listing_and_hashing_has_no_digest(model: Path) -> None:
    listed = list_files(model)
    replace_file(model / WEIGHTS, b"another one")
    with pytest.raises(FilesChanged, match="changed before it was hashed"):
        FileDigests().hash_files([listed])


def test_added_file_makes_a_digest_outdated(model: Path) -> None:
    found = digest_with(FileDigests(), model)
    (model / "notes.txt").write_text("no loader reads it")
    found.check_current()
    (model / "tokenizer.json").write_text("{}")
    with pytest.raises(FilesChanged):
        found.check_current()
    assert not found.is_current()


def test_file_that_cannot_be_read_has_no_digest(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    listed = list_files(model)
    (model / WEIGHTS).unlink()
    with pytest.raises(FileNotFoundError):
        FileDigests().hash_files([listed])
    with pytest.raises(FileNotFoundError, match=r"model\.safetensors vanished"):
        listed.check_current()

    def broken(*_: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(digests, "_mark", broken)
    with pytest.raises(OSError, match="Input/output"):
        list_files(model)


def test_large_files_are_hashed_on_several_threads(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(8):
        (model / f"model-{number}.safetensors").write_bytes(bytes([number]) * 100)
    before = digest(model)
    monkeypatch.setattr(digests, "LARGE_FILE_BYTES", 100)
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    together = threading.Barrier(4, timeout=120)
    hash_file = FileDigests._hash

    def waiting(path: Path, *rest: object) -> str:
        if path.name.startswith("model-"):
            together.wait()
        return hash_file(path, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(FileDigests, "_hash", staticmethod(waiting))
    assert digest(model) == before


def test_digest_of_several_directories(model: Path, tmp_path: Path) -> None:
    one, other = list_files(model), list_files(write_model(tmp_path / "other", 2.0))
    known = FileDigests()
    found = [known.hash_files(listed) for listed in ([one], [other], [one, other], [other, one])]
    assert len({each.hex for each in found}) == 4
    (model / CONFIG).unlink()
    assert not found[2].is_current()
    assert found[1].is_current()
