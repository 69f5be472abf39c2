"""Grouped products of experts against the same experts computed one by one."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from libs.kernels.linear.grouped import ByExpert, has_grouped
from libs.models.layers.experts import Experts, GatedExperts
from libs.models.layers.spec import EncoderSpec, LayerSpec
from tests.support.device import no_synchronization

HIDDEN, FFN, EXPERTS, USED = 64, 96, 5, 2
SPEC = EncoderSpec(
    hidden=HIDDEN, heads=2, head_size=32, ffn=FFN, layers=(LayerSpec(experts=EXPERTS),),
    norm="post", norm_eps=1e-5,
    activation="gelu", experts_used=USED,
)  # fmt: skip


def random(*shape: int, device: str = "cpu") -> Tensor:
    return (
        torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))
        .to(torch.bfloat16)
        .to(device)
    )


def filled(gated: bool, device: str = "cpu") -> Experts | GatedExperts:
    """Random weights of a size that keeps states near 1."""
    experts = (
        GatedExperts(replace(SPEC, gated=True, gate_limit=7.0), EXPERTS)
        if gated
        else Experts(SPEC, EXPERTS)
    )
    for name, parameter in experts.named_parameters():
        scale = 0.1 if "bias" in name else HIDDEN**-0.5
        parameter.data = random(*parameter.shape, device=device) * scale
    return experts


def routed(experts: Experts | GatedExperts, x: Tensor) -> tuple[Tensor, Tensor]:
    """The shares and experts of rows, none of which goes to the first expert."""
    logits = experts.router.forward(x).float()
    logits[:, 0] = -torch.inf
    values, chosen = logits.softmax(-1).topk(USED, dim=-1)
    return values, chosen


def one_by_one(
    experts: Experts | GatedExperts, x: Tensor, shares: Tensor, chosen: Tensor
) -> Tensor:
    """Compute every expert for every row in float64."""
    spread = torch.zeros(len(x), EXPERTS, dtype=torch.float64, device=x.device).scatter(
        -1, chosen, shares.double()
    )
    return experts.double().compute_all(x.double(), spread)


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("rows", [1, 7, 40])
def test_sorted_tokens_equal_all_experts(gated: bool, rows: int) -> None:
    experts, x = filled(gated), random(rows, HIDDEN)
    shares, chosen = routed(experts, x)
    got = experts.compute_grouped(x, shares, chosen)
    assert got.dtype is torch.bfloat16
    wanted = one_by_one(experts, x, shares, chosen)
    assert (got.double() - wanted).abs().max() < 0.02 * wanted.abs().max()


def test_every_pair_is_in_its_experts_bounds() -> None:
    chosen = torch.tensor([[3, 0], [0, 4], [4, 3]])
    pairs = ByExpert.from_chosen(chosen, EXPERTS)
    assert pairs.experts.tolist() == [0, 0, 3, 3, 4, 4]
    assert pairs.rows.tolist() == [0, 1, 0, 2, 1, 2]
    assert pairs.ends.tolist() == [2, 2, 2, 4, 6]
    assert torch.equal(pairs.experts[pairs.places], chosen)
    assert pairs.ends.dtype is torch.int32


def test_grouped_products_are_of_certain_devices_and_types() -> None:
    assert not has_grouped(random(1, 8), 8)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no accelerator")
@pytest.mark.parametrize("gated", [False, True])
def test_accelerator_equals_all_experts(gated: bool) -> None:
    """Without waiting for the device; where it has no grouped products all experts compute."""
    experts, x = filled(gated, "cuda"), random(1000, HIDDEN, device="cuda")
    assert not has_grouped(x.float(), HIDDEN)
    assert not has_grouped(x, HIDDEN + 1)
    shares, chosen = routed(experts, x)
    experts.whole(x)
    with no_synchronization():
        experts.whole(x)
    if not has_grouped(x, HIDDEN, FFN):
        pytest.skip("the accelerator has no grouped products")
    got = experts.compute_grouped(x, shares, chosen)
    wanted = one_by_one(experts, x, shares, chosen)
    assert (got.double() - wanted).abs().max() < 0.02 * wanted.abs().max()
