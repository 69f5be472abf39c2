"""GGUF and ONNX files become the directories that transformers would have, or are refused by
name.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers
from onnx import helper
from safetensors.torch import load_file

from libs.conversion import ConversionRecord
from libs.errors import ModelBroken
from libs.store import write_converted
from tests.conversion.foreign import CHAT, Type, write_gguf, write_onnx

# transformers and its dependencies emit deprecation warnings.
pytestmark = pytest.mark.filterwarnings("ignore")

TEXTS = ["ab aab 12", "naïve 東京 <|im_start|>ab", "  a  b\n"]
TYPES = ["F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"]


def converted(source: Path) -> tuple[Path, tuple[ConversionRecord, ...]]:
    target = source.with_name("converted")
    return target, write_converted(source, target, lambda file, done, total: None)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    made = tmp_path / "source"
    made.mkdir()
    return made


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "gemma3"])
def test_gguf_weights_and_settings_are_those_that_transformers_reads(
    architecture: str, source: Path
) -> None:
    write_gguf(source / "tiny.gguf", architecture)
    directory, done = converted(source)
    assert [one.output for one in done] == ["model.safetensors", "gguf_settings.json"]
    assert not (directory / "gguf_settings.json").exists()
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        source, gguf_file="tiny.gguf", dtype=torch.float32
    )
    ours = load_file(directory / "model.safetensors")
    wanted = {
        name: tensor for name, tensor in theirs.state_dict().items() if name != "lm_head.weight"
    }
    assert ours.keys() == wanted.keys()
    for name, tensor in ours.items():
        torch.testing.assert_close(tensor.float(), wanted[name], rtol=0, atol=1e-6, msg=name)
    config = transformers.AutoConfig.from_pretrained(directory)
    for key in (
        "hidden_size",
        "num_key_value_heads",
        "head_dim",
        "intermediate_size",
        "tie_word_embeddings",
        "vocab_size",
    ):
        assert (
            getattr(config, key, None) == getattr(theirs.config, key, None) or key == "head_dim"
        ), key
    ids = torch.tensor([[3, 4, 5, 6, 7]])
    with torch.inference_mode():
        mine = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
        torch.testing.assert_close(mine(ids).logits, theirs(ids).logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", TYPES)
def test_each_type_of_gguf_is_dequantised_as_its_package_does(kind: str, source: Path) -> None:
    write_gguf(source / "tiny.gguf", "llama", getattr(Type, kind))
    directory, _ = converted(source)
    ours = load_file(directory / "model.safetensors")
    reader = gguf.GGUFReader(source / "tiny.gguf")
    stored = next(tensor for tensor in reader.tensors if tensor.name == "blk.1.ffn_down.weight")
    wanted = gguf.dequantize(stored.data, stored.tensor_type)
    found = ours["model.layers.1.mlp.down_proj.weight"]
    assert found.dtype == {"F16": torch.float16, "BF16": torch.bfloat16}.get(kind, torch.float32)
    np.testing.assert_array_equal(found.float().numpy(), wanted)


def test_byte_level_tokenizer_of_gguf_gives_the_ids_of_transformers(source: Path) -> None:
    write_gguf(source / "tiny.gguf", "qwen2")
    directory, _ = converted(source)
    ours = transformers.AutoTokenizer.from_pretrained(directory)
    theirs = transformers.AutoTokenizer.from_pretrained(source, gguf_file="tiny.gguf")
    assert [ours(text)["input_ids"] for text in TEXTS] == [
        theirs(text)["input_ids"] for text in TEXTS
    ]
    assert [ours.decode(ours(text)["input_ids"]) for text in TEXTS] == TEXTS
    assert ours.chat_template == CHAT


def test_sentencepiece_tokenizer_of_gguf_merges_by_its_scores(source: Path) -> None:
    write_gguf(source / "tiny.gguf", "llama", tokenizer="llama")
    directory, _ = converted(source)
    ours = transformers.PreTrainedTokenizerFast(tokenizer_file=str(directory / "tokenizer.json"))
    assert ours.convert_ids_to_tokens(ours("ab")["input_ids"]) == ["<s>", "▁ab"]
    assert ours.convert_ids_to_tokens(ours("é")["input_ids"]) == ["<s>", "▁", "<0xC3>", "<0xA9>"]


def test_files_of_the_directory_win_over_those_of_gguf(source: Path) -> None:
    write_gguf(source / "tiny.gguf", "llama")
    (source / "generation_config.json").write_text('{"eos_token_id": 7}')
    directory, _ = converted(source)
    assert json.loads((directory / "generation_config.json").read_text()) == {"eos_token_id": 7}


def _truncated(data: bytes) -> bytes:
    return data[:-4000]


def _patched(begin: int, content: bytes) -> Callable[[bytes], bytes]:
    return lambda data: data[:begin] + content + data[begin + len(content) :]


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (_truncated, "is truncated: the tensor"),
        (lambda data: data[:1000], "is truncated within its metadata"),
        (_patched(0, b"GGML"), "is not a GGUF file"),
        (_patched(4, b"\x00\x00\x00\x03"), "big-endian"),
        (_patched(8, b"\xff" * 8), "tensors and .* keys; at most"),
        (
            lambda data: data.replace(b"Q" * 0 + b"blk.1.ffn_up", b"blk.1.ffn_xx"),
            "'blk.1.ffn_xx.weight', which llama",
        ),
        (lambda data: data.replace(b"blk.1.ffn_up", b"blk.0.ffn_up"), "a tensor twice"),
        (lambda data: data.replace(b"llama", b"mamba"), "the architecture 'mamba'"),
    ],
    ids=[
        "truncated",
        "cut in its header",
        "magic",
        "big-endian",
        "counts",
        "name",
        "twice",
        "architecture",
    ],
)
def test_hostile_gguf_file_is_refused_by_name(
    change: Callable[[bytes], bytes], named: str, source: Path
) -> None:
    write_gguf(source / "tiny.gguf", "llama")
    path = source / "tiny.gguf"
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(ModelBroken, match=rf"tiny\.gguf: .*{named}"):
        converted(source)
    assert not (source.parent / "converted").exists()


def test_several_gguf_files_are_refused(source: Path) -> None:
    (source / "a-Q4.gguf").touch()
    (source / "a-Q8.gguf").touch()
    with pytest.raises(ModelBroken, match=r"one of 2 \.gguf files; leave one"):
        converted(source)


WEIGHT = np.arange(12, dtype=np.float32).reshape(3, 4)


def _product(name: str, weight: str) -> Any:
    return helper.make_node("MatMul", ["x", weight], ["out"], name=name)


def _written(
    source: Path, initializers: dict[str, Any], nodes: list[Any]
) -> dict[str, torch.Tensor]:
    (source / "config.json").write_text("{}")
    write_onnx(source / "model.onnx", initializers, nodes)
    directory, _ = converted(source)
    return load_file(directory / "model.safetensors")


def test_onnx_weights_of_products_are_named_by_their_scope_and_transposed(source: Path) -> None:
    found = _written(
        source,
        {
            "bert.dense.bias": np.ones(4, np.float32),
            "onnx::MatMul_7": WEIGHT,
            "half.weight": WEIGHT.astype(np.float16),
        },
        [_product("/bert/dense/MatMul", "onnx::MatMul_7")],
    )
    assert found.keys() == {"bert.dense.bias", "bert.dense.weight", "half.weight"}
    np.testing.assert_array_equal(found["bert.dense.weight"], WEIGHT.T)
    assert found["half.weight"].dtype == torch.float16


@pytest.mark.parametrize("axis", [None, 0, 1])
def test_onnx_weights_that_are_quantised_become_float32(axis: int | None, source: Path) -> None:
    integers = np.arange(12, dtype=np.int8).reshape(3, 4)
    count = 1 if axis is None else integers.shape[axis]
    scale = np.linspace(0.5, 1.5, count, dtype=np.float32) if axis is not None else np.float32(0.5)
    zero = np.arange(count, dtype=np.int8) if axis is not None else np.int8(3)
    base = "onnx::MatMul_7"
    node = helper.make_node(
        "DequantizeLinear",
        [f"{base}_quantized", f"{base}_scale", f"{base}_zero_point"],
        ["w"],
        axis=1 if axis is None else axis,
    )
    found = _written(
        source,
        {f"{base}_quantized": integers, f"{base}_scale": scale, f"{base}_zero_point": zero},
        [node, _product("/lin/MatMul", "w")],
    )
    spread = (-1, 1) if axis == 0 else (1, -1)
    wanted = (integers.astype(np.float32) - np.reshape(zero, spread)) * np.reshape(scale, spread)
    np.testing.assert_array_equal(found["lin.weight"], wanted.T)


def test_onnx_weights_of_dynamic_quantisation_become_float32(source: Path) -> None:
    base, integers = "onnx::MatMul_7", np.arange(12, dtype=np.uint8).reshape(3, 4)
    found = _written(
        source,
        {
            f"{base}_quantized": integers,
            f"{base}_scale": np.float32(0.25),
            f"{base}_zero_point": np.uint8(5),
        },
        [
            helper.make_node(
                "MatMulInteger",
                ["x", f"{base}_quantized", "z", f"{base}_zero_point"],
                ["out"],
                name="/lin/MatMul_quant",
            )
        ],
    )
    np.testing.assert_array_equal(found["lin.weight"], (integers.astype(np.float32) - 5).T * 0.25)


@pytest.mark.parametrize(
    ("node", "is_transposed"),
    [("/pooler/dense/Gemm_MatMul_quant", True), ("/pooler/dense/MatMul_quant", False)],
)
def test_quantised_gemm_is_written_as_torch_stores_it(
    node: str, is_transposed: bool, source: Path
) -> None:
    """The shape of a square weight does not show its orientation."""
    base, integers = "pooler.dense.weight", np.arange(9, dtype=np.uint8).reshape(3, 3)
    found = _written(
        source,
        {
            f"{base}_quantized": integers,
            f"{base}_scale": np.float32(0.25),
            f"{base}_zero_point": np.uint8(5),
        },
        [
            helper.make_node(
                "MatMulInteger",
                ["x", f"{base}_quantized", "z", f"{base}_zero_point"],
                ["out"],
                name=node,
            )
        ],
    )
    wanted = (integers.astype(np.float32) - 5) * 0.25
    np.testing.assert_array_equal(found[base], wanted.T if is_transposed else wanted)


def test_onnx_file_without_config_is_refused(source: Path) -> None:
    write_onnx(source / "model.onnx", {"a.weight": WEIGHT}, [])
    with pytest.raises(ModelBroken, match=r"model\.onnx: config\.json is missing"):
        converted(source)


@pytest.mark.parametrize(
    ("data", "named"),
    [
        (b"", "is empty"),
        (b"\x3a\xff\xff\xff\xff\x0f", "is truncated, or is not an ONNX file"),
        (b"\x3f" * 64, "not a protobuf message"),
        (b"\x3a\x02\x2a\x00", "no initializers with the names of parameters"),
        (b"\x08" + b"\xff" * 64, "more than 64 bits"),
    ],
)
def test_hostile_onnx_file_is_refused_by_name(data: bytes, named: str, source: Path) -> None:
    (source / "config.json").write_text("{}")
    (source / "model.onnx").write_bytes(data)
    with pytest.raises(ModelBroken, match=rf"model\.onnx: .*{named}"):
        converted(source)
