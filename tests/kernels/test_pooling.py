"""Pooling of all sequences at once against a loop over them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from libs.kernels.pooling import pooled

LENGTHS = (1, 4, 1, 9, 2)
CU_SEQLENS = torch.tensor((0, 1, 5, 6, 15, 17), dtype=torch.int32)


def weighted(t: Tensor) -> Tensor:
    weights = torch.arange(1, len(t) + 1, dtype=t.dtype)[:, None]
    return (t * weights).sum(0) / weights.sum()


LOOPS: dict[Callable[[Tensor, Tensor], Tensor], Callable[[Tensor], Tensor]] = {
    pooled.cls: lambda t: t[0],
    pooled.last: lambda t: t[-1],
    pooled.mean: lambda t: t.mean(0),
    pooled.maximum: lambda t: t.max(0).values,
    pooled.weighted_mean: weighted,
}


@pytest.mark.parametrize("pool", LOOPS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_equals_a_loop(pool: Callable[[Tensor, Tensor], Tensor], dtype: torch.dtype) -> None:
    hidden = torch.randn(sum(LENGTHS), 7).to(dtype)
    got = pool(hidden, CU_SEQLENS)
    wanted = torch.stack([LOOPS[pool](part) for part in hidden.float().split(LENGTHS)])
    assert got.dtype is torch.float32
    torch.testing.assert_close(got, wanted, rtol=1e-6, atol=1e-6)


def test_means_are_summed_in_float32() -> None:
    """Sums are float32: in bfloat16, 256 + 1 is 256."""
    hidden = torch.ones(512, 3, dtype=torch.bfloat16)
    assert torch.equal(
        pooled.mean(hidden, torch.tensor((0, 512), dtype=torch.int32)), torch.ones(1, 3)
    )
