"""Hostile checkpoints: all files that a worker reads before it serves a model.

A checkpoint is served or refused as broken, within the memory limit of a target's process.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from safetensors.numpy import save

from libs.catalog.card import Card
from libs.catalog.checkpoint.files import parse_json, tensor_entries
from libs.catalog.detect import read_card
from libs.errors import InvalidInput, ModelBroken
from libs.models import ClassifyWork, EncodeWork, ScoreWork, Work, load_model
from libs.models.generation.chat import ChatTemplate, Message
from libs.models.generation.decoding.beams import BeamSearch
from libs.models.generation.decoding.rules import TokenRules, apply
from libs.models.generation.decoding.settings import DecodeSettings, parse_settings
from libs.models.images.processing import ImageProcessing
from libs.models.layers.spec import Config
from libs.models.runtime.loaded.adapter_config import read_adapter
from libs.models.text.registry import empty_encoder, layer_names
from libs.models.text.tokenising import bounds
from libs.models.text.tokenising.chat import _messages
from libs.models.text.tokenising.renderer import rendered, rendered_text
from libs.models.text.tokenising.text import TextProcessor
from libs.models.text.tokenising.tokenizer import failing, load_tokenizer
from libs.models.weights import TensorFile
from services.worker.machine import disk
from services.worker.mesh import codec
from tests.fuzz import mutate, tiny
from tests.fuzz.target import Broken, Random, Target, Try, plain

Folder = Mapping[str, bytes]


def _memory() -> str | None:
    return "/dev/shm" if os.path.isdir("/dev/shm") else None


def _json(value: object) -> bytes:
    return json.dumps(value).encode()


def _dumped(random: Random, value: object) -> bytes:
    """Return JSON, sometimes with some bytes changed."""
    try:
        data = json.dumps(value, ensure_ascii=random.random() < 0.5).encode("utf-8", "replace")
    except (RecursionError, ValueError):
        return b"[" * 5000
    return data if random.random() < 0.8 else mutate.mutated(random, data, _WORDS)


_WORDS: Final = (
    b"{", b"}", b"[", b"]", b":", b",", b'"', b"null", b"NaN", b"Infinity", b"-Infinity", b"1e999",
    b"9" * 50, b"9" * 5000,
    b"\\ud800",
    b"\\u0000", b"[" * 2000, b'{"a":' * 500, b"\xff\xfe", b"\xef\xbb\xbf", b"-1", b"0.5",
    b"1000000000", b"1000000000000",
)  # fmt: skip


# tensors: a safetensors file


def _make_tensors(random: Random, known: Sequence[bytes]) -> bytes:
    if known and random.random() < 0.3:
        return mutate.mutated(random, random.choice(known), _WORDS, known)
    header: dict[str, object] = {}
    end = 0
    for number in range(random.randrange(1, 5)):
        shape = [random.randrange(4) for _ in range(random.randrange(4))]
        dtype, width = random.choice(
            (("F32", 4), ("BF16", 2), ("I64", 8), ("U8", 1), ("F8_E4M3", 1), ("BOOL", 1))
        )
        size = width
        for axis in shape:
            size *= axis
        header[random.choice(("a", "b", f"layer.{number}.weight"))] = {
            "dtype": dtype,
            "shape": shape,
            "data_offsets": [end, end + size],
        }
        end += size
    made = mutate.changed(random, header, _TENSOR_WORDS) if random.random() < 0.8 else header
    text = _dumped(random, made)
    length = len(text) if random.random() < 0.9 else mutate.edge(random)
    data = (length % (1 << 64)).to_bytes(8, "little") + text + random.randbytes(end)
    return data if random.random() < 0.8 else mutate.mutated(random, data, _WORDS)


_TENSOR_WORDS: Final = (
    [0, 4],
    [4, 0],
    [0, 0],
    [1 << 62, 1 << 62],
    "F32",
    "F64",
    {"format": "pt"},
    [-1, 4],
    [True, 4],
    [1 << 63] * 4,
    [10**39] * 8,
)


@contextmanager
def _tensors() -> Iterator[Try]:
    with tempfile.TemporaryDirectory(dir=_memory()) as folder:
        directory = Path(folder)

        def attempt(data: bytes) -> None:
            (directory / "model.safetensors").write_bytes(data)
            with suppress(ModelBroken):
                for entry in tensor_entries(directory, "model.safetensors").values():
                    if not 0 <= entry.begin <= entry.end <= len(data):
                        raise Broken(
                            f"a tensor lies at {entry.begin}..{entry.end} of {len(data)} bytes"
                        )
                disk.weight_bytes(directory, 4)
                tensors = TensorFile.open(directory)
                for name in tensors.names():
                    if tuple(tensors.read(name).shape) != tensors.shape(name):
                        raise Broken(f"tensor {name!r} has another shape than its header says")

        yield attempt


# indexes: shards, and the tensors in each of them


def _make_index(random: Random, known: Sequence[bytes]) -> bytes:
    if known and random.random() < 0.3:
        return mutate.mutated(random, random.choice(known), _WORDS, known)
    index = {
        "metadata": {"total_size": 8},
        "weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"},
    }
    return _dumped(random, mutate.changed(random, index, _PATHS))


_PATHS: Final = (
    "../model-1.safetensors", "/etc/passwd", "model-1.safetensors", "model.safetensors.index.json",
    "model-2.safetensors", ".",
    "..", "a\0b",
    "x" * 300, "link.safetensors", "pipe.safetensors", "out.safetensors", "folder.safetensors",
    "loop.safetensors",
    "gone.safetensors", "",
)  # fmt: skip


@contextmanager
def _indexes() -> Iterator[Try]:
    """Try indexes next to two shards, a link to one of them, a link to the outside, a loop, a pipe
    and a folder.
    """
    with tempfile.TemporaryDirectory(dir=_memory()) as folder:
        outside, directory = Path(folder) / "secret.safetensors", Path(folder) / "model"
        directory.mkdir()
        one = {name: value[:1] for name, value in list(tiny.weights().items())[:1]}
        outside.write_bytes(save({"secret": next(iter(one.values()))}))
        for number, name in enumerate("ab", 1):
            (directory / f"model-{number}.safetensors").write_bytes(
                save({name: next(iter(one.values()))})
            )
        (directory / "link.safetensors").symlink_to("model-1.safetensors")
        (directory / "out.safetensors").symlink_to(outside)
        (directory / "loop.safetensors").symlink_to("loop.safetensors")
        (directory / "folder.safetensors").mkdir()
        os.mkfifo(directory / "pipe.safetensors")

        def attempt(data: bytes) -> None:
            (directory / "model.safetensors.index.json").write_bytes(data)
            with suppress(ModelBroken):
                tensors = TensorFile.open(directory)
                if "secret" in tensors.names():
                    raise Broken("a tensor from outside of the checkpoint was read")

        yield attempt


# directories and models: some files of a whole checkpoint changed


class Directory:
    """A checkpoint with files that an input replaces and that are then restored. An input is a JSON
    object that maps a path to its content, to text that is not JSON, or to `$link`, `$pipe` or
    `$gone`.
    """

    def __init__(self, path: Path) -> None:
        self.path = tiny.write(path)
        self._files = {
            str(file.relative_to(path)): file.read_bytes()
            for file in path.rglob("*")
            if file.is_file()
        }

    @contextmanager
    def changed(self, data: bytes) -> Iterator[None]:
        try:
            said = json.loads(data)
        except (ValueError, RecursionError):
            said = {}
        touched = [name for name in said if _is_plain(name)] if isinstance(said, dict) else []
        try:
            for name in touched:
                self._put(self.path / name, said[name])
            yield
        finally:
            for name in touched:
                self._restore(name)

    def _put(self, file: Path, content: Any) -> None:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.unlink(missing_ok=True)
        if isinstance(content, dict) and "$link" in content:
            with suppress(OSError, ValueError, TypeError):
                file.symlink_to(content["$link"])
        elif isinstance(content, dict) and "$pipe" in content:
            os.mkfifo(file)
        elif not (isinstance(content, dict) and "$gone" in content):
            file.write_bytes(
                content.encode("utf-8", "replace") if isinstance(content, str) else _json(content)
            )

    def _restore(self, name: str) -> None:
        (self.path / name).unlink(missing_ok=True)
        if name in self._files:
            (self.path / name).write_bytes(self._files[name])


_NAMES: Final = frozenset(
    {
        *tiny.files(), "model.safetensors", "2_Dense/model.safetensors",
        "model.safetensors.index.json", "special_tokens_map.json",
        "chat_template.jinja", "additional_chat_templates/rerank.jinja", "artifact.metadata",
        "router_config.json", "idf.json",
        "gliner_config.json", "sparse_linear.safetensors", "2_Dense/config.json",
        "1_Pooling/config.json", "0/config.json",
    }
)  # fmt: skip


def _is_plain(name: str) -> bool:
    return name in _NAMES


_CONFIG_WORDS: Final[Sequence[object]] = (
    0, -1, 1, 2, 10**9, 10**12, 10**30, 1e30, 0.5, float("nan"), float("inf"), "", "x" * 5000,
    "\ud800", "../..", "/etc",
    "1_Pooling", True,
    None, [], {}, "BertForSequenceClassification", "BertForMaskedLM", "BertForTokenClassification",
    "HF_ColBERT",
    "Qwen3ForCausalLM", "bert",
    "qwen3", "gliclass", "GLiClass", "mpnet", "deberta-v2", "t5", "mean", "lasttoken",
    "MultiVectorEncoder", "SparseEncoder",
    "CrossEncoder",
    "sentence_transformers.models.Transformer", "sentence_transformers.models.Router",
    "sentence_transformers.models.LogitScore",
    "sentence_transformers.models.MultiVectorMask", "sentence_transformers.models.SpladePooling",
    "evil.Module", "torch.nn.Tanh",
    {"0": "a", "1": "b"}, {"0": "entailment", "1": "contradiction"},
    {str(number): "x" for number in range(300)},
    {"message": {"format": "flat"}},
    {"strategy": "fixed", "length": 10**9}, {"$link": "/etc/passwd"}, {"$link": "config.json"},
    {"$link": "../../x"}, {"$pipe": 1},
    {"$gone": 1}, {"rope_type": "yarn", "factor": 0}, {"type": "linear", "factor": float("nan")},
    "{{ messages }}",
)  # fmt: skip


def _make_directory(random: Random, known: Sequence[bytes]) -> bytes:
    files: dict[str, object] = tiny.files()
    extra: dict[str, object] = {
        "chat_template.jinja": "{{ query }} and {{ document }}",
        "router_config.json": {
            "types": {"0": "x.Transformer"},
            "structure": {"query": ["0"], "document": ["0"]},
            "parameters": {},
        },
        "artifact.metadata": {"query_maxlen": 8, "doc_maxlen": 16, "attend_to_mask_tokens": False},
        "idf.json": {"a": 1.0, "text": 2.5},
        "gliner_config.json": {
            "encoder_config": dict(tiny.CONFIG),
            "hidden_size": 8,
            "span_mode": "markerV0",
            "max_width": 4,
        },
        "special_tokens_map.json": {"unk_token": "[UNK]", "mask_token": {"content": "[MASK]"}},
        "model.safetensors.index.json": {"weight_map": {"a": "model.safetensors"}},
    }
    found: dict[str, object] = {}
    for _ in range(random.choice((1, 1, 1, 2, 3))):
        name = random.choice([*files, "config.json", "config.json", *extra])
        before = found.get(name, files.get(name, extra.get(name)))
        way = random.random()
        if way < 0.04:
            found[name] = random.choice(
                (
                    {"$link": "/etc/passwd"},
                    {"$link": "tokenizer.json"},
                    {"$pipe": 1},
                    {"$gone": 1},
                    {"$link": name},
                )
            )
        elif way < 0.12:
            found[name] = _dumped(random, before).decode("utf-8", "replace")
        else:
            found[name] = mutate.changed(random, before, _CONFIG_WORDS)
    try:
        return _json(found)
    except (RecursionError, ValueError):
        return b"{}"


@contextmanager
def _in_directory(attempt: Callable[[Path], None]) -> Iterator[Try]:
    with tempfile.TemporaryDirectory(dir=_memory()) as folder:
        directory = Directory(Path(folder) / "org" / "tiny")

        def one(data: bytes) -> None:
            with directory.changed(data), suppress(ModelBroken):
                attempt(directory.path)

        yield one


def _try_card(directory: Path) -> None:
    try:
        card = read_card(directory, "org/tiny")
        size = disk.weight_bytes(directory, 4)
    except ModelBroken as broken:
        codec.failed(broken)
        if len(broken.message) > 2000:
            raise Broken(f"a message of {len(broken.message):,} characters") from None
        raise
    codec.to_card(card, stored_bytes=size).SerializeToString()


_WORK: Final[Sequence[Work]] = (
    EncodeWork(texts=["a text", "\U0001f480 " * 20, ""]),
    ScoreWork(query="a", documents=["text", "b " * 100]),
    ClassifyWork(texts=["a text"], labels=("a", "b")),
)


def _try_model(directory: Path) -> None:
    model = load_model(directory, "org/tiny", torch.device("cpu"), torch.float32)
    codec.to_card(model.card).SerializeToString()
    for work in _WORK:
        try:
            prepared = model.prepare(work)
        except InvalidInput as refused:
            codec.failed(refused)
        else:
            if prepared.tokens > 10_000:
                raise Broken(f"a few short texts became {prepared.tokens:,} tokens")
            outputs = model.forward(prepared.head, prepared.sequences) if prepared.sequences else []
            model.finish(prepared, outputs)


# encoders: config.json of every family


# Small configurations, as transformers and custom code on the hub write them.
_FAMILIES: Final[Sequence[dict[str, object]]] = list(
    json.loads(Path(__file__).with_name("families.json").read_bytes()).values()
)


def _make_encoder(random: Random, known: Sequence[bytes]) -> bytes:
    if known and random.random() < 0.1:
        return mutate.mutated(random, random.choice(known), _WORDS, known)
    made: object = random.choice(_FAMILIES)
    for _ in range(random.choice((1, 1, 2, 3))):
        made = mutate.changed(random, made, _CONFIG_WORDS)
    return _dumped(random, made)


def _try_encoder(data: bytes) -> None:
    with suppress(ModelBroken):
        value = parse_json(data, "config.json")
        if isinstance(value, dict):
            encoder, _ = empty_encoder(Config(value))
            layer_names(value)
            if (
                sum(parameter.numel() for parameter in encoder.parameters()) < 1_000_000
                and len(encoder.stack) < 8
            ):
                encoder.to_empty(device="cpu")
                for module in encoder.modules():
                    prepare = getattr(module, "prepare", None)
                    if prepare is not None:
                        prepare()


# tokenizers: tokenizer.json, and texts through it


def _models() -> list[dict[str, object]]:
    base = dict(tiny.TOKENIZER)
    unigram = {
        "type": "Unigram",
        "unk_id": 0,
        "byte_fallback": False,
        "vocab": [["[UNK]", 0.0], ["▁a", -1.0], ["t", -2.0], ["e", -2.5]],
    }
    pairs = {
        "type": "BPE",
        "vocab": {"a": 0, "b": 1, "ab": 2, "Ġ": 3},
        "merges": [["a", "b"]],
        "unk_token": "a",
        "dropout": None,
    }
    words = {"type": "WordLevel", "vocab": {"a": 0, "text": 1}, "unk_token": "a"}
    space = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": True}
    return [
        base,
        base
        | {
            "model": unigram,
            "pre_tokenizer": space,
            "normalizer": {"type": "Prepend", "prepend": "▁"},
        },
        base
        | {
            "model": pairs,
            "pre_tokenizer": {
                "type": "ByteLevel",
                "add_prefix_space": True,
                "trim_offsets": True,
                "use_regex": True,
            },
        },
        base
        | {
            "model": words,
            "pre_tokenizer": {"type": "Whitespace"},
            "post_processor": None,
            "added_tokens": [],
        },
    ]


_MODELS: Final = _models()
_PARTS: Final[Sequence[object]] = (
    {"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated", "invert": False},
    {"type": "Split", "pattern": {"Regex": "(a|a)*b"}, "behavior": "Removed", "invert": True},
    {"type": "Split", "pattern": {"Regex": "((a{1,1000}){1,1000}){1,1000}"}, "behavior": "Removed",
    "invert": False},
    {"type": "Split", "pattern": {"Regex": "(?<x>a)\\g<x>*"}, "behavior": "MergedWithNext",
    "invert": False},
    {"type": "Split", "pattern": {"String": ""}, "behavior": "Contiguous", "invert": False},
    {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 2000},
    {"type": "Replace", "pattern": {"Regex": "."}, "content": "ab" * 30},
    {"type": "Sequence",
    "normalizers": [{"type": "Replace", "pattern": {"Regex": "."}, "content": "ab" * 10}] * 6},
    {"type": "Prepend", "prepend": "x" * 5000},
    {"type": "Strip", "strip_left": True, "strip_right": True}, {"type": "NFKD"},
    {"type": "Nmt"},
    {"type": "Precompiled", "precompiled_charsmap": "AAAA"},
    {"type": "Precompiled", "precompiled_charsmap": "BAAAAP////8AAAA="},
    {"type": "FixedLength", "length": 0}, {"type": "Punctuation", "behavior": "Isolated"},
    {"type": "Digits",
    "individual_digits": True},
    {"type": "UnicodeScripts"}, {"type": "CharDelimiterSplit", "delimiter": "a"},
    {"type": "BertProcessing", "sep": ["x",
    4 * 10**9], "cls": ["y", 7]},
    {"type": "RobertaProcessing", "sep": ["</s>", 2], "cls": ["<s>", 10**9], "trim_offsets": True,
    "add_prefix_space": False},
    {"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "X", "type_id": 0}}],
    "pair": [], "special_tokens": {}},
    {"Sequence": {"id": "A", "type_id": 4 * 10**9}},
    {"SpecialToken": {"id": "[CLS]", "type_id": 7}}, {"Regex": "(\\s*\\w+)*"},
    {"Regex": "\\"}, {"String": "a"},
    # Multiplying content: ids of a special token, repeated text, stepwise growth, long names, many
    # parts.
    {"id": "[SEP]", "ids": [3] * 20_000, "tokens": ["[SEP]"] * 20_000},
    [{"SpecialToken": {"id": "[SEP]", "type_id": 0}}] * 5000,
    [{"Sequence": {"id": "A", "type_id": 0}}] * 5000, {"Regex": "\\s+$"}, {"Regex": "(?:a|a)*b"},
    {"Regex": ""}, "x" * 100_000,
    [{"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True,
    "use_regex": False}] * 20, [{"type": "ByteLevel"}] * 20,
    [{"type": "Metaspace", "replacement": "_", "prepend_scheme": "always", "split": True}] * 20,
    10**9,
    {"type": "TemplateProcessing", "single": [{"Sequence": {"id": "A", "type_id": 0}},
    *[{"SpecialToken": {"id": "X", "type_id": 0}}] * 1000],
    "pair": [{"Sequence": {"id": "A", "type_id": 0}},
    {"Sequence": {"id": "B", "type_id": 0}}],
    "special_tokens": {"X": {"id": "X", "ids": [1] * 5000, "tokens": ["X"] * 5000}}},
    {"max_length": 0, "strategy": "LongestFirst", "stride": 9, "direction": "Left"},
    {"strategy": {"Fixed": 10**9},
    "direction": "Right", "pad_id": 0},
    4294967295, -1, 0, 10**12, 0.5, float("nan"), "", "a", "\ud800", None, True, [], {},
)  # fmt: skip
_TEXTS: Final = [
    "a text",
    "a" * 64 + "!",
    "",
    " \n\t",
    "\U0001f480é\u0300 \u200b ﷺ",
    "x " * 40,
    "[CLS] [MASK]",
    "\0",
]


def _make_tokenizer(random: Random, known: Sequence[bytes]) -> bytes:
    if known and random.random() < 0.1:
        return mutate.mutated(random, random.choice(known), _WORDS, known)
    made: object = random.choice(_MODELS)
    for _ in range(random.choice((1, 1, 2))):
        made = mutate.changed(random, made, _PARTS)
    return _dumped(random, made)


@contextmanager
def _tokenizers() -> Iterator[Try]:
    with tempfile.TemporaryDirectory(dir=_memory()) as folder:
        directory = Path(folder)

        def attempt(data: bytes) -> None:
            (directory / "tokenizer.json").write_bytes(data)
            with suppress(ModelBroken), failing(ModelBroken):
                tokenizer = load_tokenizer(directory, lowercase=len(data) % 2 == 0)
                text = TextProcessor(tokenizer, limit=16, segments=True, unknown="[UNK]")
                _tokenise(text)

        yield attempt


def _tokenise(text: TextProcessor) -> None:
    def where(number: int) -> str:
        return f"items[{number}].text"

    tries: list[Callable[[str], object]] = [
        lambda one: _refuse_many(text, one),
        lambda one: text.encode([one], "end", where),
        lambda one: text.encode([one], "none", where),
        lambda one: text.encode_spans([one], "start", where),
        lambda one: text.encode_pairs(one, ["a text", one], "end"),
        lambda one: text.encode_crossed([one], ["a"], "end", where, where),
        text.prompt_tokens,
    ]
    for one in _TEXTS:
        for attempt in tries:
            with suppress(InvalidInput), failing(InvalidInput):
                attempt(one)


def _refuse_many(text: TextProcessor, one: str) -> None:
    inside = bounds.MAX_GROWTH * _UNICODE * (len(one) + bounds.MAX_PUT_BEFORE)
    if (tokens := text.prompt_tokens(one)) > inside + bounds.MAX_SPECIAL:
        raise Broken(f"a text of {len(one)} characters became {tokens:,} tokens")


_UNICODE: Final = 72
"""The maximum bytes per character after Unicode normalisation and ByteLevel."""


# templates: Jinja of a checkpoint

_TEMPLATES: Final = (
    (
        b"{% for m in messages %}<|{{ m.role }}|>{{ m.content }}\n{% endfor %}{% if "
        b"add_generation_prompt %}<|assistant|>{% endif %}"
    ),
    b"{{ bos_token }}{{ query }}{% set ns = namespace(found=false) %}{{ document }}"
    b"{{ raise_exception('no') if instruction else '' }}",
)
_JINJA: Final = (
    b"{% for i in range(100000) %}", b"{% endfor %}", b"{{ 'a' * 10**9 }}", b"{{ 'a' * 10**10 }}",
    b"{{ 10**10**8 }}",
    b"{{ 'x'|center(10**9) }}",
    b"{% set a = [0] * 10**9 %}", b"{{ ''.__class__.__mro__ }}", b"{{ self.__init__.__globals__ }}",
    b"{{ cycler.__init__.__globals__.os }}",
    b"{% macro f(n) %}{{ f(n) }}{% endmacro %}{{ f(1) }}", b"{% include '/etc/passwd' %}",
    b"{% extends 'x' %}",
    b"{% import 'os' as o %}",
    b"{{ lipsum(n=100) }}", b"{{ '%1000000000d' % 1 }}", b"{{ '{:>1000000000}'.format(1) }}",
    b"{{ messages|tojson }}",
    b"{% set x = x ~ x %}",
    b"{{ messages.append(1) }}", b"{% do messages %}", b"{% break %}",
    b"{{ messages|map(attribute='__class__')|list }}", b"{{",
    b"}}", b"{%", b"%}",
    b"{% raw %}", b"{# ", b"{{ (1,) * 10**9 }}", b"{{ range(10**9)|list }}", b"{{ query.encode }}",
    b"(" * 200,
    b"{{ -" + b"-" * 500, b"{% if " * 100,
    (
        b"{% for a in range(9999) %}{% for b in range(9999) %}{% for c in range(9999) %}{% endfor "
        b"%}{% endfor %}{% endfor %}"
    ),
    (
        b"{% set ns = namespace(s='a') %}{% for i in range(60) %}{% set ns.s = ns.s ~ ns.s %}{% "
        b"endfor %}{{ ns.s }}"
    ),
)  # fmt: skip


def _make_template(random: Random, known: Sequence[bytes]) -> bytes:
    pool = [*_TEMPLATES, *known]
    return mutate.mutated(random, random.choice(pool), _JINJA, pool)


def _try_template(data: bytes) -> None:
    values = _messages({"\ue000": "a query", "\ue001": "a document", "\ue002": ""}, parts=False)
    with suppress(ModelBroken):
        (found,) = rendered(data.decode("utf-8", "replace"), [values])
        text = rendered_text(found)
        if "root:" in text or "environ(" in text:
            raise Broken("a template has read a value it was not given")
    card = Card(
        "org/name",
        "r",
        "llama",
        "generative",
        ("text",),
        (),
        64,
        template=data.decode("utf-8", "replace"),
    )
    said = [
        Message("user", "a", "1"),
        Message("assistant", "<think>b</think> c", "2"),
        Message("user", "d", "3"),
    ]
    with suppress(ModelBroken, InvalidInput), tempfile.TemporaryDirectory(dir=_memory()) as folder:
        chat = ChatTemplate(card, Path(folder))
        chat.prompt(said)
        chat.around(said, with_image=False)


# adapters: adapter_config.json


def _make_adapter(random: Random, known: Sequence[bytes]) -> bytes:
    if known and random.random() < 0.2:
        return mutate.mutated(random, random.choice(known), _WORDS, known)
    made: object = dict(tiny.ADAPTER)
    if random.random() < 0.5:
        made = {
            **tiny.ADAPTER,
            random.choice(("rank_pattern", "alpha_pattern")): {_pattern(random): 2},
        }
    for _ in range(random.choice((0, 1, 2))):
        made = mutate.changed(random, made, _ADAPTER_WORDS)
    return _dumped(random, made)


def _pattern(random: Random) -> str:
    """Return a pattern of a few pieces, each repeated, since repetition causes exponential time."""
    pieces = [
        random.choice(_PATTERN_PIECES) * random.choice((1, 1, 2, 20, 40, 90))
        for _ in range(random.randrange(1, 5))
    ]
    return "".join(pieces)


_PATTERN_PIECES: Final = (
    ".?", ".*", "a?", "a*", "a+", "(a|a)*", "(a+)+", "(.*)*", "(", ")", "[x]", "[^x]", "\\d",
    "\\w*", "\\.", ".", "x", "a", "{9}",
    "{1,2}", "|", "^", "$", "query", "layer", "(?:", "[", "]", "\\",
)  # fmt: skip
_ADAPTER_WORDS: Final[Sequence[object]] = (
    0, -1, 10**30, float("nan"), float("inf"), True, "all-linear", {"(a+)+": 1}, {".*.*.*.*": 2},
    {"(": 1}, {"a{1,99999}": 3},
    {"\\": 1}, {"a|b": 0},
    {"(.*)*": 1}, {"x" * 201: 1}, ["query"] * 100, [[1]], None, "gaussian", "pissa", "\ud800",
    {"layers.[0-9]+": 8}, {"(?R)": 1},
    {"(?P<a>x)": 1}, {".?" * 40 + "[x]" * 40: 2}, {"[x]" + ".?" * 90: 2},
    {"(a|a)*" * 20 + "[x]": 1}, {"((a{99}){99}){99}": 1},
    {f"^{number}": 1 for number in range(9000)}, ["query"] * 20_000,
)  # fmt: skip


@contextmanager
def _adapters() -> Iterator[Try]:
    with tempfile.TemporaryDirectory(dir=_memory()) as folder:
        directory = Path(folder)

        def attempt(data: bytes) -> None:
            (directory / "adapter_config.json").write_bytes(data)
            with suppress(ModelBroken):
                adapter = read_adapter(directory)
                for module in (
                    "base_model.model.encoder.layer.0.attention.self.query",
                    "a" * 300,
                    "x.y.z",
                ):
                    adapter.is_target(module)
                    adapter.module_scale(module)

        yield attempt


# settings: generation_config.json, and preprocessor_config.json of images


_SETTINGS: Final[Mapping[str, object]] = {
    "generation": {
        "eos_token_id": [2, 3], "bos_token_id": 1, "decoder_start_token_id": 1,
        "max_new_tokens": 20, "min_new_tokens": 2,
        "num_beams": 2, "length_penalty": 0.8, "early_stopping": True, "repetition_penalty": 1.2,
        "no_repeat_ngram_size": 3,
        "bad_words_ids": [[5], [7, 8]], "suppress_tokens": [9], "begin_suppress_tokens": [10],
        "forced_bos_token_id": 0,
        "forced_eos_token_id": 2,
    },
    "images": {
        "image_processor_type": "CLIPImageProcessor", "size": {"shortest_edge": 24},
        "crop_size": 20, "resample": 3,
        "do_rescale": True, "rescale_factor": 1 / 255, "image_mean": [0.5, 0.4, 0.3],
        "image_std": [0.5, 0.4, 0.3],
    },
}  # fmt: skip
_SETTINGS_WORDS: Final[Sequence[object]] = (
    1e308, -1e308, 1e-308, 5e-324, float("nan"), float("inf"), list(range(100_000)), [[1] * 1000],
    [[1]] * 5000, [300], [-1], -1,
    299, 300, 10**30, [], [[]], "never", {}, [0.0, 0.0, 0.0], [1e308] * 3,
)  # fmt: skip
_VOCABULARY: Final = 300


def _make_settings(random: Random, known: Sequence[bytes]) -> bytes:
    made: object = _SETTINGS
    for _ in range(random.randrange(1, 4)):
        made = mutate.changed(random, made, _SETTINGS_WORDS)
    return _dumped(random, made)


def _try_settings(data: bytes) -> None:
    with suppress(ModelBroken):
        given = parse_json(data, "settings.json")
        parts = given if isinstance(given, dict) else {}
        generation, images = (
            part if isinstance(part, dict) else {}
            for part in map(parts.get, ("generation", "images"))
        )
        _try_images(
            ImageProcessing.from_config(
                Config(images, file="preprocessor_config.json"), "CLIPImageProcessor"
            )
        )
        settings = parse_settings(Config(generation))
        settings.check_vocabulary(_VOCABULARY)
        _try_writing(settings)


def _try_images(processing: ImageProcessing) -> None:
    pixels = torch.arange(256, dtype=torch.float32)[:, None] * processing.scale
    if not bool(
        ((pixels - torch.tensor(processing.mean)) / torch.tensor(processing.std)).isfinite().all()
    ):
        raise Broken("pixels that are not finite")


def _try_writing(settings: DecodeSettings) -> None:
    ids = np.array([settings.start or 0], np.int32)
    longest = 1 + settings.longest(1, None, 64)
    rules, search = TokenRules(settings, 1, longest), BeamSearch(settings, ids, longest)
    for _ in range(6):
        scores = torch.linspace(-5, 5, _VOCABULARY)[None].repeat(settings.beams, 1)
        apply(scores, [rules.edits(ids)] * settings.beams)
        chosen = search.advance(scores.log_softmax(-1))
        if not chosen:
            return
        ids = np.append(ids, np.int32(chosen[0].token))


TARGETS: Final = (
    Target("settings", _make_settings, plain(_try_settings), share=0.5),
    Target("tensors", _make_tensors, _tensors, guided=True, share=2.0),
    Target("indexes", _make_index, _indexes, share=0.5),
    Target("directories", _make_directory, lambda: _in_directory(_try_card)),
    Target(
        "models",
        _make_directory,
        lambda: _in_directory(_try_model),
        share=0.7,
        memory_bytes=2 << 30,
    ),
    Target("encoders", _make_encoder, plain(_try_encoder), memory_bytes=2 << 30),
    Target("tokenizers", _make_tokenizer, _tokenizers, memory_bytes=2 << 30),
    Target("templates", _make_template, plain(_try_template), share=0.5, hang_seconds=60.0),
    Target("adapters", _make_adapter, _adapters, share=0.5),
)
