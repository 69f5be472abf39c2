"""Torch checkpoints through the store: from the hub and from directories of this machine to
safetensors in the store's folder.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

from libs.conversion import read_record
from libs.errors import ModelBroken, NoCapacity
from libs.store import DownloadProgress, open_copies
from libs.store.cache import RECORD
from tests.conversion.hostile import MARKER, calling
from tests.store.checkpoints import MODEL
from tests.store.conftest import MakeStore
from tests.store.fake_hub import COMMIT, FakeHub
from tests.support.waiting import wait_until

ROOT = Path(__file__).parents[2]
SOURCES = ("pytorch_model.bin", "2_Dense/pytorch_model.bin", "sparse_linear.pt")


def ignore(progress: DownloadProgress) -> None:
    return


@pytest.fixture
def pickled(model: Path) -> Path:
    """The hub's model, with its weights, those of its module and a layer in addition as torch
    checkpoints alone.
    """
    for name in ("model.safetensors", "2_Dense/model.safetensors"):
        tensors = {key: torch.from_numpy(value) for key, value in load_file(model / name).items()}
        torch.save(tensors, (model / name).with_name("pytorch_model.bin"))
        (model / name).rename(model.parent / name.replace("/", "-"))
    torch.save({"weight": torch.ones(1, 3), "bias": torch.zeros(1)}, model / "sparse_linear.pt")
    return model


@pytest.fixture
def weights(pickled: Path) -> Path:
    """The same with a single torch checkpoint: each takes a process."""
    for name in SOURCES[1:]:
        (pickled / name).unlink()
    return pickled


def assert_converted(directory: Path, original: Path) -> None:
    sources = {name for name in SOURCES if (original / name).exists()}
    assert "pytorch_model.bin" in sources
    for name in ("model.safetensors", "2_Dense/model.safetensors"):
        if name.replace("model.safetensors", "pytorch_model.bin") not in sources:
            continue
        found, wanted = (
            load_file(directory / name),
            load_file(original.parent / name.replace("/", "-")),
        )
        assert found.keys() == wanted.keys()
        for key, value in wanted.items():
            np.testing.assert_array_equal(found[key], value)
    if "sparse_linear.pt" in sources:
        assert set(load_file(directory / "sparse_linear.safetensors")) == {"weight", "bias"}
    assert not [path for path in directory.rglob("*") if path.suffix in (".bin", ".pt", ".part")]
    assert {one.source for one in read_record(directory)} == sources


def used_bytes(directory: Path) -> int:
    return sum(
        path.stat().st_size
        for path in directory.rglob("*")
        if path.is_file() and not path.name.startswith(".")
    )


def test_model_of_torch_checkpoints_is_fetched_and_converted_once(
    hub: FakeHub, pickled: Path, root: Path, make_store: MakeStore
) -> None:
    store = make_store()
    with ThreadPoolExecutor(3) as pool:
        copies = [
            copy.result() for copy in [pool.submit(store.get, MODEL, ignore) for _ in range(3)]
        ]
    assert {copy.directory for copy in copies} == {root / "models" / MODEL}
    assert_converted(copies[0].directory, pickled)
    assert hub.sent["pytorch_model.bin"] == (pickled / "pytorch_model.bin").stat().st_size
    record = json.loads((copies[0].directory / RECORD).read_text())
    assert (record["origin"], record["revision"]) == (hub.endpoint, COMMIT)
    sizes = {file["path"]: file["size"] for file in record["files"]}
    assert sum(sizes.values()) == used_bytes(copies[0].directory)
    assert not set(sizes) & set(SOURCES)


def test_adapter_s_torch_file_is_converted(
    hub: FakeHub, tmp_path: Path, make_store: MakeStore
) -> None:
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text("{}")
    torch.save(
        {"base_model.model.q.lora_A.weight": torch.ones(2, 3)}, adapter / "adapter_model.bin"
    )
    hub.models["org/adapter"] = adapter
    copy = make_store().get("org/adapter", ignore, is_adapter=True)
    assert set(load_file(copy.directory / "adapter_model.safetensors")) == {
        "base_model.model.q.lora_A.weight"
    }


def test_budget_without_room_for_both_forms_refuses_before_the_download(
    hub: FakeHub, pickled: Path, make_store: MakeStore
) -> None:
    size = sum((pickled / name).stat().st_size for name in SOURCES)
    with pytest.raises(ModelBroken, match="SHOAL_STORE_BYTES"):
        make_store(budget_bytes=2 * size - 1).get(MODEL, ignore)
    assert set(hub.sent) == {"modules.json"}


def test_hostile_checkpoint_of_the_hub_is_refused_and_nothing_of_it_is_seen(
    hub: FakeHub, pickled: Path, root: Path, make_store: MakeStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(pickled.parent)
    (pickled / "2_Dense" / "pytorch_model.bin").write_bytes(calling(os.system, f"touch {MARKER}"))
    with pytest.raises(ModelBroken, match=r"2_Dense/pytorch_model\.bin: asks for 'posix\.system'"):
        make_store().get(MODEL, ignore)
    assert not list((root / "models").glob("*/*"))
    assert not (pickled.parent / MARKER).exists()


def test_killed_conversion_resumes_without_a_download(
    hub: FakeHub, pickled: Path, root: Path, tmp_path: Path, make_store: MakeStore
) -> None:
    """The process is killed once its first checkpoint is converted; its child ends with it."""
    command = [
        sys.executable,
        "-m",
        "tests.store.fetching",
        str(root),
        str(tmp_path / "hf"),
        MODEL,
        "1",
    ]
    environment = os.environ | {
        "HF_ENDPOINT": hub.endpoint,
        "PYTHONPATH": f"{ROOT}:{ROOT / 'libs/api'}",
    }
    record = root / "incoming" / MODEL / "files" / ".shoal.conversion.json"
    with subprocess.Popen(
        command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT
    ) as fetching:
        assert fetching.stdin is not None
        fetching.stdin.write(b"go\n")
        fetching.stdin.flush()
        wait_until(record.exists, 300, "a checkpoint to be converted")
        fetching.kill()
    sent = dict(hub.sent)
    copy = make_store().get(MODEL, ignore)
    assert_converted(copy.directory, pickled)
    assert {name: size for name, size in hub.sent.items() if name != "modules.json"} == {
        name: size for name, size in sent.items() if name != "modules.json"
    }


def test_kill_between_the_conversion_and_its_publication_loses_nothing(
    hub: FakeHub, weights: Path, make_store: MakeStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(
            "libs.store.cache.Cache.publish",
            lambda cache, model: (_ for _ in ()).throw(OSError(28, "killed here")),
        )
        with pytest.raises(NoCapacity):
            make_store().get(MODEL, ignore)
    sent = dict(hub.sent)
    monkeypatch.setattr(sys.modules[read_record.__module__], "run", None)
    copy = make_store().get(MODEL, ignore)
    assert_converted(copy.directory, weights)
    assert hub.sent["pytorch_model.bin"] == sent["pytorch_model.bin"]


class TestLocal:
    """A directory that an operator names."""

    def test_it_is_read_through_a_copy_and_left_as_it_is(self, pickled: Path, root: Path) -> None:
        before = {path: path.stat().st_mtime_ns for path in pickled.rglob("*")}
        copies = open_copies(root, 0)
        assert copies.existing(pickled) == pickled
        copy = copies.find(pickled, ignore)
        assert copy.directory.is_relative_to(root / "models" / ".converted")
        assert_converted(copy.directory, pickled)
        assert (copy.directory / "tokenizer.json").read_bytes() == (
            pickled / "tokenizer.json"
        ).read_bytes()
        assert {path: path.stat().st_mtime_ns for path in pickled.rglob("*")} == before
        assert copies.existing(pickled) == copy.directory
        assert open_copies(root, 0).find(pickled, ignore).directory == copy.directory

    def test_changed_directory_gets_another_copy(self, weights: Path, root: Path) -> None:
        copies = open_copies(root, 0)
        first = copies.find(weights, ignore)
        torch.save({"w": torch.ones(3)}, weights / "pytorch_model.bin")
        second = copies.find(weights, ignore)
        assert second.directory != first.directory
        np.testing.assert_array_equal(
            load_file(second.directory / "model.safetensors")["w"], np.ones(3)
        )

    def test_only_an_unused_copy_is_evicted(self, weights: Path, root: Path) -> None:
        size = used_bytes(weights)
        copies = open_copies(root, 3 * size)
        other = shutil.copytree(weights, weights.parent / "other")
        first = copies.find(weights, ignore)
        with pytest.raises(NoCapacity, match="SHOAL_STORE_BYTES"):
            open_copies(root, 2 * size).find(other, ignore)
        first.close()
        open_copies(root, 2 * size).find(other, ignore)
        assert not first.directory.exists()

    def test_safetensors_are_read_where_they_lie(self, model: Path, root: Path) -> None:
        assert open_copies(root, 0).find(model, ignore).directory == model
        assert not root.exists()

    def test_where_torch_checkpoints_are_refused_nothing_is_converted(
        self, pickled: Path, root: Path
    ) -> None:
        assert open_copies(root, 0, "refuse").find(pickled, ignore).directory == pickled
        assert not root.exists()

    def test_link_out_of_it_is_refused(self, pickled: Path, root: Path) -> None:
        path = pickled / "pytorch_model.bin"
        path.rename(pickled.parent / "elsewhere.bin")
        path.symlink_to(pickled.parent / "elsewhere.bin")
        with pytest.raises(ModelBroken, match="leads out of the checkpoint"):
            open_copies(root, 0).find(pickled, ignore)

    def test_hugging_face_cache_is_read_through_a_copy(
        self, hub: FakeHub, weights: Path, root: Path, tmp_path: Path, make_store: MakeStore
    ) -> None:
        repository = tmp_path / "hf" / f"models--{MODEL.replace('/', '--')}"
        snapshot = repository / "snapshots" / COMMIT
        shutil.copytree(weights, snapshot)
        (repository / "refs").mkdir()
        (repository / "refs" / "main").write_text(COMMIT)
        copy = make_store().get(MODEL, ignore)
        assert copy.directory.is_relative_to(root / "models" / ".converted")
        assert_converted(copy.directory, weights)
        assert set(hub.sent) == {"modules.json"}
