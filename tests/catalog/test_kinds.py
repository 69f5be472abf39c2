"""Each folder of libs/kinds is registered and can be loaded, and detection asks the kinds."""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path

import pytest

from libs import kinds
from libs.catalog.detect import detect, read_card
from libs.catalog.overrides import Hints, Overrides
from libs.errors import ModelBroken
from libs.kinds.kind import Kind
from libs.kinds.registry import KINDS

FOLDERS = {path.parent.name for path in Path(kinds.__path__[0]).glob("*/card.py")}


def test_every_folder_is_registered() -> None:
    assert {kind.folder for kind in KINDS} == FOLDERS


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.folder)
def test_every_kind_has_a_loader_by_its_folder(kind: Kind) -> None:
    assert callable(import_module(f"libs.kinds.{kind.folder}.model").load)


def directory(path: Path) -> Path:
    (path / "config.json").write_text(
        json.dumps({"model_type": "bert", "architectures": ["BertForTokenClassification"]})
    )
    (path / "tokenizer.json").write_text("{}")
    (path / "model.safetensors").write_bytes(bytes([2, *[0] * 7]) + b"{}")
    return path


def test_first_kind_that_claims_a_directory_has_it(tmp_path: Path) -> None:
    assert detect(directory(tmp_path), "some/model")[1].folder == "token_labels"
    (tmp_path / "gliner_config.json").write_text("{}")
    assert detect(tmp_path, "some/model")[1].folder == "gliner"


def test_card_names_the_kind_of_a_directory(tmp_path: Path) -> None:
    named = Overrides("a card", detect=Hints(kind="sequence_labels"))
    assert detect(directory(tmp_path), "some/model", named)[1].name == "sequence_labels"


@pytest.mark.parametrize("name", ["gliner", "images", "laya"])
def test_card_with_the_kind_of_another_layout_is_refused(name: str, tmp_path: Path) -> None:
    named = Overrides("a card", detect=Hints(kind=name))
    with pytest.raises(ModelBroken, match=f"is not of the kind '{name}'"):
        read_card(directory(tmp_path), "some/model", named)
