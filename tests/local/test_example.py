"""The commands that `shoal up` suggests work."""

from __future__ import annotations

from pathlib import Path

import pytest

from libs.errors import InvalidInput
from services.local.settings import MINILM, default_model, example_model, known_models
from tests.generation.served import write
from tests.parity.checkpoints import SentenceFiles, write_checkpoint


def test_example_is_a_model_that_is_there_and_encodes(tmp_path: Path) -> None:
    elsewhere = write_checkpoint("bert", tmp_path / "elsewhere", sentence=SentenceFiles())
    shelf = tmp_path / "shelf"
    assert example_model(f"{shelf}:a/b={elsewhere}", "") == "a/b"  # the folder has no checkpoint
    write("llama", shelf / "a" / "writer")
    (shelf / "b" / "broken").mkdir(parents=True)
    (shelf / "b" / "broken" / "config.json").touch()
    assert example_model(f"{shelf}:a/b={elsewhere}", "hf") == "a/b"
    assert example_model(str(shelf), "") == ""
    assert example_model(str(shelf), "hf") == MINILM
    write_checkpoint("bert", shelf / "org" / "name", sentence=SentenceFiles())
    assert example_model(f"{shelf}:a/b={elsewhere}", "hf") == "org/name"
    assert example_model("", "s3://bucket,hf") == MINILM
    assert example_model("", "s3://bucket") == ""
    assert example_model("", "") == ""
    assert example_model(f"a/b={elsewhere}", "hf", "a/b") == "a/b"
    assert example_model(f"a/b={elsewhere}", "hf", "org/in-the-hub") == "org/in-the-hub"


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ("", "has no models: a folder of models has subfolders <org>/<name>"),
        ("org/name", "is the folder of one model: .*org/name="),
    ],
)
def test_folder_without_models_is_refused_when_the_mesh_starts(
    tmp_path: Path, entry: str, words: str
) -> None:
    folder = tmp_path / entry
    (folder / "empty" / "folder").mkdir(parents=True)
    if entry:
        write_checkpoint("bert", folder, sentence=SentenceFiles())
        assert known_models([str(tmp_path)], {}).startswith(str(tmp_path))
    with pytest.raises(InvalidInput, match=words):
        known_models([str(folder)], {})


def test_model_without_an_organisation_is_refused_when_the_mesh_starts(tmp_path: Path) -> None:
    with pytest.raises(
        InvalidInput, match=f"'reranker' is not a model id.*org/reranker={tmp_path}"
    ):
        known_models([f"reranker={tmp_path}"], {})


def test_default_model_is_one_that_the_mesh_can_have(tmp_path: Path) -> None:
    models = f"a/b={tmp_path}"
    assert default_model(models, models, "") == "a/b"
    assert default_model("org/in-the-hub", "", "hf") == "org/in-the-hub"
    with pytest.raises(
        InvalidInput,
        match="no folder has the model org/nowhere, and SHOAL_STORES names no store that could",
    ):
        default_model("org/nowhere", models, "")
    with pytest.raises(InvalidInput, match=r"'/models/a' is not a model: give org/name"):
        default_model("/models/a", models, "hf")
