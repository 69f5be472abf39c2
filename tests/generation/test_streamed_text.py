"""The streamed text of an unfinished answer has whole characters, and never changes."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import Tokenizer

from libs.models.generation.texts import TextReader
from tests.parity.checkpoints import Kind, write_tokenizer

TEXT = "naïve \N{GRINNING FACE} and 日本語, \N{HOT BEVERAGE}\N{VARIATION SELECTOR-16} end"


@pytest.mark.parametrize("kind", ["qwen3", "llama"])
def test_text_grows_by_whole_characters(kind: Kind, tmp_path: Path) -> None:
    write_tokenizer(kind, tmp_path, 300)
    reader = TextReader.__new__(TextReader)
    reader.tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    ids = reader.tokenizer.encode(TEXT, add_special_tokens=False).ids
    whole = reader.tokenizer.decode(ids).strip()
    texts = [reader.text(ids[:count]).strip() for count in range(len(ids) + 1)]
    assert all("\ufffd" not in text for text in texts)
    assert all(whole.startswith(text) for text in texts)
    assert texts[-1] == whole
    assert len(set(texts)) >= 5
