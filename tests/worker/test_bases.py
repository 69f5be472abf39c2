"""Adapters that are served as models: their base is found like a model, and counts in their
size.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from libs.errors import ModelBroken, ModelNotFound
from libs.store import open_store
from services.worker.machine import disk
from services.worker.memory.files import ModelFiles
from services.worker.settings import Shelf
from tests.catalog.test_detect import write

BASE, OWN, TEXTS = "org/base", "org/own", "org/of-texts"
VISION = {
    "model_type": "qwen2_5_vl",
    "text_config": {"hidden_size": 8, "max_position_embeddings": 128},
}


def write_adapter(root: Path, model: str, base: str, *, reads_images: bool = True) -> None:
    directory = root / model
    directory.mkdir(parents=True)
    settings = {"peft_type": "LORA", "r": 1, "lora_alpha": 1, "base_model_name_or_path": base}
    (directory / "adapter_config.json").write_text(json.dumps(settings))
    save_file({"a": np.zeros(4, np.float32)}, directory / "adapter_model.safetensors")
    if reads_images:
        (directory / "preprocessor_config.json").write_text("{}")
        (directory / "README.md").write_text("no file of a model")


def files(tmp_path: Path, *, has_store: bool = True) -> ModelFiles:
    """Find models in `tmp_path/shelf`, and in a store of `tmp_path/bucket`."""
    (tmp_path / "shelf").mkdir(exist_ok=True)
    (tmp_path / "bucket").mkdir(exist_ok=True)
    store = (
        open_store((f"file://{tmp_path / 'bucket'}",), tmp_path / "store", 0) if has_store else None
    )
    return ModelFiles((Shelf(tmp_path / "shelf"),), store, item_bytes=4)


def test_adapter_and_base_are_found_on_a_shelf(tmp_path: Path) -> None:
    shelf = tmp_path / "shelf"
    base = write(shelf / BASE, {"config.json": VISION}, {"b": [100]})
    write_adapter(shelf, OWN, BASE, reads_images=False)
    write(shelf / "org/texts", {})
    write_adapter(shelf, TEXTS, "org/texts", reads_images=False)
    found = files(tmp_path, has_store=False)
    copy = found.find(OWN)
    assert (copy.directory, copy.base) == (shelf / OWN, base)
    assert found.device_bytes(OWN, copy.directory, copy.base) == 416
    listed = found.listing({})
    assert sorted(listed) == [BASE, OWN, "org/texts"]
    assert listed[OWN].bytes == 416
    card = listed[OWN].card
    assert card is not None
    assert (card.model, card.family, card.kind) == (OWN, "qwen2_5_vl", "images")
    other = listed[BASE].card
    assert other is not None
    assert card.revision != other.revision
    assert found.listing(listed) == listed
    with pytest.raises(ModelNotFound):
        found.find(TEXTS)


@pytest.mark.parametrize("place", ["shelf", "bucket"])
def test_base_is_fetched_from_the_store(tmp_path: Path, place: str) -> None:
    write(tmp_path / "bucket" / BASE, {"config.json": VISION})
    write_adapter(tmp_path / place, OWN, BASE)
    found = files(tmp_path)
    with pytest.raises(ModelNotFound):
        found.find(OWN)
    copy = found.fetch(OWN, lambda progress: None)
    assert copy.base is not None
    assert json.loads((copy.base / "config.json").read_text()) == VISION
    names = {"adapter_config.json", "adapter_model.safetensors", "preprocessor_config.json"}
    assert names <= {path.name for path in copy.directory.iterdir()}
    assert disk.weight_bytes(copy.base, 4) == 4
    copy.close()


def test_error_names_a_missing_base(tmp_path: Path) -> None:
    write_adapter(tmp_path / "shelf", OWN, BASE)
    with pytest.raises(
        ModelBroken, match=f"{OWN}: an adapter of the model '{BASE}', which is also needed"
    ):
        files(tmp_path, has_store=False).find(OWN)
    with pytest.raises(
        ModelBroken,
        match=f"{OWN}: an adapter of the model '{BASE}', which is also needed: .*{BASE}",
    ):
        files(tmp_path).fetch(OWN, lambda progress: None)
    listed = files(tmp_path).listing({})[OWN]
    assert (listed.card, listed.bytes) == (
        None,
        0,
    )  # as for any unreadable one; loading it reports why


def test_broken_files_of_one_model_do_not_hide_others(tmp_path: Path) -> None:
    shelf = tmp_path / "shelf"
    write(shelf / "org/texts", {})
    for name, base in (("org/a", "org/broken"), ("org/b", "")):
        write_adapter(shelf, name, base, reads_images=False)
    write(shelf / "org/broken", {"config.json": "{"})
    listed = files(tmp_path).listing({})
    assert sorted(name for name, one in listed.items() if one.card is not None) == ["org/texts"]


def test_adapter_of_a_text_model_is_refused_as_a_model(tmp_path: Path) -> None:
    write_adapter(tmp_path / "bucket", TEXTS, "org/texts", reads_images=False)
    with pytest.raises(ModelBroken, match="request that model, with this as its `adapter`"):
        files(tmp_path).fetch(TEXTS, lambda progress: None)
