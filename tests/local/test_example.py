"""What `shoal up` advises to try can be done."""

from __future__ import annotations

from pathlib import Path

from services.local.settings import MINILM, example_model
from tests.generation.served import write
from tests.parity.checkpoints import SentenceFiles, write_checkpoint


def test_an_example_is_a_model_that_is_there_and_encodes(tmp_path: Path) -> None:
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
