"""One grid holds every implementation of the attention seam to the definition, written out naively in float64."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
import torch
from torch import Tensor

from libs.kernels.attention import equal_length_groups, row_attention, varlen_attention

# One token; runs that are viewed as one batch; long enough for the fused kernel in float32, short enough for it in bfloat16.
LENGTHS = (1, 1, 7, 7, 7, 30, 64, 200)
REACH = 255

HEADS = ((1, 1), (4, 4), (4, 2), (6, 1))
SIGHT = ((False, None), (True, None), (False, 0), (False, 5), (True, 5), (False, 300))


def naive(q: Tensor, k: Tensor, v: Tensor, scale: float, *, causal: bool, window: int | None, bias: Tensor | None) -> Tensor:
    """One sequence, [tokens, heads, dim], float64."""
    k, v = (t.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for t in (k, v))
    scores = torch.einsum("ihd,jhd->hij", q.double(), k.double()) * scale
    distance = torch.arange(len(q)) - torch.arange(len(q))[:, None]
    if bias is not None:
        scores = scores + bias.double()[:, distance + bias.shape[1] // 2]
    unseen = (distance > 0) & causal
    if window is not None:
        unseen |= distance.abs() > window
    weights = scores.masked_fill(unseen, float("-inf")).softmax(-1)
    return torch.einsum("hij,jhd->ihd", weights, v.double())


def sequences(t: Tensor, lengths: tuple[int, ...] = LENGTHS) -> list[Tensor]:
    return list(t.cpu().split(lengths))


def by_sequence(q: Tensor, k: Tensor, v: Tensor) -> list[tuple[Tensor, Tensor, Tensor]]:
    return list(zip(sequences(q), sequences(k), sequences(v), strict=True))


def inputs(heads: int, shared: int, dim: int, dtype: torch.dtype, device: str = "cpu") -> tuple[Tensor, Tensor, Tensor]:
    """Views of one fused projection, as in an encoder."""
    generator = torch.Generator().manual_seed(heads * 100 + dim)
    fused = torch.randn(sum(LENGTHS), heads + 2 * shared, dim, generator=generator).to(dtype).to(device)
    q, k, v = fused.split((heads, shared, shared), dim=1)
    return q, k, v


def cumulated(lengths: tuple[int, ...], device: str = "cpu") -> Tensor:
    return torch.from_numpy(np.cumsum((0, *lengths), dtype=np.int32)).to(device)


def ours(q: Tensor, k: Tensor, v: Tensor, scale: float, *, causal: bool, window: int | None, bias: Tensor | None) -> list[Tensor]:
    cu_seqlens = cumulated(LENGTHS, str(q.device))
    groups = equal_length_groups(LENGTHS)
    out = varlen_attention(q, k, v, cu_seqlens, max(LENGTHS), groups=groups, scale=scale, causal=causal, window=window, bias=bias)
    return sequences(out)


def worst_error(got: list[Tensor], wanted: list[Tensor]) -> float:
    return max((a.double() - b.double()).abs().max().item() for a, b in zip(got, wanted, strict=True))


def test_groups_are_runs_of_equal_neighbours() -> None:
    assert equal_length_groups([3, 3, 5, 3]) == ((0, 2, 3), (6, 1, 5), (11, 1, 3))
    assert equal_length_groups([]) == ()


@pytest.mark.parametrize(("heads", "shared"), HEADS)
@pytest.mark.parametrize(("causal", "window"), SIGHT)
def test_float32_equals_the_definition(heads: int, shared: int, causal: bool, window: int | None) -> None:
    for dim, biased in product((5, 32), (False, True)):
        q, k, v = inputs(heads, shared, dim, torch.float32)
        bias = torch.randn(heads, 2 * REACH + 1, generator=torch.Generator().manual_seed(1)) if biased else None
        got = ours(q, k, v, 0.3, causal=causal, window=window, bias=bias)
        wanted = [naive(*part, 0.3, causal=causal, window=window, bias=bias) for part in by_sequence(q, k, v)]
        assert worst_error(got, wanted) < 1e-5


@pytest.mark.parametrize(("heads", "shared"), HEADS)
def test_bfloat16_is_as_close_as_plain_torch(heads: int, shared: int) -> None:
    """Rounding errors stay below 3 times those of the definition computed in bfloat16 throughout."""
    q, k, v = inputs(heads, shared, 32, torch.bfloat16)
    parts = by_sequence(q, k, v)
    wanted = [naive(*part, 0.2, causal=False, window=None, bias=None) for part in parts]
    plain = []
    for a, b, c in parts:
        b, c = (t.repeat_interleave(heads // shared, dim=1) for t in (b, c))
        weights = (torch.einsum("ihd,jhd->hij", a, b) * 0.2).softmax(-1)
        plain.append(torch.einsum("hij,jhd->ihd", weights, c))
    got = ours(q, k, v, 0.2, causal=False, window=None, bias=None)
    assert all(part.dtype is torch.bfloat16 for part in got)
    assert worst_error(got, wanted) < 3 * worst_error(plain, wanted)


@pytest.mark.parametrize(("heads", "shared"), HEADS)
@pytest.mark.parametrize("last", [False, True])
def test_one_row_of_each_sequence_equals_that_row_of_all(heads: int, shared: int, last: bool) -> None:
    q, k, v = inputs(heads, shared, 32, torch.float32)
    cu_seqlens = cumulated(LENGTHS)
    rows = cu_seqlens[1:] - 1 if last else cu_seqlens[:-1]
    groups = equal_length_groups(LENGTHS)
    whole = varlen_attention(q, k, v, cu_seqlens, max(LENGTHS), groups=groups, scale=0.3)
    got = row_attention(q[rows], k, v, cu_seqlens, max(LENGTHS), groups=groups, scale=0.3)
    assert (got - whole[rows]).abs().max() < 1e-5


def test_order_and_neighbours_do_not_matter() -> None:
    """The same sequences in another order, so in other groups."""
    q, k, v = inputs(4, 4, 32, torch.float32)
    order = [7, 2, 0, 5, 3, 6, 1, 4]
    shuffled = tuple(LENGTHS[i] for i in order)
    a, b, c = (torch.cat([sequences(t)[i] for i in order]) for t in (q, k, v))
    groups = equal_length_groups(shuffled)
    out = varlen_attention(a, b, c, cumulated(shuffled), max(shuffled), groups=groups, scale=0.3)
    straight = ours(q, k, v, 0.3, causal=False, window=None, bias=None)
    assert worst_error(sequences(out, shuffled), [straight[i] for i in order]) < 1e-6


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no accelerator")
@pytest.mark.parametrize(("heads", "shared"), HEADS)
@pytest.mark.parametrize(("causal", "window"), SIGHT)
def test_the_accelerator_equals_the_definition(heads: int, shared: int, causal: bool, window: int | None) -> None:
    q, k, v = inputs(heads, shared, 32, torch.bfloat16, "cuda")
    got = ours(q, k, v, 0.3, causal=causal, window=window, bias=None)
    wanted = [naive(*part, 0.3, causal=causal, window=window, bias=None) for part in by_sequence(q, k, v)]
    assert worst_error(got, wanted) < 0.03
