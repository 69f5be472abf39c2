"""DeBERTa's attention against transformers in every form of its config.json, and unsupported
settings."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch.utils._python_dispatch import TorchDispatchMode

from libs.errors import ModelBroken
from libs.models.interface.packed import Packed
from libs.models.text.families.bert import deberta
from tests.parity.checkpoints import random_model, write_checkpoint
from tests.parity.test_families import load, packed, random_ids, reference, worst

Settings = Mapping[str, object]

VARIANTS: dict[str, Settings] = {
    "content of the query only": {"pos_att_type": ["c2p"]},
    "content of the key only": {"pos_att_type": ["p2c"], "norm_rel_ebd": "none"},
    "no distances at all": {"pos_att_type": []},
    "projections of distances": {"share_att_key": False},
    "one projection of distances": {"share_att_key": False, "pos_att_type": ["c2p"]},
    "a vector each distance": {"position_buckets": -1, "max_relative_positions": 20},
    "buckets to a distance of their own": {"position_buckets": 16, "max_relative_positions": 40},
    "plain attention": {
        "relative_attention": False,
        "position_biased_input": True,
        "norm_rel_ebd": "none",
    },
    "absolute positions and segments too": {"position_biased_input": True, "type_vocab_size": 2},
    "narrow embeddings": {"embedding_size": 24, "position_biased_input": True},
    "a convolution": {"conv_kernel_size": 3, "conv_act": "gelu"},
    "a wide convolution in groups": {"conv_kernel_size": 5, "conv_groups": 4},
}


@pytest.mark.parametrize("settings", VARIANTS.values(), ids=VARIANTS.keys())
def test_every_form_equals_transformers(settings: Settings, tmp_path: Path) -> None:
    encoder = load(write_checkpoint("deberta-v2", tmp_path, config=settings))
    ids = random_ids((1, 2, 9, 9, 31, 32, 33, 100))
    assert (
        worst(packed(encoder, ids), reference(random_model("deberta-v2", config=settings), ids))
        <= 1e-5
    )
    batch = Packed.from_sequences(ids)
    assert worst([encoder(batch, rows="last")], [encoder(batch)[batch.rows("last")]]) <= 1e-5


@pytest.mark.skipif(
    torch.cuda.is_available(), reason="kernels are compiled, for the accelerator alone"
)
@pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")
@pytest.mark.parametrize("name", list(VARIANTS)[:6])
def test_accelerator_kernel_equals_computation_by_runs(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel is interpreted, with all heads at once and two at a time, and with tokens that see
    only the first ones.
    """
    pytest.importorskip("triton")
    encoder = load(write_checkpoint("deberta-v2", tmp_path, config=VARIANTS[name]))
    ids = random_ids((1, 2, 9, 45))
    batches = Packed.from_sequences(ids), Packed.from_sequences(ids, seen=(0, 1, 5, 0))
    plain = [[encoder(batch), encoder(batch, rows="last")] for batch in batches]
    monkeypatch.setattr(deberta, "has_triton", lambda x: True)
    assert encoder.stack[0].attn.is_graph_capturable
    for batch, wanted, scores in zip(batches, plain, (1 << 27, 2 * 57 * 64), strict=True):
        monkeypatch.setattr(deberta, "_SCORES", scores)
        assert worst([encoder(batch), encoder(batch, rows="last")], wanted) <= 1e-5


@pytest.mark.skipif(
    torch.cuda.is_available(), reason="kernels are compiled, for the accelerator alone"
)
@pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")
def test_accelerator_kernel_launches_do_not_depend_on_lengths(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton")
    encoder = load(write_checkpoint("deberta-v2", tmp_path, layers=1))
    monkeypatch.setattr(deberta, "has_triton", lambda x: True)
    launched = []
    for lengths in ((9, 9, 9), (8, 9, 10)):
        with _Operators() as operators:
            encoder(Packed.from_sequences(random_ids(lengths)))
        launched.append(operators.names)
    assert launched[0] == launched[1]
    assert launched[0].count("aten.bmm.default") == 2


class _Operators(TorchDispatchMode):
    """Records the names of the operators that run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def test_convolution_of_the_only_layer_equals_transformers(tmp_path: Path) -> None:
    settings = {"conv_kernel_size": 3}
    encoder = load(write_checkpoint("deberta-v2", tmp_path, config=settings, layers=1))
    ids = random_ids((1, 2, 9, 9))
    batch = Packed.from_sequences(ids)
    wanted = reference(random_model("deberta-v2", config=settings, layers=1), ids)
    assert worst(packed(encoder, ids), wanted) <= 1e-5
    assert (
        worst([encoder(batch, rows="last")], [torch.stack([rows[-1] for rows in wanted])]) <= 1e-5
    )


def test_segments_with_distances_equal_transformers(tmp_path: Path) -> None:
    settings = {"type_vocab_size": 2}
    encoder = load(write_checkpoint("deberta-v2", tmp_path, config=settings))
    ids = random_ids((3, 20, 20))
    types = [(np.arange(len(sequence)) * 2 >= len(sequence)).astype(np.int32) for sequence in ids]
    assert (
        worst(
            packed(encoder, ids, types),
            reference(random_model("deberta-v2", config=settings), ids, types),
        )
        <= 1e-5
    )


def test_texts_beyond_the_farthest_distance_equal_transformers(tmp_path: Path) -> None:
    """Without absolute positions only memory limits a text, in the reference as well."""
    encoder = load(write_checkpoint("deberta-v2", tmp_path, positions=48))
    ids = random_ids((49, 150, 301))
    assert (
        worst(packed(encoder, ids), reference(random_model("deberta-v2", positions=48), ids))
        <= 1e-5
    )


def test_buckets_of_the_released_sizes_equal_the_reference(tmp_path: Path) -> None:
    """256 buckets for 512 positions: float32's rounding decides the edges of wide buckets."""
    settings = {"position_buckets": 256}
    encoder = load(
        write_checkpoint(
            "deberta-v2", tmp_path, config=settings, positions=512, layers=1, heads=1, hidden=16
        )
    )
    ids = random_ids((512, 700))
    wanted = reference(
        random_model("deberta-v2", config=settings, positions=512, layers=1, heads=1, hidden=16),
        ids,
    )
    assert worst(packed(encoder, ids), wanted) <= 1e-5


def test_texts_of_one_length_are_computed_in_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The number of texts is too large for all their scores to be in memory at once."""
    encoder = load(write_checkpoint("deberta-v2", tmp_path))
    ids = random_ids((7,) * 10 + (30,) * 3)
    whole = packed(encoder, ids)
    monkeypatch.setattr(deberta, "_SCORES_ON_CPU", 4 * 7 * 7 * 3)
    assert worst(packed(encoder, ids), whole) <= 1e-6


def test_masked_keys_equal_transformers(tmp_path: Path) -> None:
    """The reference's encoder takes a mask for each pair of tokens; its model does not."""
    encoder = load(write_checkpoint("deberta-v2", tmp_path))
    model = random_model("deberta-v2")
    assert isinstance(model, transformers.DebertaV2Model)
    ids, seen = random_ids((5, 40, 40, 70)), (3, 40, 11, 64)
    hidden = encoder(
        Packed.from_sequences(
            ids,
            seen=[
                0 if count == len(each) else count for each, count in zip(ids, seen, strict=True)
            ],
        )
    )
    wanted = []
    for each, count in zip(ids, seen, strict=True):
        mask = torch.zeros(1, len(each), len(each))
        mask[:, :, :count] = 1
        with torch.inference_mode():
            embedded = model.embeddings(torch.from_numpy(each)[None].long())
            wanted.append(model.encoder(embedded, mask).last_hidden_state[0])
    assert worst(hidden.split([len(each) for each in ids]), wanted) <= 1e-5


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_sharded_half_precision_checkpoints_are_loaded(dtype: torch.dtype, tmp_path: Path) -> None:
    encoder = load(write_checkpoint("deberta-v2", tmp_path, dtype=dtype, max_shard_size="30KB"))
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 2
    model = random_model("deberta-v2").to(dtype).float()
    ids = random_ids((1, 30, 64))
    assert worst(packed(encoder, ids), reference(model, ids)) <= 1e-5


def test_bfloat16_with_distance_projections_is_near(tmp_path: Path) -> None:
    settings = {"share_att_key": False, "conv_kernel_size": 3}
    encoder = load(write_checkpoint("deberta-v2", tmp_path, config=settings), torch.bfloat16)
    ids = random_ids((1, 9, 64))
    exact = reference(random_model("deberta-v2", config=settings), ids)
    half = random_model("deberta-v2", config=settings).to(torch.bfloat16)
    assert worst(packed(encoder, ids), exact) < 3 * worst(reference(half, ids), exact)


@pytest.mark.parametrize("legacy", [True, False])
def test_masked_language_models_are_encoders_too(legacy: bool, tmp_path: Path) -> None:
    settings = {"legacy": legacy}
    encoder = load(write_checkpoint("deberta-v2", tmp_path, head="masked_lm", config=settings))
    model = random_model("deberta-v2", head="masked_lm", config=settings)
    assert isinstance(model, transformers.DebertaV2ForMaskedLM)
    ids = random_ids((7, 7, 20))
    assert worst(packed(encoder, ids), reference(model.deberta, ids)) <= 1e-5


def test_unused_tensors_of_released_checkpoints_are_ignored(tmp_path: Path) -> None:
    """Microsoft's have an unused position table, a discriminator's head, and a list as one text."""
    write_checkpoint("deberta-v2", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors |= {
        "embeddings.position_embeddings.weight": torch.zeros(512, 64),
        "mask_predictions.dense.weight": torch.zeros(64, 64),
    }
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    edit(tmp_path, {"pos_att_type": "p2c|c2p"})
    ids = random_ids((7, 20))
    assert worst(packed(load(tmp_path), ids), reference(random_model("deberta-v2"), ids)) <= 1e-5


@pytest.mark.parametrize(
    "settings",
    [
        {"pos_att_type": "c2p|p2p"},
        {"position_buckets": 33},
        {"position_buckets": 2},
        {"position_buckets": 300},
        {"attention_head_size": 12},
        {"conv_kernel_size": 4},
        {"conv_kernel_size": 3, "conv_act": "relu"},
        {"conv_kernel_size": 3, "conv_groups": 7},
    ],
)
def test_unsupported_settings_are_refused_by_key(settings: Settings, tmp_path: Path) -> None:
    write_checkpoint("deberta-v2", tmp_path)
    edit(tmp_path, settings)
    with pytest.raises(ModelBroken, match=f"config.json: {list(settings)[-1]} is "):
        load(tmp_path)


def test_missing_projection_is_named(tmp_path: Path) -> None:
    write_checkpoint("deberta-v2", tmp_path)
    edit(tmp_path, {"share_att_key": False})
    with pytest.raises(
        ModelBroken,
        match=r"tensor 'encoder\.layer\.0\.attention\.self\.pos_key_proj\.weight' is missing",
    ):
        load(tmp_path)


def edit(directory: Path, settings: Settings) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))
