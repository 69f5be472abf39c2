"""Tokenize and Detokenize through a whole mesh with real tokenizers, and through the edge in TEI's
and vLLM's dialects.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import shoal
import transformers
from shoal.errors import InputTooLong, InvalidInput, ModelNotFound

from services.edge.app import running
from services.edge.settings import Settings
from services.local.settings import MINILM
from tests.edge.parts import Http
from tests.support.cluster import Cluster
from tests.support.texts import texts

TEXTS = [
    *texts(40, shortest=1, longest=400),
    "東京で新しい電池を買いました。中国、한국어",
    "family 👨‍👩‍👧‍👦 flags 🇨🇭 and skin 👍🏽!",
    "cafe\u0301 na\u0308ive A\u030angstro\u0308m",
    "first line\r\nsecond\r\n\r\n\tthird  \r\n",
    "שלום עולם, \u202bمرحبا\u202c",  # noqa: RUF001  # text from right to left
    "",
]
LIMIT = 256
LEFT = "random/bert-left"


@pytest.fixture(scope="module")
def reference(minilm: Path) -> transformers.PreTrainedTokenizerBase:
    tokenizer = transformers.AutoTokenizer.from_pretrained(minilm)
    assert isinstance(tokenizer, transformers.PreTrainedTokenizerBase)
    return tokenizer


def test_tokens_equal_transformers(
    client: shoal.Client, reference: transformers.PreTrainedTokenizerBase
) -> None:
    result = client.tokenize(MINILM, TEXTS, return_tokens=True)
    assert (len(result), result.max_tokens) == (len(TEXTS), LIMIT)
    for text, found in zip(TEXTS, result, strict=True):
        wanted = reference(text, return_offsets_mapping=True, truncation=False)
        assert found.ids.tolist() == wanted["input_ids"]
        assert (
            list(zip(found.starts.tolist(), found.ends.tolist(), strict=True))
            == wanted["offset_mapping"]
        )
        assert list(found.names) == reference.convert_ids_to_tokens(wanted["input_ids"])
        assert (found.count, found.kept_tokens) == (
            len(wanted["input_ids"]),
            min(LIMIT, len(wanted["input_ids"])),
        )
        assert (found.special_before, found.special_after) == (1, 1)
        assert found.is_special(0)
    assert result.usage.input_tokens == sum(result.counts)
    assert result.timings.forward_seconds == 0, "nothing is computed"
    assert client.tokenize(MINILM, TEXTS, count_only=True).counts == result.counts
    assert client.encode(MINILM, TEXTS[:-1]).usage.input_tokens == sum(
        found.kept_tokens for found in list(result)[:-1]
    )


def test_truncation_by_encode_is_visible_in_tokenize(client: shoal.Client) -> None:
    text = " ".join(f"word{number}" for number in range(40))
    (found,) = client.tokenize(LEFT, text)
    assert found.count > found.kept_tokens == 16
    assert 0 < found.kept_start < found.kept_end == len(text), (
        "this model's texts lose their beginning"
    )
    (cut,) = client.tokenize(LEFT, text, truncation="start")
    assert len(cut.ids) == 16
    assert cut.starts[cut.special_before] == found.kept_start
    with pytest.raises(InputTooLong) as caught:
        client.tokenize(LEFT, ["short", text], truncation="none")
    assert caught.value.field == "texts[1]"


def test_detokenized_texts_equal_transformers(
    client: shoal.Client, reference: transformers.PreTrainedTokenizerBase
) -> None:
    ids = [found.ids.tolist() for found in client.tokenize(MINILM, TEXTS)]
    for skip in (False, True):
        wanted = [
            reference.decode(one, skip_special_tokens=skip, clean_up_tokenization_spaces=False)
            for one in ids
        ]
        assert list(client.detokenize(MINILM, ids, skip_special_tokens=skip).texts) == wanted
    assert client.detokenize(MINILM, ids[0], skip_special_tokens=True).texts == (wanted[0],)
    with pytest.raises(InvalidInput) as caught:
        client.detokenize(MINILM, [[101], [101, 10_000_000]])
    assert caught.value.field == "sequences[1].ids[1]"


def test_large_call_is_split_and_answered_in_order(mesh: Cluster) -> None:
    many = [f"{number} {'word ' * (number % 50)}" for number in range(3000)]
    with shoal.Client(mesh.address, request_items=2000, request_characters=200_000) as client:
        done: list[int] = []
        result = client.tokenize(MINILM, many, on_progress=lambda part, _: done.append(part))
        assert len(done) > 1
        back = client.detokenize(
            MINILM, [found.ids for found in result], skip_special_tokens=True
        ).texts
    assert [text.split() for text in back] == [text.split() for text in many]


def test_model_is_loaded_for_its_tokenizer(client: shoal.Client) -> None:
    assert client.tokenize("random/t5-embed", "a text").counts[0] > 0
    with pytest.raises(ModelNotFound):
        client.tokenize("nobody/nothing", "a text")
    with pytest.raises(InvalidInput) as caught:
        client.tokenize(MINILM, ["a", "\ud800"])
    assert caught.value.field == "texts[1]"


async def test_edge_answers_like_tei_and_vllm(
    mesh: Cluster, reference: transformers.PreTrainedTokenizerBase
) -> None:
    settings = Settings(
        edge_id="edge", address="127.0.0.1:0", routers=tuple(mesh.addresses), deadline_seconds=120.0
    )
    async with running(settings) as address:
        http = Http(address)
        tei = (await http.post(f"/tei/{MINILM}/tokenize", {"inputs": TEXTS})).json
        for text, tokens in zip(TEXTS, tei, strict=True):
            wanted = reference(text, return_offsets_mapping=True, truncation=False)
            assert [token["id"] for token in tokens] == wanted["input_ids"]
            assert [token["special"] for token in tokens] == [
                True,
                *[False] * (len(tokens) - 2),
                True,
            ]
            assert (tokens[0]["text"], tokens[0]["start"]) == ("[CLS]", None)
            for token, (start, end) in list(zip(tokens, wanted["offset_mapping"], strict=True))[
                1:-1
            ]:
                assert (
                    token["text"]
                    == text[start:end]
                    == text.encode()[token["start"] : token["stop"]].decode()
                )
        ids = [[token["id"] for token in tokens] for tokens in tei]
        decoded = (await http.post(f"/tei/{MINILM}/decode", {"ids": ids})).json
        assert decoded == [
            reference.decode(one, skip_special_tokens=True, clean_up_tokenization_spaces=False)
            for one in ids
        ]
        reported = (
            await http.post(
                "/tokenize", {"model": MINILM, "prompt": TEXTS[40], "return_token_strs": True}
            )
        ).json
        assert (reported["tokens"], reported["max_model_len"], reported["count"]) == (
            ids[40],
            LIMIT,
            len(ids[40]),
        )
        assert reported["token_strs"] == reference.convert_ids_to_tokens(ids[40])
        back = (await http.post("/detokenize", {"model": MINILM, "tokens": ids[40]})).json
        assert back == {"prompt": reference.decode(ids[40], clean_up_tokenization_spaces=False)}
