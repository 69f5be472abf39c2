"""Checkpoints that were written to do harm are refused as broken, naming file and key, before they
take time, memory or a thread.

More of them, by the thousand: tests/fuzz.
"""

from __future__ import annotations

import base64
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

import numpy as np
import pytest
import torch
from safetensors.numpy import save
from tokenizers import Tokenizer

from libs.catalog.checkpoint import files
from libs.catalog.checkpoint.files import (
    MAX_HEADER_BYTES,
    MAX_INDEXED_TENSORS,
    MAX_JSON_BYTES,
    MAX_SHARDS,
)
from libs.catalog.detect import read_card
from libs.errors import InvalidInput, ModelBroken
from libs.kinds.gliner.card import read_gliner
from libs.models import EncodeWork, PackedModel, load_model
from libs.models.text.heads.extraction.spans import enumerate_spans
from libs.models.text.tokenising.chat import _messages
from libs.models.text.tokenising.regexes import PUBLISHED, slow, tried
from libs.models.text.tokenising.renderer import rendered, rendered_text
from libs.models.text.tokenising.tokenizer import load_tokenizer
from libs.models.weights import TensorFile
from services.worker.machine import disk
from services.worker.mesh import codec
from tests.fuzz import tiny
from tests.fuzz.run import limited
from tests.support.peak import Peak

BYTES = 512 << 20
"""Memory limit of a refusal."""


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return tiny.write(tmp_path / "org" / "tiny")


def load(directory: Path) -> PackedModel:
    return load_model(directory, "org/tiny", torch.device("cpu"), torch.float32)


def change(directory: Path, name: str, **values: object) -> None:
    path = directory / name
    path.write_text(json.dumps(json.loads(path.read_bytes()) | values))


def encode(model: PackedModel, text: str = "a text") -> None:
    prepared = model.prepare(EncodeWork(texts=[text]))
    model.finish(prepared, model.forward(prepared.head, prepared.sequences))


def test_checkpoint_that_all_others_are_made_from_is_served(checkpoint: Path) -> None:
    encode(load(checkpoint))


# Files that are none, or lie elsewhere


def out(path: Path) -> None:
    target = path.parents[1] / "elsewhere"
    target.write_bytes(path.read_bytes())
    path.unlink()
    path.symlink_to(target)


def pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def loop(path: Path) -> None:
    path.unlink()
    path.symlink_to(path.name)


def device(path: Path) -> None:
    path.unlink()
    path.symlink_to("/dev/zero")


@pytest.mark.parametrize(
    "name", ["config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors"]
)
@pytest.mark.parametrize("put", [out, pipe, loop, device])
def test_files_outside_the_checkpoint_are_not_read(
    checkpoint: Path, name: str, put: Callable[[Path], None]
) -> None:
    put(checkpoint / name)
    with pytest.raises(ModelBroken, match=name.replace(".", r"\.")):
        load(checkpoint)


def test_links_within_a_checkpoint_are_followed(checkpoint: Path) -> None:
    (checkpoint / "real.safetensors").write_bytes((checkpoint / "model.safetensors").read_bytes())
    (checkpoint / "model.safetensors").unlink()
    (checkpoint / "model.safetensors").symlink_to("real.safetensors")
    encode(load(checkpoint))


def test_links_of_the_hugging_face_cache_are_followed(checkpoint: Path, tmp_path: Path) -> None:
    cached = tmp_path / "hub/models--org--tiny"
    snapshot = cached / "snapshots/0123"
    for number, file in enumerate(path for path in checkpoint.rglob("*") if path.is_file()):
        link = snapshot / file.relative_to(checkpoint)
        link.parent.mkdir(parents=True, exist_ok=True)
        blob = cached / f"blobs/{number}"
        blob.parent.mkdir(exist_ok=True)
        blob.write_bytes(file.read_bytes())
        link.symlink_to(os.path.relpath(blob, link.parent))
    encode(load(snapshot))
    other = tmp_path / "hub/models--org--other/blobs/secret"
    other.parent.mkdir(parents=True)
    other.write_bytes((checkpoint / "config.json").read_bytes())
    (snapshot / "config.json").unlink()
    (snapshot / "config.json").symlink_to(other)
    with pytest.raises(ModelBroken, match=r"config\.json.*leads out of the checkpoint"):
        load(snapshot)


# JSON and configurations


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("[" * 100_000, "cannot be read as JSON"),
        ('{"a":' * 65 + "1" + "}" * 65, "nested more than 64 levels"),
        ('{"hidden_size": 1' + "0" * 50 + "}", "51 digits"),
        ('{"model_type": "\\ud800"}', "surrogates"),
        ('{"a": "' + "x" * MAX_JSON_BYTES + '"}', "above the limit"),
    ],
)
def test_json_that_would_fail_later_is_refused_when_it_is_read(
    checkpoint: Path, text: str, problem: str
) -> None:
    (checkpoint / "config.json").write_text(text)
    with limited(BYTES), pytest.raises(ModelBroken, match=rf"config\.json: .*{problem}"):
        load(checkpoint)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("num_hidden_layers", 10**9), ("hidden_size", 10**12), ("vocab_size", 10**15),
        ("num_attention_heads", 10**9),
        ("intermediate_size", -1), ("layer_norm_eps", float("nan")),
        ("layer_norm_eps", float("inf")), ("type_vocab_size", 10**12),
        ("max_position_embeddings", 0), ("hidden_size", "8"), ("num_hidden_layers", True),
        ("max_position_embeddings", 10**12),
    ],
)  # fmt: skip
def test_sizes_beyond_every_model_take_no_memory(checkpoint: Path, key: str, value: object) -> None:
    change(checkpoint, "config.json", **{key: value})
    with limited(BYTES), pytest.raises(ModelBroken, match=rf"config\.json.*{key}"):
        load(checkpoint)


def test_every_card_fits_into_a_report(checkpoint: Path) -> None:
    """A worker reports the cards of all models on its disk in one message: a single invalid card
    would silence it.
    """
    for changes in (
        {"hidden_size": 2**40},
        {"num_labels": 10**9, "architectures": ["BertForSequenceClassification"]},
    ):
        (checkpoint / "modules.json").unlink(missing_ok=True)
        change(checkpoint, "config.json", **changes)
        with (
            limited(BYTES),
            pytest.raises(ModelBroken, match=rf"config\.json: `{next(iter(changes))}`"),
        ):
            codec.to_card(read_card(checkpoint, "org/tiny"))


def test_every_failure_fits_into_a_report(tmp_path: Path) -> None:
    name = os.fsdecode(b"\xff\xfe" * 1000)
    failure = codec.encode_failure(ModelBroken(f"{name}: cannot be read"))
    assert "udcff" in failure.message
    assert len(failure.message.encode()) < 10_000


def test_prompts_and_names_in_heartbeats_are_bounded(
    checkpoint: Path,
) -> None:
    change(checkpoint, "config_sentence_transformers.json", prompts={"query": "q" * 100_000})
    with pytest.raises(ModelBroken, match="`prompts` has more than 65,536 characters"):
        read_card(checkpoint, "org/tiny")
    change(
        checkpoint,
        "config_sentence_transformers.json",
        prompts={f"p{number}": "x" for number in range(1001)},
    )
    with pytest.raises(ModelBroken, match="`prompts` has 1,001 entries"):
        read_card(checkpoint, "org/tiny")
    (checkpoint / "modules.json").unlink()
    names = {str(number): "x" * 10_000 for number in range(100)}
    change(
        checkpoint, "config.json", architectures=["BertForSequenceClassification"], id2label=names
    )
    change(checkpoint, "config_sentence_transformers.json", prompts={})
    with pytest.raises(ModelBroken, match="`id2label` has names of more than 524,288 characters"):
        read_card(checkpoint, "org/tiny")


@pytest.mark.parametrize(("key", "value"), [("max_width", 10**9), ("max_len", 10**9)])
def test_number_of_spans_is_bounded(checkpoint: Path, key: str, value: int) -> None:
    """GLiNER lists words x width spans for each text, whatever of them lies in it."""
    settings = {
        "encoder_config": dict(tiny.CONFIG),
        "hidden_size": 8,
        "span_mode": "markerV0",
        key: value,
    }
    (checkpoint / "gliner_config.json").write_text(json.dumps(settings))
    with (
        limited(BYTES),
        pytest.raises(ModelBroken, match=rf"gliner_config\.json: `{key}` is 1000000000"),
    ):
        read_gliner(checkpoint)
    with limited(BYTES):
        assert len(enumerate_spans(3, 1 << 30)[0]) == 6


# Tensors


def write_tensors(directory: Path, header: object, data: bytes = b"") -> None:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    (directory / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + data)


F32 = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}


@pytest.mark.parametrize(
    ("header", "problem"),
    [
        ([F32], "damaged header"),
        ({"a": F32, "b": F32}, "'a' and 'b' share bytes"),
        (b'{"a": %s, "a": %s}' % ((json.dumps(F32).encode(),) * 2), "there twice"),
        ({"a": F32 | {"shape": [1 << 62, 1 << 62]}}, "not those of its shape"),
        ({"a": F32 | {"shape": [10**30] * 8}}, "damaged header"),
        ({"a": F32 | {"shape": [1] * 9}}, "more than 8 axes"),
        ({"a": F32 | {"shape": [True]}}, "damaged header"),
        ({"a": F32 | {"data_offsets": [4, 0]}}, "not those of its shape"),
        ({"a": F32 | {"data_offsets": [1 << 40, (1 << 40) + 4]}}, "truncated"),
        ({"a": {"dtype": "F8_E4M3", "shape": [8], "data_offsets": [0, 99]}}, "truncated"),
        ({"a": {}}, "damaged header"),
        (b"[" * 100_000, "damaged header"),
        (b'{"\\ud800": 1}', "damaged header"),
    ],
)
def test_headers_that_lie_are_refused(tmp_path: Path, header: object, problem: str) -> None:
    write_tensors(tmp_path, header, bytes(8))
    for read in (TensorFile.open, lambda directory: disk.weight_bytes(directory, 4)):
        with limited(BYTES), pytest.raises(ModelBroken, match=rf"model\.safetensors: .*{problem}"):
            read(tmp_path)


def test_header_of_a_hundred_megabytes_is_not_parsed(tmp_path: Path) -> None:
    write_tensors(tmp_path, b" " * (MAX_HEADER_BYTES + 1))
    with pytest.raises(ModelBroken, match="its header has 16,777,217 bytes"):
        TensorFile.open(tmp_path)


@pytest.mark.parametrize(
    ("header", "problem"),
    [
        (
            b"{%s}"
            % b",".join(
                b'"%d":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}' % n for n in range(200_000)
            ),
            "200,000 tensors",
        ),
        (
            b'{"a":{"dtype":"U8","data_offsets":[0,0],"shape":[%s0]}}' % (b"0," * 7_000_000),
            "more than 640,000 commas",
        ),
    ],
    ids=["tensors", "axes"],
)
def test_header_of_many_tensors_is_not_parsed(
    tmp_path: Path, header: bytes, problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_tensors(tmp_path, header)
    monkeypatch.setattr(files, "json", None)
    for read in (TensorFile.open, lambda directory: disk.weight_bytes(directory, 4)):
        with pytest.raises(ModelBroken, match=rf"^model\.safetensors: .*{problem}"):
            read(tmp_path)


@pytest.mark.parametrize(
    ("places", "problem"),
    [
        (
            {f"t{n}": "a.safetensors" for n in range(MAX_INDEXED_TENSORS + 1)},
            "has 100,001 tensors; at most 100,000",
        ),
        (
            {f"t{n}": f"{n}.safetensors" for n in range(MAX_SHARDS + 1)},
            "names 1,001 files; at most 1,000",
        ),
    ],
    ids=["tensors", "files"],
)
def test_index_of_many_tensors_or_files_is_refused(
    tmp_path: Path, places: Mapping[str, str], problem: str
) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    with pytest.raises(ModelBroken, match=rf"index\.json: `weight_map` {problem}"):
        TensorFile.open(tmp_path)


@pytest.mark.parametrize(
    "shard",
    [
        "../secret.safetensors",
        "/etc/passwd",
        "model.safetensors.index.json",
        "a/b.safetensors",
        "",
        7,
    ],
)
def test_index_names_only_shards_in_its_folder(tmp_path: Path, shard: object) -> None:
    (tmp_path / "secret.safetensors").write_bytes(save({"a": np.zeros(1, np.float32)}))
    directory = tmp_path / "model"
    directory.mkdir()
    (directory / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"a": shard}})
    )
    with pytest.raises(ModelBroken, match=r"model\.safetensors\.index\.json"):
        TensorFile.open(directory)


# Tokenizers


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"pre_tokenizer": {"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Removed",
        "invert": False}}, "exponential time"),
        ({"normalizer": {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 5000}},
        "one byte to 5,000"),
        ({"normalizer": {"type": "Prepend", "prepend": "a" * 5000}},
        "5,000 characters before a text"),
        # the library panics
        ({"pre_tokenizer": {"type": "FixedLength", "length": 0}}, "chunk size"),
        ({"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}}, "Precompiled"),
        ({"post_processor": {"type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": "X", "type_id": 0}}] * 9, "pair": [],
                             "special_tokens": {}}}, "no entry found"),
    ],
)  # fmt: skip
def test_tokenizers_that_panic_or_explode_are_refused(
    checkpoint: Path, changes: dict[str, object], problem: str
) -> None:
    change(checkpoint, "tokenizer.json", **changes)
    with pytest.raises(ModelBroken, match=rf"tokenizer\.json: .*{problem}"):
        load(checkpoint)


def test_many_special_tokens_are_refused(checkpoint: Path) -> None:
    template = dict(tiny.TOKENIZER["post_processor"])  # type: ignore[call-overload]
    template["pair"] = [{"SpecialToken": {"id": "[SEP]", "type_id": 0}}] * 1000
    change(checkpoint, "tokenizer.json", post_processor=template)
    with pytest.raises(ModelBroken, match="adds 1,000 tokens around a pair"):
        load(checkpoint)


@pytest.mark.parametrize("number", [len(tiny.WORDS), 4_000_000_000])
def test_tokens_beyond_the_table_fail_their_text_and_no_device(
    checkpoint: Path, number: int
) -> None:
    """An index beyond a table would crash the whole process on an accelerator."""
    model = dict(tiny.TOKENIZER["model"])  # type: ignore[call-overload]
    change(checkpoint, "tokenizer.json", model=model | {"vocab": model["vocab"] | {"z": number}})
    served = load(checkpoint)
    encode(served)
    with pytest.raises(InvalidInput, match=str(number)):
        encode(served, "z")


def test_segments_beyond_the_table_are_refused(checkpoint: Path) -> None:
    template = json.loads(json.dumps(tiny.TOKENIZER["post_processor"]))
    template["single"][0]["SpecialToken"]["type_id"] = 7
    change(checkpoint, "tokenizer.json", post_processor=template)
    with pytest.raises(InvalidInput, match="segment 7"):
        encode(load(checkpoint))


def test_search_that_the_library_gives_up_fails_its_text(checkpoint: Path) -> None:
    """The pattern is exponential, which neither reading nor trying it reveals; the library ends it
    with a panic, which must not end a thread.
    """
    split = {
        "type": "Split",
        "pattern": {"Regex": r"(?:\x71w\x65|\x71w\x65)*c(?=d)"},
        "behavior": "Removed",
        "invert": False,
    }
    change(checkpoint, "tokenizer.json", pre_tokenizer=split)
    model = load(checkpoint)
    encode(model)
    with pytest.raises(InvalidInput, match="the model's tokenizer fails for this text"):
        encode(model, "qwe" * 60 + "ce")


@pytest.mark.parametrize(
    "pattern",
    [
        "(a+)+$",
        "((a*)b?)*",
        "(?:a+b?)+",
        "(a{1,}){2,}",
        r"(\w+\s?)*$",
        r"(a)\1+",
        "(?i:a+)*",
        "(x(a+)y?)*",
        "x" * 20_001,
    ],
)
def test_patterns_that_may_take_for_ever_are_known(pattern: str) -> None:
    assert slow(pattern)


@pytest.mark.parametrize(
    "pattern",
    [
        r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",  # GPT-2
        # Llama 3, Qwen
        r"(?i:'s|'t|'re)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| "
        r"?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{M}]*[\p{Ll}\p{M}]+(?i:'s|'t)?|\p{N}{1,3}",  # o200k
        " ?[^(\\s|[.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c])]+",  # BLOOM
        r"\d{1,3}(?=(?:\d{3})*\b)",
        "(?>a+)+", "(a++)+", " {2,}", r"[[a-z]&&[^aeiou]]+(?:x|y)*", "",
    ],
)  # fmt: skip
def test_patterns_of_published_tokenizers_pass(pattern: str) -> None:
    assert not slow(pattern)


def test_tokenizer_that_is_loaded_is_the_one_in_the_file(checkpoint: Path) -> None:
    plain = Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
    assert (
        load_tokenizer(checkpoint, lowercase=False).encode("A text, eh?").ids
        == plain.encode("A text, eh?").ids
    )


# Limits of a tokenizer


def _template(**changes: object) -> dict[str, object]:
    return json.loads(json.dumps(tiny.TOKENIZER["post_processor"])) | changes


SEP: Final = {"SpecialToken": {"id": "[SEP]", "type_id": 0}}
A: Final = {"Sequence": {"id": "A", "type_id": 0}}
MANY: Final = {"[SEP]": {"id": "[SEP]", "ids": [3] * 20_000, "tokens": ["[SEP]"] * 20_000}}
LONG: Final = {"[SEP]": {"id": "[SEP]", "ids": [3], "tokens": ["x" * 1_000_000]}}


def _model(**changes: object) -> dict[str, object]:
    return dict(tiny.TOKENIZER["model"]) | changes  # type: ignore[call-overload]


def _unigram(*pieces: str) -> dict[str, object]:
    return {
        "type": "Unigram",
        "unk_id": 0,
        "byte_fallback": False,
        "vocab": [[piece, -1.0] for piece in ("[UNK]", *pieces)],
    }


def _added(*contents: str) -> list[object]:
    plain = {
        "single_word": False,
        "lstrip": False,
        "rstrip": False,
        "normalized": True,
        "special": False,
    }
    return [
        plain | {"id": 1000 + number, "content": content} for number, content in enumerate(contents)
    ]


def _replace(pattern: dict[str, str], content: str) -> dict[str, object]:
    return {"type": "Replace", "pattern": pattern, "content": content}


def _normalizers(*parts: object) -> dict[str, object]:
    return {"type": "Sequence", "normalizers": list(parts)}


def _pre_tokenizers(*parts: object) -> dict[str, object]:
    return {"type": "Sequence", "pretokenizers": list(parts)}


def _decoders(*parts: object) -> dict[str, object]:
    return {"type": "Sequence", "decoders": list(parts)}


BYTES_AS_LETTERS: Final = {
    "type": "ByteLevel",
    "add_prefix_space": True,
    "trim_offsets": True,
    "use_regex": False,
}
SPACES: Final = {"type": "Metaspace", "replacement": "_", "prepend_scheme": "always", "split": True}
CHARSMAP: Final = base64.b64encode(bytes(4) + b"x" * 5000 + b"\0").decode()

BOMBS: Final[Mapping[str, tuple[dict[str, object], str]]] = {
    "ids of a special token": (
        {"post_processor": _template(single=[A, *[SEP] * 1000], special_tokens=MANY)},
        "adds 20,000,000 tokens around a single"
    ),
    "ids of a special token, five times that": (
        {"post_processor": _template(single=[A, *[SEP] * 5000], special_tokens=MANY)},
        "adds 100,000,000 tokens around a single"
    ),
    "ids around a pair": (
        {"post_processor": _template(single=[A], pair=[A, *[SEP] * 1000], special_tokens=MANY)},
        "adds 20,000,000 tokens around a pair",
    ),
    "templates in a sequence": (
        {"post_processor": {"type": "Sequence", "processors": [_template(single=[A, SEP])] * 100}},
        "adds 100 tokens around a single",
    ),
    "a text a million times": ({"post_processor": _template(single=[A] * 1_000_000)},
    "repeats a text in `single`"),
    "a long special token": ({"post_processor": _template(special_tokens=LONG)},
    "a token of 1,000,000 characters"),
    "a long replacement": ({"normalizer": _replace({"String": "a"}, "a" * 200)},
    "`normalizer` can expand one byte to 200"),
    "replacements in a row": ({"normalizer": _normalizers(*[_replace({"String": "a"}, "aa")] * 20)},
    "can expand one byte to 1,048,576"),
    "a ligature for each letter": ({"normalizer": _normalizers(_replace({"String": "a"},
    "\ufdfa"))}, "can expand one byte to 33"),
    "what is found everywhere": ({"normalizer": _normalizers(*[_replace({"Regex": "(?=.)"},
    "a")] * 20)}, "can expand one byte to 1,048,576"),
    "much before a text": ({"normalizer": {"type": "Prepend", "prepend": "a" * 5000}},
    "puts 5,000 characters before a text"),
    "a charsmap": ({"normalizer": {"type": "Precompiled", "precompiled_charsmap": CHARSMAP}},
    "can expand one byte to 152"),
    "bytes of bytes": ({"normalizer": _normalizers(*[{"type": "ByteLevel"}] * 20)},
    "`normalizer` can expand one byte"),
    "bytes of bytes of words": ({"pre_tokenizer": _pre_tokenizers(*[BYTES_AS_LETTERS] * 20)},
    "`pre_tokenizer` can expand one byte"),
    "a decoder that grows": ({"decoder": _replace({"String": "a"}, "a" * 200)},
    "`decoder` can expand one byte to 200"),
    "decoders in a row": ({"decoder": _decoders(*[_replace({"Regex": "(?=.)"}, "a")] * 20)},
    "`decoder` can expand one byte"),
    "a decoder for ever": ({"decoder": _replace({"Regex": "(a+)+$"}, "")}, "exponential time"),
    "a long suffix": ({"decoder": {"type": "BPEDecoder", "suffix": "a" * 2000}},
    "`decoder` has a text of 2,000 characters"),
    "spaces before spaces": ({"pre_tokenizer": _pre_tokenizers(*[SPACES] * 20)},
    "`pre_tokenizer` can expand one byte"),
    "parts": ({"normalizer": _normalizers(*[{"type": "NFKC"}] * 1000)},
    "`normalizer` has 1,001 parts"),
    "long added tokens": ({"added_tokens": _added("x" * 5000)},
    "`added_tokens` has a token of 5,000 characters"),
    "much in added tokens": ({"added_tokens": _added(*(f"{n:01000}" for n in range(5000)))},
    "has 5,000,000 characters"),
    "many added tokens": ({"added_tokens": _added(*map(str, range(100_001)))},
    "has 100,001 tokens"),
    "long words": ({"model": _model(max_input_chars_per_word=10**9)},
    "`max_input_chars_per_word` is 1000000000"),
    "a long token for all that is unknown": ({"model": _model(unk_token="x" * 100_000)},
    "`unk_token` has 100,000 characters"),
    "a long prefix": ({"model": _model(continuing_subword_prefix="x" * 100_000)},
    "`continuing_subword_prefix` has 100,000"),
    "a long piece": ({"model": _unigram("x" * 2_000_000)},
    "`vocab` has a piece of 2,000,000 characters"),
    "long pieces": ({"model": _unigram(*(f"{number:0250}" for number in range(20_000)))},
    "`vocab` has 5,000,005 characters"),
    "two names for a token": ({"model": _model(vocab={"a": 0, "[UNK]": 1, "x" * 100_000: 0})},
    "tokens that share an id"),
    "a pattern that takes a square": (
        {"pre_tokenizer": {"type": "Split", "pattern": {"Regex": r"\s+$"}, "behavior": "Removed",
            "invert": False}}, "takes "
    ),
    "a pattern that takes for ever": (
        {"pre_tokenizer": {"type": "Split", "pattern": {"Regex": "(?:a|a)*b"},
            "behavior": "Removed", "invert": False}},
        "takes more",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BOMBS)
def test_memory_and_time_of_tokenizers_are_bounded(checkpoint: Path, name: str) -> None:
    changes, problem = BOMBS[name]
    change(checkpoint, "tokenizer.json", **changes)
    with (
        limited(BYTES),
        pytest.raises(ModelBroken, match=rf"tokenizer\.json.*{re.escape(problem)}"),
    ):
        load_tokenizer(checkpoint, lowercase=False)


LOADS: Final = """
import sys
from pathlib import Path
from libs.errors import ModelBroken
from libs.models.text.tokenising.tokenizer import load_tokenizer
print("ready", flush=True)
sys.stdin.readline()
try:
    print(len(load_tokenizer(Path(sys.argv[1]), lowercase=False).encode("a text")), flush=True)
except ModelBroken as broken:
    print(broken, flush=True)
sys.stdin.readline()
"""


@pytest.mark.parametrize(
    "name", ["ids of a special token, five times that", "a long piece", "bytes of bytes of words"]
)
def test_tokenizer_takes_no_memory_before_it_is_refused(checkpoint: Path, name: str) -> None:
    """Run in a separate process: the library aborts it when memory is short."""
    changes, problem = BOMBS[name]
    change(checkpoint, "tokenizer.json", **changes)
    command = [sys.executable, "-c", LOADS, str(checkpoint)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        peak = Peak(process.pid)
        process.stdin.write("go\n")
        process.stdin.flush()
        reported = process.stdout.readline()
        grown = peak.grown
        process.stdin.write("end\n")
        process.stdin.close()
    assert problem in reported
    assert grown < 256 << 20, f"{grown:,} bytes"


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (b'{"normalizer": null, "normalizer": {"type": "NFC"}}', "a name is there twice"),
        (b"[" * 100_000, "cannot be read"),
        (b"[]", "must contain a JSON object"),
        (b"{}".decode().encode("utf-16"), "cannot be read"),
        (b'{"a": [' + b"0," * 4_000_001 + b"0]}", "4,000,001 values"),
    ],
)  # fmt: skip
def test_tokenizer_is_read_as_the_library_will_read_it(
    tmp_path: Path, data: bytes, problem: str
) -> None:
    (tmp_path / "tokenizer.json").write_bytes(data)
    with limited(BYTES), pytest.raises(ModelBroken, match=rf"tokenizer\.json: .*{problem}"):
        load_tokenizer(tmp_path, lowercase=False)


@pytest.mark.parametrize(
    "changes",
    [
        # XLM-R, Gemma, ALBERT, Llama 3: what their normalisers and pre-tokenizers do.
        {"normalizer": _normalizers(_replace({"Regex": " {2,}"}, "\u2581")),
        "pre_tokenizer": SPACES},
        {"normalizer": _replace({"String": " "}, "\u2581")},
        {"normalizer": _normalizers(_replace({"String": "``"}, '"'), {"type": "NFKD"},
            {"type": "StripAccents"},
                                    {"type": "Lowercase"}, _replace({"Regex": " {2,}"}, " ")),
                                    "pre_tokenizer": SPACES},
        {"pre_tokenizer": _pre_tokenizers({"type": "Split",
            "pattern": {"Regex": max(PUBLISHED, key=len)}, "behavior": "Isolated",
                                           "invert": False}, BYTES_AS_LETTERS)},
        {"padding": {"strategy": {"Fixed": 1_000_000_000}, "direction": "Right",
            "pad_to_multiple_of": None, "pad_id": 0,
                     "pad_type_id": 0, "pad_token": "[PAD]"}},
    ],
)  # fmt: skip
def test_published_tokenizers_stay_within_the_bounds(
    checkpoint: Path, changes: dict[str, object]
) -> None:
    change(checkpoint, "tokenizer.json", **changes)
    assert 1 < len(load_tokenizer(checkpoint, lowercase=False).encode("a text")) < 20


def test_patterns_that_need_no_trial_would_pass_one() -> None:
    assert tried(sorted(PUBLISHED, key=len)[-4:]) is None
    assert not [pattern for pattern in PUBLISHED if slow(pattern)]


@pytest.mark.parametrize(
    "pattern", [r"\d{1,3}(?=(?:\d{3})*\b)", "a*b", "[a-m]*[k-z]*!", "(a{1,30}){1,30}x"]
)
def test_patterns_are_tried_before_a_text_meets_them(pattern: str) -> None:
    assert not slow(pattern)
    found = tried(["x", pattern])
    assert found is not None
    assert found[0] == pattern


# Chat templates


def render(source: str) -> str:
    (found,) = rendered(
        source,
        [_messages({"\ue000": "a query", "\ue001": "a document", "\ue002": ""}, parts=False)],
    )
    return rendered_text(found)


@pytest.mark.parametrize(
    "source",
    [
        "{{ 'a' * 10**10 }}",
        (
            "{% set ns = namespace(s='a') %}"
            "{% for i in range(60) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}{{ ns.s }}"
        ),
        "{% macro f(n) %}{{ f(n) ~ f(n) }}{% endmacro %}{{ f(1) }}",
        "{{ '%10000000000d' % 1 }}",
        "{{ 'x' * 2000000 }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ self.__init__.__globals__ }}",
        "{% include '/etc/passwd' %}",
        "{{ " + "(" * 5000,
    ],
)
def test_templates_that_take_too_much_or_look_around_are_refused(source: str) -> None:
    with pytest.raises(ModelBroken, match="the chat template"):
        render(source)


def test_endless_template_ends() -> None:
    with pytest.raises(ModelBroken, match="exceeds the limits of time and memory"):
        render("{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}")


def test_templates_see_nothing_of_the_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "a secret")
    assert render("{{ query }}|{{ document }}") == "a query|a document"
    with pytest.raises(ModelBroken, match="unsafe"):
        render("{{ cycler.__init__.__globals__ }}")
