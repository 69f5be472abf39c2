"""tokenizer_config.json changes token ids as it does in transformers' AutoTokenizer."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
import transformers
from sentence_transformers import CrossEncoder, SentenceTransformer
from tokenizers import Tokenizer

from libs.catalog.detect import read_card
from libs.errors import ModelBroken
from libs.models import EncodeResult, EncodeWork, ScoreWork, with_truncation
from libs.models.text.tokenising.bounds import MAX_NAME
from libs.models.text.tokenising.tokenizer import load_tokenizer
from tests.models.restoring import restore
from tests.parity.checkpoints import Kind, SentenceFiles, write_checkpoint
from tests.parity.test_heads import assert_close, load, run, scores

pytestmark = pytest.mark.filterwarnings("ignore")

TEXTS = [
    "A Warranty Covers the Battery",
    "ÜBER café naïve Ångström",
    "first line\nsecond 漢字 line",
    "<extra> in the middle<extra> and [MASK] or <mask> too",
    " leading space",
    "",
]


def rewrite(directory: Path, settings: Mapping[str, object], **changes: object) -> None:
    """Replace tokenizer_config.json, and parts of tokenizer.json."""
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    path = directory / "tokenizer.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def assert_same_ids(directory: Path) -> None:
    theirs = transformers.AutoTokenizer.from_pretrained(directory)
    ours = load_tokenizer(directory, lowercase=False)
    for text in TEXTS:
        assert ours.encode(text).ids == theirs(text)["input_ids"], text


@pytest.mark.parametrize("lowercase", [False, True])
@pytest.mark.parametrize(
    "settings",
    [
        {"do_lower_case": True},
        {"do_lower_case": False},
        {},
        {"do_lower_case": True, "strip_accents": False},
        {"do_lower_case": False, "strip_accents": True},
        {"do_lower_case": True, "tokenize_chinese_chars": False},
    ],
)
@pytest.mark.parametrize(
    "name", ["BertTokenizer", "DistilBertTokenizerFast", "PreTrainedTokenizerFast", None]
)
def test_normaliser_of_bert(
    tmp_path: Path, name: str | None, settings: dict[str, object], lowercase: bool
) -> None:
    write_checkpoint("bert", tmp_path)
    own = {
        "type": "BertNormalizer",
        "clean_text": True,
        "handle_chinese_chars": True,
        "strip_accents": None,
    }
    named = {} if name is None else {"tokenizer_class": name}
    rewrite(tmp_path, settings | named, normalizer=own | {"lowercase": lowercase})
    assert_same_ids(tmp_path)


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("settings", [{"add_prefix_space": True}, {"add_prefix_space": False}, {}])
@pytest.mark.parametrize("name", ["RobertaTokenizerFast", "PreTrainedTokenizerFast"])
def test_prefix_space_of_roberta(
    tmp_path: Path, name: str, settings: dict[str, object], own: bool
) -> None:
    write_checkpoint("roberta", tmp_path)
    splitter = {
        "type": "ByteLevel",
        "add_prefix_space": own,
        "trim_offsets": True,
        "use_regex": True,
    }
    rewrite(tmp_path, settings | {"tokenizer_class": name}, pre_tokenizer=splitter)
    assert_same_ids(tmp_path)


@pytest.mark.parametrize("kind", ["bert", "roberta"])
@pytest.mark.parametrize(
    "flags", [{}, {"lstrip": True}, {"special": True}, {"single_word": True, "normalized": False}]
)
def test_added_tokens_that_only_the_configuration_has(
    tmp_path: Path, kind: Kind, flags: dict[str, object]
) -> None:
    write_checkpoint(kind, tmp_path)
    count = load_tokenizer(tmp_path, lowercase=False).get_vocab_size()
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    plain = {
        "lstrip": False,
        "rstrip": False,
        "single_word": False,
        "normalized": True,
        "special": False,
    }
    listed = {
        str(token): {
            "content": each.content,
            "special": each.special,
            "normalized": each.normalized,
            "lstrip": each.lstrip,
        }
        for token, each in load_tokenizer(tmp_path, lowercase=False)
        .get_added_tokens_decoder()
        .items()
    }
    listed[str(count)] = {"content": "<extra>"} | plain | flags
    rewrite(tmp_path, settings | {"added_tokens_decoder": listed})
    assert load_tokenizer(tmp_path, lowercase=False).token_to_id("<extra>") == count
    assert_same_ids(tmp_path)


@pytest.mark.parametrize(
    ("listed", "message"),
    [
        ({"x": {"content": "a"}}, "entry 'x'"),
        ({"500": "a"}, "entry '500'"),
        ({"500": {"content": 3}}, "`content` must be a string"),
        ({"500": {"content": "a", "lstrip": 1}}, "`lstrip` must be true or false"),
        ({"500": {"content": "a" * (MAX_NAME + 1)}}, "has a token of"),
    ],
)
def test_added_tokens_that_cannot_be_read_are_refused(
    tmp_path: Path, listed: dict[str, object], message: str
) -> None:
    write_checkpoint("bert", tmp_path)
    rewrite(tmp_path, {"added_tokens_decoder": listed})
    with pytest.raises(ModelBroken, match=message):
        load_tokenizer(tmp_path, lowercase=False)


@pytest.mark.parametrize("named", [True, False])
def test_token_types_are_given_only_where_the_tokenizer_has_them(
    tmp_path: Path, named: bool
) -> None:
    write_checkpoint("bert", tmp_path, head="sequence_classification")
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    inputs = ["input_ids", *(["token_type_ids"] if named else []), "attention_mask"]
    rewrite(tmp_path, settings | {"model_input_names": inputs})
    reference = CrossEncoder(str(tmp_path), device="cpu", activation_fn=torch.nn.Identity())
    assert_close(
        scores(load(tmp_path), ScoreWork("warranty", TEXTS[:3])),
        reference.predict([("warranty", one) for one in TEXTS[:3]]),
    )


@pytest.mark.parametrize("side", ["left", "right"])
def test_long_texts_are_cut_at_the_side_of_the_configuration(tmp_path: Path, side: str) -> None:
    write_checkpoint("bert", tmp_path, sentence=SentenceFiles(max_seq_length=None))
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps(settings | {"truncation_side": side})
    )
    model, reference = load(tmp_path), SentenceTransformer(str(tmp_path), device="cpu")
    texts = [" ".join(f"{word} licence" for word in range(200)), "short"]
    work = with_truncation(EncodeWork(texts, truncation="default"), model.card)
    result = run(model, work)[0]
    assert isinstance(result, EncodeResult)
    assert result.dense is not None
    assert_close(restore(result.dense), reference.encode(texts))
    own = with_truncation(EncodeWork(texts, truncation="none"), model.card)
    assert isinstance(own, EncodeWork)
    assert own.truncation == "none"


@pytest.mark.parametrize("own", [{}, {"truncation_side": "right"}])
def test_long_texts_are_cut_at_the_side_saved_with_the_tokenizer(
    tmp_path: Path, own: dict[str, str]
) -> None:
    write_checkpoint("bert", tmp_path)
    saved = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    saved.enable_truncation(64, direction="left")
    saved.save(str(tmp_path / "tokenizer.json"))
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings | own))
    side = transformers.AutoTokenizer.from_pretrained(tmp_path).truncation_side
    assert side == own.get("truncation_side", "left")
    assert read_card(tmp_path, "test/model").truncation == {"left": "start", "right": "end"}[side]


def test_unknown_side_is_refused(tmp_path: Path) -> None:
    write_checkpoint("bert", tmp_path)
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps(settings | {"truncation_side": "middle"})
    )
    with pytest.raises(
        ModelBroken, match="`truncation_side` is 'middle', which is not one of right, left"
    ):
        load(tmp_path)
