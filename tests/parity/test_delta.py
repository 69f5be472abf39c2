"""The gated delta net over packed sequences against transformers' Qwen3.5, which computes one
sequence at a time.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers.models.qwen3_5 import modeling_qwen3_5
from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5TextConfig

from libs.errors import InvalidInput
from libs.models.interface.packed import Packed
from libs.models.interface.sequences import InputSequence
from libs.models.layers.delta import CHUNK, DeltaChunks
from libs.models.layers.encoder import Shared
from libs.models.layers.hybrid import GatedDeltaNet
from libs.models.layers.spec import DeltaSpec, EncoderSpec, LayerSpec
from libs.models.runtime.backbone import Backbone
from tests.parity.checkpoints import random_model, write_checkpoint
from tests.parity.test_families import load, packed, random_ids, reference, worst

# transformers and its dependencies emit deprecation warnings.
pytestmark = pytest.mark.filterwarnings("ignore")

LENGTHS = [3, 1, CHUNK, 200, CHUNK + 1, 2, 2 * CHUNK, 37]

NAMES = {"conv1d.weight": "conv.weight", "out_proj.weight": "out.weight"}
INPUTS = tuple(f"in_proj_{name}.weight" for name in ("qkv", "z", "b", "a"))


def layers(key_heads: int, value_heads: int) -> tuple[Any, GatedDeltaNet]:
    config = Qwen3_5TextConfig(
        hidden_size=48,
        num_hidden_layers=4,
        linear_num_key_heads=key_heads,
        linear_num_value_heads=value_heads,
        linear_key_head_dim=16,
        linear_value_head_dim=24,
        linear_conv_kernel_dim=4,
        vocab_size=64,
    )
    reference = modeling_qwen3_5.Qwen3_5GatedDeltaNet(config, 0).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in reference.named_parameters():
            parameter.normal_(0.0, 0.3, generator=generator)
            if name == "norm.weight":
                parameter.add_(1.0)
    delta = DeltaSpec(key_heads, value_heads, 16, 24, 4)
    layer = LayerSpec(delta=delta)
    spec = EncoderSpec(
        48,
        2,
        24,
        96,
        (layer,),
        "pre",
        config.rms_norm_eps,
        "silu",
        norm_kind="rms",
        norm_shift=1.0,
        gated=True,
    )
    ours = GatedDeltaNet(spec, delta)
    state = reference.state_dict()
    fused = {"inputs.weight": torch.cat([state.pop(name) for name in INPUTS])}
    ours.load_state_dict({NAMES.get(name, name): tensor for name, tensor in state.items()} | fused)
    return reference, ours.eval()


def run(layer: GatedDeltaNet, x: Tensor, lengths: list[int]) -> Tensor:
    """Apply the layer with its output projection to [tokens, hidden]."""
    batch = Packed.from_sequences([np.zeros(length, np.int32) for length in lengths])
    return layer.out.forward(
        layer.forward(x, batch, Shared({}, None, DeltaChunks.from_lengths(lengths)))
    )


def states(lengths: list[int]) -> Tensor:
    return torch.randn(sum(lengths), 48, generator=torch.Generator().manual_seed(1))


def relative(ours: Tensor, wanted: Tensor) -> float:
    return float((ours - wanted).norm() / wanted.norm())


@pytest.mark.parametrize(("key_heads", "value_heads"), [(2, 2), (2, 4)])
def test_packed_sequences_equal_transformers(key_heads: int, value_heads: int) -> None:
    reference, ours = layers(key_heads, value_heads)
    x = states(LENGTHS)
    with torch.inference_mode():
        found = run(ours, x, LENGTHS).split(LENGTHS)
        wanted = [reference(each[None])[0] for each in x.split(LENGTHS)]
    assert max(relative(a, b) for a, b in zip(found, wanted, strict=True)) <= 1e-5


def test_sequence_is_the_same_alone_and_among_others() -> None:
    _, ours = layers(2, 4)
    x = states(LENGTHS)
    with torch.inference_mode():
        packed = run(ours, x, LENGTHS).split(LENGTHS)
        alone = [run(ours, each, [len(each)]) for each in x.split(LENGTHS)]
        mixed_up = run(ours, x, [sum(LENGTHS)]).split(LENGTHS)
    assert max(relative(a, b) for a, b in zip(packed, alone, strict=True)) <= 1e-5
    assert relative(mixed_up[1], alone[1]) > 1e-2  # the result differs for one sequence


def test_bfloat16_is_as_good_as_transformers_in_bfloat16() -> None:
    reference, ours = layers(2, 4)
    x = states([200])
    with torch.inference_mode():
        exact = reference(x[None])[0]
        low = x.to(torch.bfloat16)
        found = run(ours.to(torch.bfloat16), low, [200]).float()
        theirs = reference.to(torch.bfloat16)(low[None])[0].float()
    assert (found - exact).abs().max() < 3 * (theirs - exact).abs().max()


def exact_rule(
    query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, **_: object
) -> tuple[Tensor, None]:
    """Compute the recurrence of arXiv 2412.06464 token by token in float64, of one sequence: [1,
    tokens, heads, size].
    """
    repeats = value.shape[2] // key.shape[2]
    q, k = (x[0].double().repeat_interleave(repeats, dim=1) for x in (query, key))
    q, k = (x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt() for x in (q, k))
    v, kept, share = value[0].double(), g[0].double().exp(), beta[0].double()
    state, reads = q.new_zeros(q.shape[1], k.shape[2], v.shape[2]), []
    for token in range(len(q)):
        state = state * kept[token][:, None, None]
        written = (v[token] - torch.einsum("hkv,hk->hv", state, k[token])) * share[token][:, None]
        state = state + torch.einsum("hk,hv->hkv", k[token], written)
        reads.append(torch.einsum("hkv,hk->hv", state, q[token]) * q.shape[2] ** -0.5)
    return torch.stack(reads)[None].to(value.dtype), None


@pytest.mark.parametrize("seed", range(3))
def test_several_delta_nets_are_as_near_to_float64_as_transformers(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Successive random layers amplify float32's rounding to an error of about 1e-5 in both
    implementations.
    """
    config = {"layer_types": ["linear_attention"] * 2}
    ids = random_ids()
    found = packed(load(write_checkpoint("qwen3_5_text", tmp_path, config=config, seed=seed)), ids)
    model = random_model("qwen3_5_text", config=config, seed=seed)
    theirs = reference(model, ids)
    monkeypatch.setattr(modeling_qwen3_5, "torch_chunk_gated_delta_rule", exact_rule)
    exact = reference(model.double(), ids)
    assert worst(found, exact) < 3 * worst(theirs, exact) < 3e-4


def test_hidden_and_shared_tokens_are_refused(tmp_path: Path) -> None:
    """The state contains all earlier tokens. A query's [MASK] tokens could not be hidden, nor a
    prefix be a separate sequence.
    """
    encoder = load(write_checkpoint("qwen3_5_text", tmp_path))
    ids = random_ids((9,))[0]
    backbone = Backbone(encoder, {})
    backbone.refuse_outside([InputSequence(ids)])
    assert encoder.causal
    assert not encoder.shares_prefixes
    assert not encoder.is_graph_capturable
    for one in (InputSequence(ids, seen=3), InputSequence(ids, before=ids)):
        with pytest.raises(InvalidInput, match="is recurrent"):
            backbone.refuse_outside([one])
