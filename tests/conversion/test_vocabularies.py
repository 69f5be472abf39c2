"""Fast tokenizers made of vocabulary files give the ids of transformers' own conversion, on odd
texts.
"""

from __future__ import annotations

import importlib
import json
import random
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers

from libs.conversion.archive import CheckpointRefused
from libs.conversion.plan import find_vocabulary
from libs.conversion.sentencepiece import read_pieces
from libs.conversion.vocabularies import tokenizer_json
from tests.support.sentencepieces import DEBERTA, trained
from tests.support.texts import texts

ODD = (
    "naïve Überraschung", "東京タワー", "안녕 하세요", "مرحبا بالعالم", "🥊🇩🇪 👨\u200d👩\u200d👧",
    "e\u0301 a\u0308",
    "\ufdfa ﬁ ½ ①",
    "1,000 2,5 3,", "``quoted''", "don't we'll I'M", "a\u00a0b\u2003c", "  two  spaces   three ",
    "tab\tnew\nline\r\n",
    "\x00\x01\x7f", "\u200b\u202e", "x" * 150, "…—«»", "@#$%^&*()", "<s> </s> [MASK] <mask>",
    "ΑΒΓς İstanbul ǅ ß",
)  # fmt: skip


def odd_texts(count: int = 2_000) -> list[str]:
    chance = random.Random(11)
    plain = texts(200, 3, 30, seed=5)
    made = [*ODD, "", " "]
    while len(made) < count:
        parts = [
            chance.choice(ODD) if chance.random() < 0.5 else chance.choice(plain)
            for _ in range(chance.randint(1, 4))
        ]
        made.append(chance.choice(["", " ", "  "]).join(parts))
    return made


TEXTS = odd_texts()
CORPUS = [*texts(1_000, 5, 40, seed=9), *ODD] * 2


def same_ids(mine: Tokenizer, theirs: Tokenizer) -> None:
    for text in TEXTS:
        assert mine.encode(text).ids == theirs.encode(text).ids, repr(text)
    one, two = mine.encode(TEXTS[0], TEXTS[1]), theirs.encode(TEXTS[0], TEXTS[1])
    assert (one.ids, one.type_ids) == (two.ids, two.type_ids)
    assert mine.get_vocab() == theirs.get_vocab()


def build_tokenizer(files: Mapping[str, bytes | object]) -> Tokenizer:
    contents = {
        name: value if isinstance(value, bytes) else json.dumps(value).encode()
        for name, value in files.items()
    }
    assert find_vocabulary(list(contents))
    return Tokenizer.from_str(tokenizer_json(contents))


def with_specials(theirs: Tokenizer, specials: Mapping[str, str], lstrip: str = "") -> Tokenizer:
    """Add the special tokens with their declared options, as transformers does after converting."""
    from tokenizers import AddedToken

    for content in specials.values():
        theirs.add_special_tokens(
            [AddedToken(content, lstrip=content == lstrip, special=True, normalized=False)]
        )
    return theirs


reference: Any = importlib.import_module("transformers.convert_slow_tokenizer")
"""transformers' package has a function of the same name."""

BERT = {"unk": "[UNK]", "sep": "[SEP]", "pad": "[PAD]", "cls": "[CLS]", "mask": "[MASK]"}
ROBERTA = {"bos": "<s>", "eos": "</s>", "unk": "<unk>", "pad": "<pad>", "mask": "<mask>"}


def wordpiece_vocabulary(specials: list[str]) -> bytes:
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.train_from_iterator(
        CORPUS, trainers.WordPieceTrainer(vocab_size=600, special_tokens=specials)
    )
    return (
        "\n".join(sorted(tokenizer.get_vocab(), key=tokenizer.get_vocab().__getitem__)).encode()
        + b"\n"
    )


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"do_lower_case": False},
        {"strip_accents": False},
        {"tokenize_chinese_chars": False, "do_lower_case": True},
    ],
)
def test_wordpiece_of_bert(settings: dict[str, Any]) -> None:
    vocabulary = wordpiece_vocabulary(list(BERT.values()))
    vocab = {word: number for number, word in enumerate(vocabulary.decode().split("\n")[:-1])}
    basic = SimpleNamespace(
        tokenize_chinese_chars=settings.get("tokenize_chinese_chars", True),
        strip_accents=settings.get("strip_accents"),
        do_lower_case=settings.get("do_lower_case", True),
    )
    slow = SimpleNamespace(
        vocab=vocab, unk_token="[UNK]", basic_tokenizer=basic, cls_token="[CLS]", sep_token="[SEP]",
        cls_token_id=vocab["[CLS]"], sep_token_id=vocab["[SEP]"],
    )  # fmt: skip
    theirs = with_specials(reference.BertConverter(slow).converted(), BERT)
    same_ids(
        build_tokenizer(
            {
                "vocab.txt": vocabulary,
                "config.json": {"model_type": "bert"},
                "tokenizer_config.json": settings,
            }
        ),
        theirs,
    )


def test_wordpiece_of_mpnet() -> None:
    specials = {**ROBERTA, "unk": "[UNK]"}
    vocabulary = wordpiece_vocabulary(list(specials.values()))
    vocab = {word: number for number, word in enumerate(vocabulary.decode().split("\n")[:-1])}
    basic = SimpleNamespace(tokenize_chinese_chars=True, strip_accents=None, do_lower_case=True)
    slow = SimpleNamespace(
        vocab=vocab, unk_token="[UNK]", basic_tokenizer=basic, cls_token="<s>", sep_token="</s>",
        cls_token_id=vocab["<s>"], sep_token_id=vocab["</s>"],
    )  # fmt: skip
    theirs = with_specials(reference.MPNetConverter(slow).converted(), specials, lstrip="<mask>")
    same_ids(
        build_tokenizer(
            {
                "vocab.txt": vocabulary,
                "tokenizer_config.json": {"tokenizer_class": "MPNetTokenizer"},
            }
        ),
        theirs,
    )


def bpe_files(specials: list[str]) -> tuple[dict[str, int], list[tuple[str, str]]]:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        CORPUS,
        trainers.BpeTrainer(vocab_size=700, special_tokens=specials, initial_alphabet=alphabet)
    )  # fmt: skip
    model = json.loads(tokenizer.to_str())["model"]
    return model["vocab"], [tuple(pair) for pair in model["merges"]]


BPE_CLASSES: dict[str, tuple[Any, dict[str, str], str]] = {
    "RobertaTokenizer": (reference.RobertaConverter, ROBERTA, "<mask>"),
    "BartTokenizer": (reference.RobertaConverter, ROBERTA, "<mask>"),
    "GPT2Tokenizer": (reference.GPT2Converter, {"eos": "<|endoftext|>"}, ""),
    "Qwen2Tokenizer": (reference.Qwen2Converter, {"eos": "<|endoftext|>"}, ""),
    "DebertaTokenizer": (reference.DebertaConverter, BERT, "[MASK]"),
}


@pytest.mark.parametrize("add_prefix_space", [False, True])
@pytest.mark.parametrize("name", BPE_CLASSES)
def test_byte_level_bpe(name: str, add_prefix_space: bool) -> None:
    converter, specials, lstrip = BPE_CLASSES[name]
    vocab, merges = bpe_files(list(specials.values()))
    slow = SimpleNamespace(
        encoder=vocab, bpe_ranks=dict(zip(merges, range(len(merges)), strict=True)),
        add_prefix_space=add_prefix_space,
        sep_token="</s>", cls_token="<s>", sep_token_id=vocab.get("</s>"),
        cls_token_id=vocab.get("<s>"),
        convert_tokens_to_ids=vocab.get,
    )  # fmt: skip
    theirs = with_specials(converter(slow).converted(), specials, lstrip)
    lines = "\n".join(["#version: 0.2", *(" ".join(pair) for pair in merges)]) + "\n"
    settings = {"tokenizer_class": name, "add_prefix_space": add_prefix_space}
    same_ids(
        build_tokenizer(
            {"vocab.json": vocab, "merges.txt": lines.encode(), "tokenizer_config.json": settings}
        ),
        theirs,
    )


def fake_slow_tokenizer(path: Path, **more: Any) -> Any:
    """Return an object with the attributes that the converters read from a slow tokenizer.

    Ids of tokens are those of the converted vocabulary.
    """
    return SimpleNamespace(vocab_file=str(path), convert_tokens_to_ids=lambda token: 0, **more)


FAIRSEQ = {"bos_id": 1, "eos_id": 2, "unk_id": 0}
T5 = {"pad_id": 0, "eos_id": 1, "unk_id": 2, "bos_id": -1}
LLAMA = {
    "unk_id": 0,
    "bos_id": 1,
    "eos_id": 2,
    "byte_fallback": True,
    "model_type": "bpe",
    "split_digits": True,
    "remove_extra_whitespaces": False,
    "normalization_rule_name": "identity",
    "vocab_size": 900,
}
GEMMA = LLAMA | {
    "pad_id": 0,
    "eos_id": 1,
    "bos_id": 2,
    "unk_id": 3,
    "add_dummy_prefix": False,
    "allow_whitespace_only_pieces": True,
}
ALBERT = {
    "pad_id": 0,
    "unk_id": 1,
    "bos_id": 2,
    "eos_id": 3,
    "pad_piece": "<pad>",
    "bos_piece": "[CLS]",
    "eos_piece": "[SEP]",
    "control_symbols": "[MASK]",
}

SPM_CLASSES: dict[str,
tuple[Any, dict[str, Any], dict[str, Any], dict[str, Any], dict[str, str], str]] = {
    "DebertaV2Tokenizer": (
        reference.DebertaV2Converter, DEBERTA, {"split_by_punct": False, "do_lower_case": False},
        {}, BERT, ""
    ),
    "DebertaV2Tokenizer, lower case": (
        reference.DebertaV2Converter, DEBERTA, {"split_by_punct": True, "do_lower_case": True},
        {"split_by_punct": True, "do_lower_case": True}, BERT, "",
    ),
    "DebertaV2Tokenizer, mT5's vocabulary": (
        reference.DebertaV2Converter,
        DEBERTA | {"byte_fallback": False,
        "user_defined_symbols": [f"<extra_id_{number}>" for number in range(10)]},
        {"split_by_punct": False, "do_lower_case": False},
        {"vocab_type": "spm"},
        BERT,
        "",
    ),
    "XLMRobertaTokenizer": (reference.XLMRobertaConverter, FAIRSEQ, {}, {}, ROBERTA, "<mask>"),
    "T5Tokenizer": (reference.T5Converter, T5, {"_extra_ids": 100}, {},
    {"eos": "</s>", "unk": "<unk>", "pad": "<pad>"}, ""),
    "AlbertTokenizer": (
        reference.AlbertConverter, ALBERT, {"keep_accents": False, "do_lower_case": True}, {},
        {**BERT, "unk": "<unk>", "pad": "<pad>"}, "[MASK]",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SPM_CLASSES)
def test_sentencepiece(name: str, tmp_path: Path) -> None:
    converter, training, slow, settings, specials, lstrip = SPM_CLASSES[name]
    path = trained(tmp_path, CORPUS, **({"model_type": "unigram"} | training))
    model = fake_slow_tokenizer(path, **slow)
    model.convert_ids_to_tokens = ["<unk>", "<s>", "</s>"].__getitem__
    made = converter(model)
    vocabulary: dict[str, int] = made.tokenizer(made.proto).get_vocab()
    model.convert_tokens_to_ids = lambda token: vocabulary.get(token, len(vocabulary))
    theirs = with_specials(converter(model).converted(), specials, lstrip)
    values = {"tokenizer_class": name.partition(",")[0], **settings}
    same_ids(
        build_tokenizer({"spm.model": path.read_bytes(), "tokenizer_config.json": values}), theirs
    )


_ENCODE = """
import json, sentencepiece, sys
model, texts = json.load(sys.stdin)
print(json.dumps(sentencepiece.SentencePieceProcessor(model_file=model).encode(texts)))
"""


@pytest.mark.parametrize(
    ("name", "training"), [("LlamaTokenizer", LLAMA), ("GemmaTokenizer", GEMMA)]
)
def test_bpe_gives_the_ids_of_sentencepiece(
    name: str, training: dict[str, Any], tmp_path: Path
) -> None:
    """Compare with sentencepiece, which the slow tokenizers of Llama and Gemma call: transformers 5
    cannot convert such a model.
    """
    path = trained(tmp_path, CORPUS, **training)
    plain = [text for text in TEXTS if text and "<" not in text and "\x00" not in text]
    run = subprocess.run(
        [sys.executable, "-c", _ENCODE],
        input=json.dumps([str(path), plain]),
        text=True,
        check=True,
        capture_output=True,
        timeout=600,
    )
    mine = build_tokenizer(
        {
            "tokenizer.model": path.read_bytes(),
            "tokenizer_config.json": {"tokenizer_class": name},
        }
    )
    for text, theirs in zip(plain, json.loads(run.stdout), strict=True):
        assert mine.encode(text).ids == [training["bos_id"], *theirs], repr(text)


_MARIAN = """
import json, sys, warnings
warnings.simplefilter("ignore")
import transformers
folder, texts = json.load(sys.stdin)
files = {"source_spm": "source.spm", "target_spm": "target.spm", "vocab": "vocab.json"}
roles = {role: folder + "/" + name for role, name in files.items()}
tokenizer = transformers.MarianTokenizer(**roles)
ids = [tokenizer(text)["input_ids"] for text in texts]
print(json.dumps([ids, [tokenizer.decode(own, skip_special_tokens=True) for own in ids]]))
"""


def test_marian_gives_the_ids_and_texts_of_transformers(tmp_path: Path) -> None:
    """Ids are those of vocab.json; the reference falls back to them for unknown characters that are
    pieces of the target.
    """
    source = trained(tmp_path, CORPUS, model_type="unigram", unk_id=1, eos_id=0, bos_id=-1)
    source.rename(tmp_path / "source.spm")
    (tmp_path / "target.spm").write_bytes((tmp_path / "source.spm").read_bytes())
    pieces = [piece.text for piece in read_pieces((tmp_path / "source.spm").read_bytes()).pieces]
    random.Random(3).shuffle(
        others := [piece for piece in pieces if piece not in ("</s>", "<unk>")]
    )
    ordered = ["</s>", "<unk>", *others, "▁nur", "▁auf", "▁deutsch", ">>deu<<", "<pad>"]
    (tmp_path / "vocab.json").write_text(
        json.dumps({piece: number for number, piece in enumerate(ordered)})
    )
    asked = [
        *(text for text in TEXTS if "<" not in text and ">" not in text),
        ">>deu<< the licence",
        ">>deu<<the  licence ",
    ]
    run = subprocess.run(
        [sys.executable, "-c", _MARIAN],
        input=json.dumps([str(tmp_path), asked]),
        text=True,
        check=True,
        capture_output=True,
        timeout=600,
    )
    ids, decoded = json.loads(run.stdout)
    files = {name: (tmp_path / name).read_bytes() for name in ("source.spm", "vocab.json")}
    mine = build_tokenizer(
        {**files, "tokenizer_config.json": {"tokenizer_class": "MarianTokenizer"}}
    )
    for text, own, read in zip(asked, ids, decoded, strict=True):
        assert mine.encode(text).ids == own, repr(text)
        assert mine.decode(own).strip() == read, repr(text)
    assert mine.get_vocab() == {piece: number for number, piece in enumerate(ordered)}


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"vocab.json": {"</s>": 0, "<unk>": 2}}, "its ids are not 0 to 1"),
        ({"vocab.json": {"</s>": 0}}, "has no unknown token"),
        ({"tokenizer_config.json": {"separate_vocabs": True}}, "a vocabulary for each language"),
    ],
)
def test_marian_vocabularies_that_are_refused(
    changes: dict[str, object], problem: str, tmp_path: Path
) -> None:
    source = trained(tmp_path, CORPUS, model_type="unigram").read_bytes()
    files = {
        "source.spm": source,
        "vocab.json": {"</s>": 0, "<unk>": 1},
        "config.json": {"model_type": "marian"},
    }
    with pytest.raises(CheckpointRefused, match=problem):
        build_tokenizer({**files, **changes})


def test_added_tokens_have_the_ids_of_their_file() -> None:
    vocabulary = wordpiece_vocabulary(list(BERT.values()))
    size = vocabulary.count(b"\n")
    added = {"<<ENT>>": size, "<<SEP>>": size + 1}
    files = {
        "vocab.txt": vocabulary,
        "config.json": {"model_type": "bert"},
        "added_tokens.json": added,
    }
    tokenizer = build_tokenizer(files)
    assert {token: tokenizer.token_to_id(token) for token in added} == added
    gapped = build_tokenizer({**files, "added_tokens.json": {"<<ENT>>": size, "<<SEP>>": size + 3}})
    assert [gapped.token_to_id(token) for token in added] == [size, size + 3]
    assert gapped.encode("<<SEP>> x").ids[1] == size + 3
    with pytest.raises(CheckpointRefused, match="has the id 9999"):
        build_tokenizer({**files, "added_tokens.json": {"<<ENT>>": 9_999}})


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "unknown class": ({"vocab.txt": b"a\n",
    "tokenizer_config.json": {"tokenizer_class": "XLNetTokenizer"}}, "XLNetTokenizer"),
    "unknown type": ({"vocab.txt": b"a\n", "config.json": {"model_type": "whisper"}}, "whisper"),
    "not utf-8": ({"vocab.txt": b"\xff\n", "config.json": {"model_type": "bert"}}, "UTF-8"),
    "not protobuf": ({"spm.model": b"\xff" * 40, "config.json": {"model_type": "deberta-v2"}},
    "SentencePiece"),
    "no pieces": ({"spm.model": b"", "config.json": {"model_type": "deberta-v2"}}, "no pieces"),
    "no special tokens": ({"vocab.txt": b"a\n", "config.json": {"model_type": "bert"}}, ""),
    "merges": ({"vocab.json": {"a": 0}, "merges.txt": b"a b c\n",
    "config.json": {"model_type": "gpt2"}}, "two pieces"),
    "ids": ({"vocab.json": {"a": -1}, "merges.txt": b"", "config.json": {"model_type": "gpt2"}},
    "has the id"),
}  # fmt: skip


@pytest.mark.parametrize("name", [name for name in BAD if BAD[name][1]])
def test_bad_files_are_refused_by_name(name: str) -> None:
    files, problem = BAD[name]
    with pytest.raises(CheckpointRefused, match=problem):
        build_tokenizer(files)
