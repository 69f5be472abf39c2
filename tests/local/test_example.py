"""What `shoal up` advises to try can be done."""

from __future__ import annotations

from pathlib import Path

from services.local.settings import MINILM, example_model


def test_an_example_is_a_model_that_is_there(tmp_path: Path) -> None:
    (tmp_path / "org" / "name").mkdir(parents=True)
    assert example_model(f"{tmp_path}:a/b=/somewhere", "") == "a/b"  # the folder has no checkpoint
    (tmp_path / "org" / "name" / "config.json").touch()
    assert example_model(f"{tmp_path}:a/b=/somewhere", "hf") == "org/name"
    assert example_model("", "s3://bucket,hf") == MINILM
    assert example_model("", "s3://bucket") == ""
    assert example_model("", "") == ""
