"""Models without tokenizer.json through the store: their vocabulary files become a fast tokenizer,
served as any other.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from libs.catalog.detect import read_card
from libs.conversion import read_record
from libs.errors import ModelBroken
from libs.store import DownloadProgress, open_copies
from tests.parity.checkpoints import write_checkpoint
from tests.store.conftest import MakeStore
from tests.store.fake_hub import FakeHub

TEXT = "Programs such as the GPL, which users run"
NAME = "org/slow"


def ignore(progress: DownloadProgress) -> None:
    return


@pytest.fixture
def slow(hub: FakeHub, tmp_path: Path) -> tuple[Path, list[int]]:
    """Return a BERT of the hub that has only vocab.txt, and a text's ids by its tokenizer.json."""
    directory = write_checkpoint("bert", tmp_path / "slow")
    fast = Tokenizer.from_file(str(directory / "tokenizer.json"))
    vocabulary = fast.get_vocab()
    (directory / "vocab.txt").write_text(
        "\n".join(sorted(vocabulary, key=vocabulary.__getitem__)) + "\n"
    )
    settings = json.loads((directory / "tokenizer_config.json").read_text())
    for key in ("tokenizer_class", "added_tokens_decoder"):
        settings.pop(key, None)
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    (directory / "tokenizer.json").unlink()
    hub.models[NAME] = directory
    return directory, list(fast.encode(TEXT).ids)


def test_vocabulary_of_the_hub_becomes_a_fast_tokenizer(
    slow: tuple[Path, list[int]], make_store: MakeStore
) -> None:
    copy = make_store().get(NAME, ignore)
    assert Tokenizer.from_file(str(copy.directory / "tokenizer.json")).encode(TEXT).ids == slow[1]
    assert read_card(copy.directory, NAME).family == "bert"
    (record,) = read_record(copy.directory)
    assert (record.source, record.output) == ("vocab.txt", "tokenizer.json")


def test_vocabulary_of_a_directory_becomes_a_fast_tokenizer_in_the_store(
    slow: tuple[Path, list[int]], tmp_path: Path
) -> None:
    copies = open_copies(tmp_path / "root", 1 << 30)
    copy = copies.find(slow[0], ignore)
    assert copy.directory != slow[0]
    assert Tokenizer.from_file(str(copy.directory / "tokenizer.json")).encode(TEXT).ids == slow[1]
    assert not (slow[0] / "tokenizer.json").exists()


def test_tokenizer_class_without_rules_is_refused_by_name(
    slow: tuple[Path, list[int]], make_store: MakeStore
) -> None:
    (slow[0] / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "XLNetTokenizer"})
    )
    with pytest.raises(
        ModelBroken, match=r"vocab\.txt: tokenizer_class 'XLNetTokenizer' has no conversion"
    ):
        make_store().get(NAME, ignore)


def test_converting_a_vocabulary_needs_no_torch() -> None:
    program = "import sys, libs.conversion.vocabularies; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], timeout=600).returncode == 0
