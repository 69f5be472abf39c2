"""Sparse weights against all logits at once, and a loop over tokens."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from libs.kernels.pooling.sparse import SpladeActivation, max_by_id, splade_max, splade_sum
from tests.kernels.largest import Largest

LENGTHS = (3, 3, 1, 20, 5)
CU_SEQLENS = torch.tensor((0, 3, 6, 7, 27, 32), dtype=torch.int32)
ACTIVATIONS: list[SpladeActivation] = ["log1p_relu", "log1p_relu_twice"]


def weights(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, activation: SpladeActivation
) -> list[Tensor]:
    """Compute the maximum of all tokens, sequence by sequence, in float64."""
    logits = hidden.double() @ weight.double().T
    logits = torch.log1p(torch.relu(logits if bias is None else logits + bias.double()))
    return list(
        (torch.log1p(logits) if activation == "log1p_relu_twice" else logits).split(LENGTHS)
    )


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("chunk_elements", [None, 1, 64, 1000])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
def test_pooled_over_tokens(
    activation: SpladeActivation,
    chunk_elements: int | None,
    biased: bool,
    dtype: torch.dtype,
    bound: float,
) -> None:
    hidden, weight = torch.randn(sum(LENGTHS), 16).to(dtype), torch.randn(100, 16).to(dtype)
    bias = torch.randn(100) if biased else None
    parts = weights(hidden, weight, bias, activation)
    best = splade_max(
        hidden,
        weight,
        bias,
        CU_SEQLENS,
        LENGTHS,
        activation=activation,
        chunk_elements=chunk_elements,
    )
    assert best.dtype is torch.float32
    assert (best - torch.stack([part.amax(0) for part in parts])).abs().max() < bound
    total = splade_sum(
        hidden, weight, bias, CU_SEQLENS, activation=activation, chunk_elements=chunk_elements
    )
    assert total.dtype is torch.float32
    assert (total - torch.stack([part.sum(0) for part in parts])).abs().max() < 10 * bound


def test_logits_of_all_tokens_are_never_there() -> None:
    hidden, weight = torch.randn(sum(LENGTHS), 16), torch.randn(5000, 16)
    with Largest(but=weight) as largest:
        splade_max(hidden, weight, torch.randn(5000), CU_SEQLENS, LENGTHS, chunk_elements=4000)
    assert 0 < largest.numbers <= len(LENGTHS) * 5000 < sum(LENGTHS) * 5000


def test_logits_begin_at_aligned_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels of cuBLAS and Triton are slower for other rows."""
    widths: list[int] = []
    linear = F.linear

    def recorded(x: Tensor, weight: Tensor) -> Tensor:
        widths.append(len(weight))
        return linear(x, weight)

    monkeypatch.setattr(F, "linear", recorded)
    hidden, weight = torch.randn(sum(LENGTHS), 16), torch.randn(5000, 16)
    for chunk_elements in (1000, 4000):
        splade_max(hidden, weight, None, CU_SEQLENS, LENGTHS, chunk_elements=chunk_elements)
        splade_sum(hidden, weight, None, CU_SEQLENS, chunk_elements=chunk_elements)
    assert {width % 16 for width in widths} == {0, 5000 % 16}, "the last columns are the rest"
    assert sum(width % 16 != 0 for width in widths) < len(widths) / 10


def test_largest_weight_of_each_id() -> None:
    ids = torch.tensor([5, 9, 5, 9, 9, 0, 7])
    found = max_by_id(ids, torch.tensor([0.1, 0.2, 0.4, 0.3, 0.1, -1.0, 0.5]), (3, 2, 2))
    offsets, columns, values = found
    assert offsets.tolist() == [0, 2, 3, 5]
    assert columns.tolist() == [5, 9, 9, 0, 7]
    assert values.tolist() == pytest.approx([0.4, 0.2, 0.3, -1.0, 0.5])


def test_no_tokens_no_ids() -> None:
    offsets, columns, values = max_by_id(torch.empty(0, dtype=torch.int64), torch.empty(0), ())
    assert offsets.tolist() == [0]
    assert columns.shape == values.shape == (0,)
