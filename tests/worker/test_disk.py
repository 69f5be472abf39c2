"""Lookup of model IDs in directories, never outside the shelves."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from libs.errors import InvalidInput, ModelBroken, ModelNotFound
from services.worker.machine.disk import find, listing, weight_bytes
from services.worker.settings import Shelf, parse_shelves
from tests.worker.fakes import checkpoint


def test_shelves_parse_as_models_and_roots(tmp_path: Path) -> None:
    assert parse_shelves(f"org/a={tmp_path}:/models:") == (
        Shelf(tmp_path, "org/a"),
        Shelf(Path("/models")),
    )
    assert parse_shelves("") == ()


@pytest.mark.parametrize("text", ["org=/path", "../x=/path", "org/a=", "a/b/c=/path"])
def test_invalid_entries_are_refused(text: str) -> None:
    with pytest.raises(InvalidInput, match="SHOAL_MODELS"):
        parse_shelves(text)


def test_models_are_found_by_id(tmp_path: Path) -> None:
    root, own = tmp_path / "root", tmp_path / "own"
    plain, revised = checkpoint(root, "org/a"), checkpoint(root, "org/a@v2")
    (own).mkdir()
    (own / "modules.json").write_text("[]")
    shelves = (Shelf(own, "org/b"), Shelf(root))
    assert find(shelves, "org/a") == plain
    assert find(shelves, "org/a@v2") == revised
    assert find(shelves, "org/b") == own
    assert set(listing(shelves)) == {"org/a", "org/a@v2", "org/b"}
    with pytest.raises(ModelNotFound):
        find(shelves, "org/b@v2")
    with pytest.raises(ModelNotFound):
        find(shelves, "org/unknown")


@pytest.mark.parametrize(
    "model",
    [
        "../secret/a",
        "root/../secret/a",
        "org/..",
        "/etc/passwd",
        "secret",
        "org/a/b",
        "org/a@../../x",
        "org\\a/b",
        "",
        "org/a\n",
    ],
)
def test_ids_that_are_paths_are_not_found(tmp_path: Path, model: str) -> None:
    checkpoint(tmp_path, "secret/a")
    checkpoint(tmp_path, "root/org/a")
    with pytest.raises(ModelNotFound):
        find((Shelf(tmp_path / "root"),), model)


@pytest.mark.parametrize("name", ["config.json", "modules.json", "gliner_config.json"])
def test_directory_with_a_config_is_a_model(name: str, tmp_path: Path) -> None:
    (tmp_path / "org" / "a").mkdir(parents=True)
    (tmp_path / "org" / "a" / name).write_text("{}")
    assert find((Shelf(tmp_path),), "org/a") == tmp_path / "org" / "a"


def test_directory_without_a_config_is_not_a_model(tmp_path: Path) -> None:
    (tmp_path / "org" / "a").mkdir(parents=True)
    assert listing((Shelf(tmp_path),)) == {}
    with pytest.raises(ModelNotFound):
        find((Shelf(tmp_path),), "org/a")


def test_weight_bytes_depend_on_the_device_type(tmp_path: Path) -> None:
    (tmp_path / "2_Dense").mkdir()
    save_file(
        {"w": np.zeros((10, 10), np.float32), "ids": np.zeros(5, np.int64)},
        tmp_path / "model.safetensors",
    )
    save_file({"w": np.zeros(6, np.float16)}, tmp_path / "2_Dense" / "model.safetensors")
    assert weight_bytes(tmp_path, 4) == 400 + 40 + 24
    assert weight_bytes(tmp_path, 2) == 200 + 40 + 12


@pytest.mark.parametrize("content", [b"", b"\x08\0\0\0\0\0\0\0not json", b"\xff" * 8])
def test_broken_weights_are_named(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(ModelBroken, match=r"model\.safetensors"):
        weight_bytes(tmp_path, 4)
