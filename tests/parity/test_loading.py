"""Checkpoints in all their published forms, and refusals that name the file, the tensor or the
key."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from libs.errors import ModelBroken
from libs.models.interface.packed import Packed
from libs.models.layers.encoder import PackedEncoder
from libs.models.text.registry import build_encoder
from libs.models.weights import HeadRule, Maybe, TensorFile
from tests.parity.checkpoints import random_model, write_checkpoint

CPU = torch.device("cpu")
BATCH = Packed.from_sequences(
    [np.arange(5, 5 + length, dtype=np.int32) for length in (1, 8, 8, 30)]
)


def build(
    directory: Path, table: dict[str, HeadRule] | None = None, dtype: torch.dtype = torch.float32
) -> tuple[PackedEncoder, dict[str, Tensor]]:
    config = json.loads((directory / "config.json").read_text())
    return build_encoder(
        config, TensorFile.open(directory), dtype=dtype, device=CPU, head_tables=table or {}
    )


def rewrite(directory: Path, change: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> Path:
    tensors = {
        name: tensor.clone() for name, tensor in load_file(directory / "model.safetensors").items()
    }
    save_file(change(tensors), directory / "model.safetensors")
    return directory


def reconfigure(directory: Path, **values: object) -> Path:
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))
    return directory


def test_shards_equal_a_single_file(tmp_path: Path) -> None:
    single = write_checkpoint("bert", tmp_path / "single")
    sharded = write_checkpoint("bert", tmp_path / "sharded", max_shard_size="100KB")
    assert len(list(sharded.glob("*.safetensors"))) > 2
    assert torch.equal(build(single)[0](BATCH), build(sharded)[0](BATCH))


def test_half_precision_checkpoints_are_converted(tmp_path: Path) -> None:
    half = write_checkpoint("bert", tmp_path / "half", dtype=torch.float16)
    rounded = random_model("bert").half().float().state_dict()
    full = rewrite(
        write_checkpoint("bert", tmp_path / "full"),
        lambda _: {name: t.clone() for name, t in rounded.items()},
    )
    assert torch.equal(build(half)[0](BATCH), build(full)[0](BATCH))
    assert build(half)[0](BATCH).dtype is torch.float32


def test_float32_tables_are_views_of_the_mapped_file(tmp_path: Path) -> None:
    tensors = TensorFile.open(write_checkpoint("bert", tmp_path))
    config = json.loads((tmp_path / "config.json").read_text())
    encoder, _ = build_encoder(config, tensors, dtype=torch.float32, device=CPU, head_tables={})
    assert (
        encoder.token_weight.data_ptr()
        == tensors.read("embeddings.word_embeddings.weight").data_ptr()
    )


def test_memory_is_that_of_the_weights_once(tmp_path: Path) -> None:
    directory = write_checkpoint("roberta", tmp_path, hidden=128, layers=3)
    weights = sum(
        p.numel()
        for name, p in random_model("roberta", hidden=128, layers=3).named_parameters()
        if "pooler" not in name
    )
    places = 130 * 128  # positions with segment 0 added
    assert build(directory)[0].bytes == pytest.approx(4 * (weights + places), rel=0.01)
    assert build(directory, dtype=torch.bfloat16)[0].bytes == pytest.approx(
        2 * (weights + places), rel=0.01
    )


def test_every_declared_prefix_is_read(tmp_path: Path) -> None:
    plain = build(write_checkpoint("bert", tmp_path / "plain"))[0](BATCH)
    directory = write_checkpoint("bert", tmp_path / "prefixed")
    rewrite(directory, lambda tensors: {f"bert.{name}": tensor for name, tensor in tensors.items()})
    assert torch.equal(build(directory)[0](BATCH), plain)


def test_old_names_and_buffers_are_read(tmp_path: Path) -> None:
    """LayerNorm.gamma and .beta of checkpoints from TensorFlow, and the position_ids of older
    transformers, are read.
    """
    plain = build(write_checkpoint("bert", tmp_path / "plain"))[0](BATCH)

    def age(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        old = {}
        for name, tensor in tensors.items():
            if "LayerNorm" in name:
                name = name.replace(".weight", ".gamma").replace(".bias", ".beta")
            old[name] = tensor
        return old | {"embeddings.position_ids": torch.arange(128)[None]}

    assert torch.equal(
        build(rewrite(write_checkpoint("bert", tmp_path / "old"), age))[0](BATCH), plain
    )


def test_head_gets_its_tensors_in_float32_and_the_rest_is_dropped(tmp_path: Path) -> None:
    directory = write_checkpoint(
        "bert", tmp_path, head="sequence_classification", labels=("a", "b"), dtype=torch.float16
    )
    _, state = build(directory, {"pooler.dense": "first", "classifier": "second"}, torch.bfloat16)
    assert {name: tuple(tensor.shape) for name, tensor in state.items()} == {
        "first.weight": (64, 64),
        "first.bias": (64,),
        "second.weight": (2, 64),
        "second.bias": (2,),
    }
    assert {tensor.dtype for tensor in state.values()} == {torch.float32}
    assert build(directory)[1] == {}


def test_tied_decoder_may_be_missing(tmp_path: Path) -> None:
    directory = write_checkpoint("bert", tmp_path, head="masked_lm")
    table: dict[str, HeadRule] = {
        "cls.predictions.transform.dense": "dense",
        "cls.predictions.transform.LayerNorm": "norm",
        "cls.predictions.bias": "bias",
        "cls.predictions.decoder": Maybe("decoder"),
    }
    encoder, state = build(directory, table)
    assert set(state) == {"dense.weight", "dense.bias", "norm.weight", "norm.bias", "bias"}
    assert encoder.token_weight.shape == (len(state["bias"]), 64)


def test_head_without_its_tensors_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelBroken, match=r"model\.safetensors: tensor 'classifier' is missing"):
        build(write_checkpoint("bert", tmp_path), {"classifier": "classifier"})


LAYER = "encoder.layer.1.attention.self.key.weight"
CHANGES: dict[str, Callable[[dict[str, Tensor]], dict[str, Tensor]]] = {
    r"model\.safetensors: tensor 'extra\.weight' is unknown": lambda t: (
        t | {"extra.weight": torch.ones(2)}
    ),
    r"model\.safetensors: tensor 'encoder\.layer\.1\.attention\.self\.key\.weight' is missing": (
        lambda t: without(t, LAYER)
    ),
    r"'encoder\.layer\.1\.attention\.self\.key\.weight' has shape \[64, 63\]"
    r".* asks for \[64, 64\]": (lambda t: t | {LAYER: torch.ones(64, 63)}),
    r"'encoder\.layer\.2\.output\.dense\.bias' has no place": lambda t: (
        t | {"encoder.layer.2.output.dense.bias": torch.ones(64)}
    ),
    r"'embeddings\.word_embeddings\.weight' is missing": lambda t: without(
        t, "embeddings.word_embeddings.weight"
    ),
    r"duplicate tensors": lambda t: t | {"embeddings.LayerNorm.gamma": torch.ones(64)},
}


def without(tensors: dict[str, Tensor], name: str) -> dict[str, Tensor]:
    return {key: tensor for key, tensor in tensors.items() if key != name}


@pytest.mark.parametrize("message", CHANGES)
def test_mismatched_tensors_are_refused(message: str, tmp_path: Path) -> None:
    directory = rewrite(write_checkpoint("bert", tmp_path), CHANGES[message])
    with pytest.raises(ModelBroken, match=message):
        build(directory)


CONFIGS: dict[str, dict[str, object]] = {
    "is_decoder is True": {"is_decoder": True},
    "add_cross_attention is True": {"add_cross_attention": True},
    "position_embedding_type is 'relative_key'": {"position_embedding_type": "relative_key"},
    "hidden_act is 'mish'": {"hidden_act": "mish"},
    "num_attention_heads is 5": {"num_attention_heads": 5},
    "num_hidden_layers is missing": {"num_hidden_layers": None},
    "vocab_size is '400'": {"vocab_size": "400"},
    "intermediate_size is 0": {"intermediate_size": 0},
    "layer_norm_eps is '1e-12'": {"layer_norm_eps": "1e-12"},
    "model_type is 'gpt2'": {"model_type": "gpt2"},
}


@pytest.mark.parametrize("message", CONFIGS)
def test_unsupported_configurations_are_refused(message: str, tmp_path: Path) -> None:
    directory = reconfigure(write_checkpoint("bert", tmp_path), **CONFIGS[message])
    with pytest.raises(ModelBroken, match=f"config.json: {message}"):
        build(directory)


def test_pickles_are_refused_with_advice(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"never read")
    with pytest.raises(
        ModelBroken,
        match=r"pytorch_model\.bin: torch checkpoints are pickles.*shoal models convert",
    ):
        TensorFile.open(tmp_path)


def test_directory_without_weights_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelBroken, match=r"model\.safetensors: no such file"):
        TensorFile.open(tmp_path)


@pytest.mark.parametrize("kept", [0, 4, 1000, -1])
def test_truncated_files_are_refused(kept: int, tmp_path: Path) -> None:
    path = write_checkpoint("bert", tmp_path) / "model.safetensors"
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(ModelBroken, match=r"model\.safetensors: "):
        TensorFile.open(tmp_path)


@pytest.mark.parametrize(
    "header",
    [
        b"{",
        b"[]",
        b'{"a": 1}',
        b'{"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}',
        b'{"a": {"dtype": "F32", "shape": [-1], "data_offsets": [4, 0]}}',
        b'{"a": {"dtype": "F4", "shape": [2], "data_offsets": [0, 1]}}',
        b'{"a": {"dtype": "F32", "shape": "2", "data_offsets": [0, 8]}}',
    ],
)
def test_damaged_headers_are_refused(header: bytes, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(
        len(header).to_bytes(8, "little") + header + bytes(16)
    )
    with pytest.raises(ModelBroken, match=r"model\.safetensors: "):
        TensorFile.open(tmp_path)


@pytest.mark.parametrize(
    "index",
    [
        "{",
        "[]",
        "{}",
        '{"weight_map": 3}',
        '{"weight_map": {"a": 3}}',
        '{"weight_map": {"a": "../b"}}',
    ],
)
def test_damaged_indexes_are_refused(index: str, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(index)
    with pytest.raises(ModelBroken, match=r"model\.safetensors\.index\.json: "):
        TensorFile.open(tmp_path)


def test_missing_shard_is_refused(tmp_path: Path) -> None:
    sharded = write_checkpoint("bert", tmp_path, max_shard_size="100KB")
    victim = sorted(sharded.glob("*.safetensors"))[1]
    victim.unlink()
    with pytest.raises(ModelBroken, match=victim.name):
        TensorFile.open(tmp_path)
