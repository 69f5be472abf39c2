"""Tokenize and Detokenize against transformers' tokenizers: ids, places in the text, names,
truncation and decoded texts.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from shoal.tokens import Tokens

from libs.errors import InputTooLong, InvalidInput, TaskNotSupported
from libs.models import PackedModel, load_served_model
from libs.models.interface.results import DetokenizeResult, TokenizeResult
from libs.models.interface.work import DetokenizeWork, TokenizeWork, Truncation, never_cancelled
from libs.models.text.tokens import TokenProcessor
from tests.generation.served import write
from tests.parity import image_models
from tests.parity.checkpoints import Kind, SentenceFiles, write_checkpoint
from tests.parity.image_repositories import write_repository
from tests.parity.test_heads import load

pytestmark = pytest.mark.filterwarnings("ignore")

KINDS: tuple[Kind, ...] = (
    "bert",
    "mpnet",
    "roberta",
    "xlm-roberta",
    "deberta-v2",
    "qwen3",
    "llama",
    "gemma2",
    "t5",
)
TEXTS = [
    "A Warranty covers the battery for 24 months.",
    "東京で新しい電池を買いました。中国、한국어",
    "family 👨‍👩‍👧‍👦 flags 🇨🇭 and skin 👍🏽!",
    "cafe\u0301 na\u0308ive A\u030angstro\u0308m, n\u0303\u0301",
    "first line\r\nsecond\r\n\r\n\tthird  \r\n",
    "שלום עולם, \u202bمرحبا بالعالم\u202c and ﷺ",  # noqa: RUF001  # text from right to left
    " leading, trailing  ",
    "[MASK] <mask> </s> [SEP] <unk>",
    "a",
    "",
]


@pytest.fixture(scope="module", params=KINDS)
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(
        request.param, tmp_path_factory.mktemp("model"), sentence=SentenceFiles(max_seq_length=16)
    )


@pytest.fixture(scope="module")
def model(directory: Path) -> PackedModel:
    return load(directory)


def tokenize(model: PackedModel, work: TokenizeWork) -> list[Tokens]:
    prepared = model.prepare(work)
    assert not prepared.sequences, "no forward pass is needed"
    result = model.finish(prepared, [])
    assert isinstance(result, TokenizeResult)
    assert result.max_tokens == model.card.max_tokens
    assert prepared.tokens == sum(item.count for item in result.items)
    return result.items


def detokenize(model: PackedModel, work: DetokenizeWork) -> list[str]:
    result = model.finish(model.prepare(work), [])
    assert isinstance(result, DetokenizeResult)
    return result.texts


@pytest.mark.parametrize("special", [True, False])
def test_ids_places_and_names_equal_transformers(
    model: PackedModel, directory: Path, special: bool
) -> None:
    theirs = transformers.AutoTokenizer.from_pretrained(directory)
    found = tokenize(model, TokenizeWork(TEXTS, add_special_tokens=special, return_tokens=True))
    for text, item in zip(TEXTS, found, strict=True):
        wanted = theirs(
            text,
            add_special_tokens=special,
            return_offsets_mapping=True,
            return_special_tokens_mask=True,
            truncation=False,
        )
        assert item.ids.tolist() == wanted["input_ids"], text
        assert (
            list(zip(item.starts.tolist(), item.ends.tolist(), strict=True))
            == wanted["offset_mapping"]
        ), text
        assert list(item.names) == theirs.convert_ids_to_tokens(wanted["input_ids"]), text
        mask = np.zeros(item.count, int)
        mask[: item.special_before] = 1
        mask[item.count - item.special_after :] = 1
        assert (
            mask.tolist()
            == theirs._tokenizer.encode(text, add_special_tokens=special).special_tokens_mask
        ), text
        assert item.count == len(item.ids)


def test_counts_alone_are_those_of_whole_texts(model: PackedModel) -> None:
    whole = tokenize(model, TokenizeWork(TEXTS))
    counted = tokenize(model, TokenizeWork(TEXTS, count_only=True))
    assert [item.count for item in counted] == [item.count for item in whole]
    assert [item.kept_tokens for item in counted] == [min(item.count, 16) for item in whole]
    assert not any(len(item.ids) for item in counted)


@pytest.mark.parametrize("side", ["end", "start"])
def test_truncation_returns_the_tokens_that_encode_keeps(
    model: PackedModel, directory: Path, side: Truncation
) -> None:
    theirs = transformers.AutoTokenizer.from_pretrained(directory)
    theirs.truncation_side = "right" if side == "end" else "left"
    for text, item in zip(
        TEXTS, tokenize(model, TokenizeWork(TEXTS, truncation=side)), strict=True
    ):
        wanted = theirs(text, truncation=True, max_length=16)["input_ids"]
        assert item.ids.tolist() == wanted, text
        assert item.kept_tokens == len(wanted)
        if item.count <= 16:
            assert (item.kept_start, item.kept_end) == (0, len(text))
            continue
        own = slice(item.special_before, len(item.ids) - item.special_after)
        assert item.kept_start == (0 if side == "end" else item.starts[own][0])
        assert item.kept_end == (item.ends[own][-1] if side == "end" else len(text))


def test_preview_does_not_truncate(model: PackedModel) -> None:
    cut = tokenize(model, TokenizeWork(TEXTS, truncation=model.card.truncation))
    for whole, kept in zip(tokenize(model, TokenizeWork(TEXTS)), cut, strict=True):
        assert len(whole.ids) == whole.count
        assert (whole.kept_tokens, whole.kept_start, whole.kept_end) == (
            kept.kept_tokens,
            kept.kept_start,
            kept.kept_end,
        )


def test_text_too_long_without_truncation_is_refused_with_path(model: PackedModel) -> None:
    with pytest.raises(InputTooLong) as caught:
        model.prepare(TokenizeWork(["short", "word " * 40], truncation="none"))
    assert caught.value.field == "texts[1]"


@pytest.mark.parametrize("skip", [True, False])
def test_texts_of_ids_equal_transformers(model: PackedModel, directory: Path, skip: bool) -> None:
    theirs = transformers.AutoTokenizer.from_pretrained(directory)
    ids = [item.ids for item in tokenize(model, TokenizeWork(TEXTS))]
    wanted = [
        theirs.decode(one.tolist(), skip_special_tokens=skip, clean_up_tokenization_spaces=False)
        for one in ids
    ]
    assert detokenize(model, DetokenizeWork(ids, skip_special_tokens=skip)) == wanted


def test_id_beyond_the_vocabulary_is_refused_with_its_path(model: PackedModel) -> None:
    good, bad = np.array([1, 2], np.uint32), np.array([1, 2, 123_456_789], np.uint32)
    with pytest.raises(InvalidInput, match="not in the vocabulary") as caught:
        model.prepare(DetokenizeWork([good, bad]))
    assert caught.value.field == "sequences[1].ids[2]"


def test_long_token_names_stay_within_the_routers_limit(tmp_path: Path) -> None:
    """A hostile tokenizer has a token of 1,000 characters, which a router counts as 64 bytes."""
    model = load(write_checkpoint("bert", tmp_path, sentence=SentenceFiles(max_seq_length=16)))
    processor = model.tokens
    assert isinstance(processor, TokenProcessor)
    processor._tokenizer.add_tokens(["x" * 1000])
    number = processor._tokenizer.token_to_id("x" * 1000)
    with pytest.raises(InputTooLong) as caught:
        model.prepare(DetokenizeWork([np.full(2000, number, np.uint32)]))
    assert caught.value.field == "sequences[0]"


def test_only_image_models_with_text_encoders_tokenize(
    tmp_path: Path,
) -> None:
    write_repository("clip", tmp_path / "clip")
    (item,) = tokenize(load(tmp_path / "clip"), TokenizeWork(["a red boat"]))
    assert (
        item.ids.tolist()
        == transformers.AutoTokenizer.from_pretrained(tmp_path / "clip")("a red boat")["input_ids"]
    )
    image_models.write_checkpoint("vit", tmp_path / "vit")
    with pytest.raises(TaskNotSupported, match="has no tokenizer"):
        load(tmp_path / "vit").prepare(TokenizeWork(["a red boat"]))


def test_generative_models_tokenize_without_a_forward_pass(tmp_path: Path) -> None:
    write("qwen3", tmp_path)
    language_model = load_served_model(
        tmp_path, "test/language_model", torch.device("cpu"), torch.float32
    )
    prepared = language_model.prepare(TokenizeWork(["a text"]), never_cancelled)
    result = language_model.finish(prepared, [])
    assert isinstance(result, TokenizeResult)
    assert (
        result.items[0].ids.tolist()
        == transformers.AutoTokenizer.from_pretrained(tmp_path)("a text")["input_ids"]
    )
    assert not prepared.sequences


def test_preparation_is_cancelled_between_slices(model: PackedModel) -> None:
    """A cancelled job ends before the next slice of its texts."""
    calls = 0

    def cancel() -> None:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise InterruptedError

    with pytest.raises(InterruptedError):
        model.prepare(TokenizeWork(["word " * 5000] * 10), cancel)
    calls = 0
    with pytest.raises(InterruptedError):
        model.prepare(DetokenizeWork([np.ones(20_000, np.uint32)] * 10), cancel)
