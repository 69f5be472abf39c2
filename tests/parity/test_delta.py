"""The gated delta net over packed sequences against transformers' of Qwen3.5, which sees one sequence at a time."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.models.qwen3_5 import modeling_qwen3_5
from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5TextConfig

from libs.models.layers.delta import CHUNK, Chunks, DeltaSpec, GatedDeltaNet

# transformers and its dependencies warn of their own future.
pytestmark = pytest.mark.filterwarnings("ignore")

LENGTHS = [3, 1, CHUNK, 200, CHUNK + 1, 2, 2 * CHUNK, 37]


def layers(key_heads: int, value_heads: int) -> tuple[Any, GatedDeltaNet]:
    config = Qwen3_5TextConfig(
        hidden_size=48, num_hidden_layers=4, linear_num_key_heads=key_heads, linear_num_value_heads=value_heads,
        linear_key_head_dim=16, linear_value_head_dim=24, linear_conv_kernel_dim=4, vocab_size=64,
    )  # fmt: skip
    reference = modeling_qwen3_5.Qwen3_5GatedDeltaNet(config, 0).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in reference.named_parameters():
            parameter.normal_(0.0, 0.3, generator=generator)
            if name == "norm.weight":
                parameter.add_(1.0)
    ours = GatedDeltaNet(DeltaSpec(48, key_heads, value_heads, 16, 24, 4, config.rms_norm_eps))
    ours.load_state_dict(reference.state_dict())
    return reference, ours.eval()


def states(lengths: list[int]) -> Tensor:
    return torch.randn(sum(lengths), 48, generator=torch.Generator().manual_seed(1))


def relative(ours: Tensor, wanted: Tensor) -> float:
    return float((ours - wanted).norm() / wanted.norm())


@pytest.mark.parametrize(("key_heads", "value_heads"), [(2, 2), (2, 4)])
def test_packed_sequences_equal_transformers(key_heads: int, value_heads: int) -> None:
    reference, ours = layers(key_heads, value_heads)
    x = states(LENGTHS)
    with torch.inference_mode():
        found = ours.forward(x, Chunks.of(LENGTHS)).split(LENGTHS)
        wanted = [reference(each[None])[0] for each in x.split(LENGTHS)]
    assert max(relative(a, b) for a, b in zip(found, wanted, strict=True)) <= 1e-5


def test_a_sequence_is_the_same_alone_and_among_others() -> None:
    _, ours = layers(2, 4)
    x = states(LENGTHS)
    with torch.inference_mode():
        packed = ours.forward(x, Chunks.of(LENGTHS)).split(LENGTHS)
        alone = [ours.forward(each, Chunks.of([len(each)])) for each in x.split(LENGTHS)]
        mixed_up = ours.forward(x, Chunks.of([sum(LENGTHS)])).split(LENGTHS)
    assert max(relative(a, b) for a, b in zip(packed, alone, strict=True)) <= 1e-5
    assert relative(mixed_up[1], alone[1]) > 1e-2  # as one sequence the answer is another


def test_bfloat16_is_as_good_as_transformers_in_bfloat16() -> None:
    reference, ours = layers(2, 4)
    x = states([200])
    with torch.inference_mode():
        exact = reference(x[None])[0]
        low = x.to(torch.bfloat16)
        found = ours.to(torch.bfloat16).forward(low, Chunks.of([200])).float()
        theirs = reference.to(torch.bfloat16)(low[None])[0].float()
    assert (found - exact).abs().max() < 3 * (theirs - exact).abs().max()
