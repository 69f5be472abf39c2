"""Writes the settings and the tokenizer of a GGUF file as a Hugging Face directory has them, as one
JSON object by file name.
"""

from __future__ import annotations

import hashlib
import json
import mmap
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, BinaryIO, Final

import tokenizers
from tokenizers import AddedToken, Regex, Tokenizer, decoders, pre_tokenizers

from libs.conversion.archive import CheckpointRefused
from libs.conversion.formats.gguf_file import GgufLayout, read_layout
from libs.conversion.formats.gguf_tensors import check_architecture
from libs.conversion.sentencepiece import BPE, CONTROL, USER_DEFINED, Pieces, VocabularyPiece
from libs.conversion.vocabularies import QWEN2_SPLIT, bpe_model, from_pieces, template_processor
from libs.conversion.writing import Progress

_LLAMA3_SPLIT: Final = QWEN2_SPLIT.replace(r"|\p{N}|", r"|\p{N}{1,3}|")
_BYTE_LEVEL: Final[Mapping[str, tuple[Any, ...]]] = {
    "gpt-2": (pre_tokenizers.ByteLevel(add_prefix_space=False),),
    "smollm": (
        pre_tokenizers.Digits(individual_digits=True),
        pre_tokenizers.ByteLevel(add_prefix_space=False),
    ),
    "qwen2": (
        pre_tokenizers.Split(Regex(QWEN2_SPLIT), behavior="isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ),
    "llama-bpe": (
        pre_tokenizers.Split(Regex(_LLAMA3_SPLIT), behavior="isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ),
}
"""The pattern by which each of llama.cpp's names in tokenizer.ggml.pre splits a text before BPE."""

_SLOTS: Final = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
}
_LAST_GEMMA_LAYERS: Final = 62
"""Layers of gemma-3-27b, the only size that scales queries by the head width it would have without
key_length.
"""


@dataclass(frozen=True, slots=True)
class Bundle:
    """The report: the output's digest, the number of files in it, and the version of the library
    that wrote the tokenizer.
    """

    sha256: str
    files: int
    tokenizers: str


def convert(source: BinaryIO, mapping: mmap.mmap, output: BinaryIO, progress: Progress) -> Bundle:
    """Write the bundle of a GGUF file to an empty file. Raises CheckpointRefused, naming the
    fault.
    """
    layout = read_layout(mapping)
    check_architecture(layout)
    config = _config(layout)
    files = {
        "config.json": json.dumps(config, indent=1),
        "generation_config.json": json.dumps({key: config[key] for key in _ids(layout)}, indent=1),
        "tokenizer.json": _tokenizer(layout),
        "tokenizer_config.json": json.dumps(_tokenizer_config(layout), indent=1),
    }
    made = json.dumps(files).encode()
    progress(len(made), len(made))
    output.write(made)
    return Bundle(hashlib.sha256(made).hexdigest(), len(files), tokenizers.__version__)


def _config(layout: GgufLayout) -> dict[str, Any]:
    heads = layout.number("attention.head_count")
    width = layout.number("embedding_length")
    head = layout.number("attention.key_length", width // heads if heads else 0)
    if layout.number("attention.value_length", head) != head:
        raise CheckpointRefused("has keys and values of different widths")
    names = {tensor.name for tensor in layout.tensors}
    config = {
        "hidden_size": width,
        "num_hidden_layers": layout.number("block_count"),
        "intermediate_size": layout.number("feed_forward_length"),
        "num_attention_heads": heads,
        "num_key_value_heads": layout.number("attention.head_count_kv", heads),
        "head_dim": head,
        "rms_norm_eps": layout.number("attention.layer_norm_rms_epsilon"),
        "rope_theta": layout.number("rope.freq_base", 10_000.0),
        "max_position_embeddings": layout.number("context_length"),
        "vocab_size": len(_tokens(layout)),
        "tie_word_embeddings": "output.weight" not in names,
        "dtype": "float32",
        **_ids(layout),
        **_rope_scaling(layout),
    }
    match layout.architecture:
        case "llama":
            own: dict[str, Any] = {
                "architectures": ["LlamaForCausalLM"],
                "model_type": "llama",
                "hidden_act": "silu",
            }
        case "qwen2":
            own = {
                "architectures": ["Qwen2ForCausalLM"],
                "model_type": "qwen2",
                "hidden_act": "silu",
                "use_sliding_window": False,
            }
        case _:
            is_largest = config["num_hidden_layers"] == _LAST_GEMMA_LAYERS
            own = {
                "architectures": ["Gemma3ForCausalLM"],
                "model_type": "gemma3_text",
                "hidden_activation": "gelu_pytorch_tanh",
                "sliding_window": layout.number("attention.sliding_window"),
                "sliding_window_pattern": 6,
                "rope_local_base_freq": 10_000.0,
                "query_pre_attn_scalar": width // heads if is_largest else head,
            }
    return {**config, **own}


def _rope_scaling(layout: GgufLayout) -> dict[str, Any]:
    kind = layout.values.get(f"{layout.architecture}.rope.scaling.type", "none")
    if kind == "none":
        return {}
    if kind != "linear":
        raise CheckpointRefused(
            f"has rotary embeddings scaled by {str(kind)[:40]!r}; only linear scaling is converted"
        )
    return {"rope_scaling": {"rope_type": "linear", "factor": layout.number("rope.scaling.factor")}}


def _ids(layout: GgufLayout) -> dict[str, int]:
    found = {
        slot: layout.values.get(f"tokenizer.ggml.{key}")
        for slot, key in _SLOTS.items()
        if slot != "unk_token"
    }
    return {f"{slot}_id": number for slot, number in found.items() if isinstance(number, int)}


def _tokens(layout: GgufLayout) -> list[str]:
    tokens = layout.texts("tokenizer.ggml.tokens")
    if not tokens:
        raise CheckpointRefused("has no tokenizer (tokenizer.ggml.tokens)")
    return tokens


def _numbers(layout: GgufLayout, key: str, count: int) -> list[Any]:
    found = layout.values.get(key)
    if (
        not isinstance(found, list)
        or len(found) != count
        or any(isinstance(number, str) for number in found)
    ):
        raise CheckpointRefused(f"has no {key} with a number for each of its {count:,} tokens")
    return found


def _tokenizer_config(layout: GgufLayout) -> dict[str, Any]:
    tokens = _tokens(layout)
    config: dict[str, Any] = {"model_max_length": layout.number("context_length")}
    for slot, key in _SLOTS.items():
        number = layout.values.get(f"tokenizer.ggml.{key}")
        if isinstance(number, int) and 0 <= number < len(tokens):
            config[slot] = tokens[number]
    for key in ("add_bos_token", "add_eos_token"):
        if isinstance(flag := layout.values.get(f"tokenizer.ggml.{key}"), bool):
            config[key] = flag
    if isinstance(template := layout.values.get("tokenizer.chat_template"), str):
        config["chat_template"] = template
    if layout.values.get("tokenizer.ggml.model") == "llama":
        name = "GemmaTokenizer" if layout.architecture == "gemma3" else "LlamaTokenizer"
        has_prefix = layout.values.get("tokenizer.ggml.add_space_prefix", True) is True
        return {**config, "tokenizer_class": name, "add_prefix_space": has_prefix}
    return {**config, "tokenizer_class": "PreTrainedTokenizerFast"}


def _tokenizer(layout: GgufLayout) -> str:
    kind = layout.values.get("tokenizer.ggml.model")
    tokens = _tokens(layout)
    if kind == "llama":
        kinds = _numbers(layout, "tokenizer.ggml.token_type", len(tokens))
        scores = _numbers(layout, "tokenizer.ggml.scores", len(tokens))
        pieces = [
            VocabularyPiece(*row) for row in zip(tokens, map(float, scores), kinds, strict=True)
        ]
        unknown = layout.values.get("tokenizer.ggml.unknown_token_id", 0)
        if not isinstance(unknown, int) or not 0 <= unknown < len(tokens):
            raise CheckpointRefused("has no unknown token (tokenizer.ggml.unknown_token_id)")
        return from_pieces(
            _tokenizer_config(layout), Pieces(pieces, BPE, unknown, tokens[unknown], b"")
        )
    if kind != "gpt2":
        raise CheckpointRefused(
            f"has a tokenizer of the sort {str(kind)[:40]!r}; gpt2 (byte-level BPE) and llama "
            "(SentencePiece) are converted"
        )
    return _byte_level(layout, tokens)


def _pair(line: str) -> tuple[str, str]:
    match line.split(" "):
        case [left, right]:
            return left, right
    raise CheckpointRefused(
        f"has the merge {line[:100]!r} in tokenizer.ggml.merges, which is not two pieces"
    )


def _byte_level(layout: GgufLayout, tokens: list[str]) -> str:
    pre = str(layout.values.get("tokenizer.ggml.pre", ""))
    if pre not in _BYTE_LEVEL:
        raise CheckpointRefused(
            f"splits texts by the rules {pre[:40]!r}; {', '.join(_BYTE_LEVEL)} are known"
        )
    merges = [_pair(line) for line in layout.texts("tokenizer.ggml.merges")]
    vocab = {token: number for number, token in enumerate(tokens)}
    if len(vocab) < len(tokens):
        raise CheckpointRefused("has a token twice in tokenizer.ggml.tokens")
    tokenizer = Tokenizer(
        bpe_model(vocab, merges, fuse_unk=False, ignore_merges=pre == "llama-bpe")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(list(_BYTE_LEVEL[pre]))
    tokenizer.decoder = decoders.ByteLevel()
    kinds = _numbers(layout, "tokenizer.ggml.token_type", len(tokens))
    for token, kind in zip(tokens, kinds, strict=True):
        if kind in (CONTROL, USER_DEFINED):
            add = tokenizer.add_special_tokens if kind == CONTROL else tokenizer.add_tokens
            add([AddedToken(token, special=kind == CONTROL, normalized=False)])
    config = _tokenizer_config(layout)
    if config.get("add_bos_token") and "bos_token" in config:
        bos = config["bos_token"]
        tokenizer.post_processor = template_processor(
            [bos, "$A"], [bos, "$A", f"{bos}:1", "$B:1"], [(bos, vocab[bos])]
        )
    made: str = tokenizer.to_str()
    return made
