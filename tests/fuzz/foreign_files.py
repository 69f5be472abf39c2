"""GGUF and ONNX files with changes, through the conversions of `shoal models convert` in the child
process.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import gguf
import numpy as np
from onnx import helper

from libs.conversion.child import EXPANSION
from libs.conversion.formats import gguf_settings, gguf_tensors, onnx_file
from tests.conversion.foreign import Type, write_onnx
from tests.fuzz import conversions, mutate
from tests.fuzz.target import Random, Target, Try

_SLACK: Final = 1 << 20
"""Bytes of an output beyond its ratio to the input: the names of its tensors."""

_TOKENS: Final = ["<unk>", "<s>", "</s>", "a", "b", "ab", "\u2581a"]
_GGUF_WORDS: Final = (
    b"GGUF", b"general.architecture", b"general.alignment", b"llama", b"qwen2", b"gemma3",
    b"tokenizer.ggml.tokens",
    b"tokenizer.ggml.model", b"gpt2", b"tokenizer.ggml.merges", b"tokenizer.ggml.scores",
    b"blk.0.attn_q.weight",
    b"rope_freqs.weight",
    *(struct.pack("<I", kind) for kind in range(16)), struct.pack("<Q", 1 << 63),
    struct.pack("<Q", 1 << 32), struct.pack("<Q", 0),
)  # fmt: skip
_ONNX_WORDS: Final = (
    b"onnx::MatMul_7", b"_quantized", b"_scale", b"_zero_point", b"DequantizeLinear", b"axis",
    b"/lin/MatMul", b"MatMulInteger",
    b"\x3a", b"\x2a", b"\x0a", b"\x08\x01", b"\x10\x01", b"\x10\x03", b"\x4a", b"\x72\x01\x01",
    b"\xff" * 9 + b"\x01",
)  # fmt: skip


def _gguf(path: Path, architecture: str, tokenizer: str, kind: Type) -> bytes:
    """Return a file of one layer with a small vocabulary."""
    writer = gguf.GGUFWriter(path, architecture)
    numbers = {"block_count": 1, "context_length": 16, "embedding_length": 32,
    "feed_forward_length": 32, "attention.head_count": 2,
        "attention.head_count_kv": 1, "attention.sliding_window": 4}  # fmt: skip
    for key, number in numbers.items():
        writer.add_uint32(f"{architecture}.{key}", number)
    writer.add_float32(f"{architecture}.attention.layer_norm_rms_epsilon", 1e-6)
    writer.add_tokenizer_model(tokenizer)
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(_TOKENS)
    writer.add_token_scores([-float(place) for place in range(len(_TOKENS))])
    writer.add_token_types([2, 3, 3, *[1] * (len(_TOKENS) - 3)])
    writer.add_token_merges(["a b"])
    for add in (writer.add_bos_token_id, writer.add_eos_token_id, writer.add_unk_token_id):
        add(1)
    random = np.random.default_rng(0)
    for name, rows in (
        ("token_embd", len(_TOKENS)),
        ("blk.0.attn_q", 32),
        ("blk.0.attn_k", 16),
        ("blk.0.ffn_down", 2),
    ):
        data = random.standard_normal((rows, 32)).astype(np.float32)
        writer.add_tensor(f"{name}.weight", gguf.quantize(data, kind), raw_dtype=kind)
    writer.add_tensor("output_norm.weight", np.ones(32, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path.read_bytes()


def _onnx(path: Path) -> list[bytes]:
    """Return a file of float weights, and one of quantised weights in each form."""
    weight, integers, base = (
        np.arange(12, dtype=np.float32).reshape(3, 4),
        np.arange(12, dtype=np.int8).reshape(3, 4),
        "onnx::MatMul_7",
    )
    product = helper.make_node("MatMul", ["x", base], ["out"], name="/bert/dense/MatMul")
    plain = {
        "bert.dense.bias": np.ones(4, np.float32),
        base: weight,
        "half.weight": weight.astype(np.float16),
    }
    steps = np.linspace(0.5, 1.5, 4, dtype=np.float32)
    names = [f"{base}_quantized", f"{base}_scale", f"{base}_zero_point"]
    quantised = [
        helper.make_node("DequantizeLinear", names, ["w"], axis=1),
        helper.make_node("MatMul", ["x", "w"], ["y"], name="/a/b/MatMul"),
    ]
    dynamic = helper.make_node(
        "MatMulInteger", ["x", names[0], "z", names[2]], ["out"], name="/lin/MatMul_quant"
    )
    made: list[tuple[dict[str, Any], list[Any]]] = [
        (plain, [product]),
        (dict(zip(names, (integers, steps, np.arange(4, dtype=np.int8)), strict=True)), quantised),
        (
            dict(zip(names, (integers.view(np.uint8), np.float32(0.25), np.uint8(5)), strict=True)),
            [dynamic],
        ),
    ]
    found = []
    for initializers, nodes in made:
        write_onnx(path, initializers, nodes)
        found.append(path.read_bytes())
    return found


def _bases() -> tuple[list[bytes], list[bytes]]:
    with TemporaryDirectory() as folder:
        path = Path(folder) / "file"
        forms = [
            ("llama", "llama", Type.Q8_0),
            ("qwen2", "gpt2", Type.F16),
            ("gemma3", "llama", Type.Q4_1),
            ("llama", "gpt2", Type.F32),
        ]
        return [_gguf(path, *form) for form in forms], _onnx(path)


_GGUF, _ONNX = _bases()


def _make_gguf(random: Random, known: Sequence[bytes]) -> bytes:
    return mutate.mutated(random, random.choice([*_GGUF, *known]), _GGUF_WORDS, _GGUF)


def _make_onnx(random: Random, known: Sequence[bytes]) -> bytes:
    return mutate.mutated(random, random.choice([*_ONNX, *known]), _ONNX_WORDS, _ONNX)


@contextmanager
def _open_gguf() -> Iterator[Try]:
    def check(data: bytes, output: Path) -> None:
        conversions.check_tensors(output, EXPANSION["gguf"] * len(data) + _SLACK)

    with conversions.opened(
        [gguf_tensors.convert, gguf_settings.convert], _GGUF[0], check
    ) as attempt:
        yield attempt


@contextmanager
def _open_onnx() -> Iterator[Try]:
    def check(data: bytes, output: Path) -> None:
        conversions.check_tensors(output, EXPANSION["onnx"] * len(data) + _SLACK)

    with conversions.opened([onnx_file.convert], _ONNX[0], check) as attempt:
        yield attempt


TARGETS: Final = (
    Target("gguf_files", _make_gguf, _open_gguf),
    Target("onnx_files", _make_onnx, _open_onnx),
)
