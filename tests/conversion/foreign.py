"""Tiny GGUF and ONNX files, written by the packages of their formats."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import gguf
import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

Type = gguf.GGMLQuantizationType
WIDTH: Final = 64
_LAYERS: Final = 2
_HEADS: Final = {"llama": (4, 2), "qwen2": (4, 2), "gemma3": (4, 2)}
_NAMES: Final = {
    "llama": ("attn_norm", "ffn_norm"),
    "qwen2": ("attn_norm", "ffn_norm"),
    "gemma3": ("attn_norm", "ffn_norm", "post_attention_norm", "post_ffw_norm"),
}
PIECES: Final = [
    "<unk>",
    "<s>",
    "</s>",
    *(f"<0x{byte:02X}>" for byte in range(256)),
    "▁",
    "a",
    "b",
    "ab",
    "▁a",
    "▁ab",
]
CHAT: Final = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


def byte_level_tokens() -> tuple[list[str], list[str]]:
    """The 256 bytes as GPT-2 writes them, one merged token and two special ones; and the merges."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = [byte for byte in range(256) if byte not in plain]
    alphabet = sorted(
        [chr(byte) for byte in plain] + [chr(256 + place) for place in range(len(rest))]
    )
    return ["<|endoftext|>", "<|im_start|>", *alphabet, "ab"], ["a b"]


def write_gguf(
    path: Path, architecture: str, kind: Type = Type.Q8_0, *, tokenizer: str = "gpt2", seed: int = 0
) -> None:
    """Write a decoder of two layers with matrices of the type `kind`."""
    writer = gguf.GGUFWriter(path, architecture)
    heads, groups = _HEADS[architecture]
    head = 256 if architecture == "gemma3" else WIDTH // heads  # that of every published gemma3
    numbers = {
        "block_count": _LAYERS,
        "context_length": 128,
        "embedding_length": WIDTH,
        "feed_forward_length": 2 * WIDTH,
        "attention.head_count": heads,
        "attention.head_count_kv": groups,
        **(
            {
                "attention.key_length": head,
                "attention.value_length": head,
                "attention.sliding_window": 32,
            }
            if architecture == "gemma3"
            else {}
        ),
    }
    for key, number in numbers.items():
        writer.add_uint32(f"{architecture}.{key}", number)
    writer.add_float32(f"{architecture}.attention.layer_norm_rms_epsilon", 1e-6)
    writer.add_float32(f"{architecture}.rope.freq_base", 10_000.0)
    tokens = _add_tokenizer(writer, tokenizer)
    random = np.random.default_rng(seed)

    def add(name: str, *shape: int) -> None:
        data = random.standard_normal(shape).astype(np.float32)
        if len(shape) > 1:
            writer.add_tensor(name, gguf.quantize(data, kind), raw_dtype=kind)
        else:
            writer.add_tensor(name, data)

    add("token_embd.weight", tokens, WIDTH)
    add("output_norm.weight", WIDTH)
    for layer in range(_LAYERS):
        for name, rows, columns in (
            ("attn_q", heads * head, WIDTH),
            ("attn_k", groups * head, WIDTH),
            ("attn_v", groups * head, WIDTH),
            ("attn_output", WIDTH, heads * head),
            ("ffn_gate", 2 * WIDTH, WIDTH),
            ("ffn_up", 2 * WIDTH, WIDTH),
            ("ffn_down", WIDTH, 2 * WIDTH),
        ):
            add(f"blk.{layer}.{name}.weight", rows, columns)
            if architecture == "qwen2" and name in ("attn_q", "attn_k", "attn_v"):
                add(f"blk.{layer}.{name}.bias", rows)
        for name in _NAMES[architecture]:
            add(f"blk.{layer}.{name}.weight", WIDTH)
        if architecture == "gemma3":
            add(f"blk.{layer}.attn_q_norm.weight", head)
            add(f"blk.{layer}.attn_k_norm.weight", head)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_tokenizer(writer: Any, kind: str) -> int:
    writer.add_tokenizer_model(kind)
    writer.add_chat_template(CHAT)
    if kind == "llama":
        kinds = [2, 3, 3, *[6] * 256, *[1] * (len(PIECES) - 259)]
        writer.add_token_list(PIECES)
        writer.add_token_scores([0.0] * 259 + [-float(place) for place in range(len(PIECES) - 259)])
        writer.add_token_types(kinds)
        writer.add_bos_token_id(1)
        writer.add_eos_token_id(2)
        writer.add_unk_token_id(0)
        return len(PIECES)
    tokens, merges = byte_level_tokens()
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(tokens)
    writer.add_token_types([3, 3, *[1] * (len(tokens) - 2)])
    writer.add_token_merges(merges)
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(0)
    return len(tokens)


def write_onnx(path: Path, initializers: Mapping[str, Any], nodes: list[Any]) -> None:
    """A graph of the nodes. Its inputs are not declared, as it is never run."""
    made = [numpy_helper.from_array(np.asarray(data), name) for name, data in initializers.items()]
    output = helper.make_tensor_value_info("out", TensorProto.FLOAT, None)
    onnx.save(helper.make_model(helper.make_graph(nodes, "g", [], [output], made)), path)
