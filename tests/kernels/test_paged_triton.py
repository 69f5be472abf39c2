"""The Triton kernel of decode steps equals attention over gathered pages: interpreted here, compiled where there is a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from libs.kernels import triton_here
from libs.kernels.attention import paged
from libs.kernels.attention.paged import PAGE, PagedLayout, Pages, empty_pages, pages_for
from libs.kernels.attention.varlen import varlen_attention
from libs.kernels.layout import Layout
from tests.kernels.ways import use_dense
from tests.support.device import no_synchronization

pytest.importorskip("triton")

from libs.kernels.attention import paged_triton

KEYS = (1, 31, 32, 33, 64, 65, 100, 200)
HEADS = ((4, 4, 16), (7, 1, 64), (6, 2, 20), (16, 8, 32), (20, 1, 8))
SIGHTS = ((None, False, None), (20, False, None), (None, True, None), (None, False, 5.0), (33, True, 5.0))


@dataclass(frozen=True)
class Case:
    """A decode step: `stored` keys are in `memory`, one new key a sequence is not."""

    memory: Pages
    where: PagedLayout
    q: Tensor
    k: Tensor
    v: Tensor
    every_k: Tensor
    every_v: Tensor
    bias: Tensor

    @staticmethod
    def of(keys: Sequence[int], heads: int, kv_heads: int, dim: int, dtype: torch.dtype, device: str) -> Case:
        """Pages in no order, and everything that was never written is NaN."""
        generator = torch.Generator().manual_seed(dim)

        def random(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator).to(device, dtype)

        total = sum(map(pages_for, keys)) + 2
        numbers = torch.randperm(total, generator=generator).tolist()
        pages = [[numbers.pop() for _ in range(pages_for(count))] for count in keys]
        [memory] = empty_pages(1, total, kv_heads, dim, dtype, device)
        for tensor in memory:
            tensor.fill_(torch.nan)
        every_k, every_v = random(sum(keys), kv_heads, dim), random(sum(keys), kv_heads, dim)
        last = torch.tensor(keys).cumsum(0) - 1
        old = torch.ones(sum(keys), dtype=torch.bool)
        old[last] = False
        some = [place for place, count in enumerate(keys) if count > 1]
        before = [keys[place] - 1 for place in some]
        stored = PagedLayout.of(before, [pages[place] for place in some], device, rows=before)
        paged._store(every_k[old], every_v[old], memory, stored)
        # Queries, keys and values are views of one tensor, as a layer's projection makes them.
        fused = random(len(keys), heads + 2 * kv_heads, dim)
        q, k, v = fused.split_with_sizes((heads, kv_heads, kv_heads), dim=1)
        k.copy_(every_k[last]), v.copy_(every_v[last])
        bias = torch.randn(heads, 2 * 256 + 1, generator=generator).to(device)
        where = PagedLayout.of(keys, pages, device, rows=[1] * len(keys))
        return Case(memory, where, q, k, v, every_k, every_v, bias)


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The step by Triton's interpreter, everything else by torch's operators."""
    use_dense(monkeypatch)
    monkeypatch.setattr(paged, "has_triton", lambda x: True)
    monkeypatch.setattr(paged, "attend_gathered", _never)


def _never(*arguments: object) -> Tensor:
    raise AssertionError("gathered")


@pytest.mark.skipif(torch.cuda.is_available(), reason="compiled where there is a GPU")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), HEADS)
@pytest.mark.parametrize(("window", "biased", "softcap"), SIGHTS)
@pytest.mark.usefixtures("interpreted")
def test_a_step_equals_attention_over_gathered_pages(
    dtype: torch.dtype, heads: int, kv_heads: int, dim: int, window: int | None, biased: bool, softcap: float | None
) -> None:
    """bfloat16 is tested on the GPU: Triton's interpreter multiplies no such matrices."""
    case = Case.of(KEYS, heads, kv_heads, dim, dtype, "cpu")
    check(case, window, biased, softcap, 1e-5 if dtype is torch.float32 else 0.004)


def check(case: Case, window: int | None, biased: bool, softcap: float | None, bound: float) -> None:
    """The result, and the pages after it."""
    bias = case.bias if biased else None
    sight = {"scale": 0.2, "causal": True, "window": window, "bias": bias, "softcap": softcap}
    before = [tensor.clone() for tensor in case.memory]
    found = paged.attend(case.q, case.k, case.v, case.memory, case.where, **sight)
    wanted = varlen_attention(
        case.q.float(), case.every_k.float(), case.every_v.float(), Layout.of(case.where.queries, case.where.keys), **sight
    )
    torch.testing.assert_close(found.float(), wanted, rtol=bound, atol=bound)
    paged._store(case.k, case.v, (before[0], before[1]), case.where)
    for now, then in zip(case.memory, before, strict=True):
        torch.testing.assert_close(now, then, rtol=0, atol=0, equal_nan=True)
