"""Attention over pages equals attention over the same keys in a row, by every instruction set and
by torch's operators.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from libs.kernels.attention import paged
from libs.kernels.attention.paged import PAGE, PagedLayout, empty_pages, pages_for
from libs.kernels.attention.varlen import varlen_attention
from libs.kernels.layout import BatchLayout
from libs.kernels.native.library import SETS
from tests.kernels.ways import use_dense, use_native

KEYS = (1, 31, 32, 33, 100, 64)
ROWS = (1, 1, 3, 33, 5, 1)


@pytest.fixture(params=[*SETS, "torch"])
def _way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, library: Path) -> None:
    if request.param == "torch":
        use_dense(monkeypatch)
    else:
        use_native(monkeypatch, library, request.param)
        monkeypatch.setattr(paged, "attend_gathered", _not_native)


def _not_native(*arguments: object) -> Tensor:
    raise AssertionError("not computed by the native library")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim"), [(4, 4, 16), (7, 1, 64), (6, 2, 20), (8, 4, 128)]
)
@pytest.mark.parametrize(
    ("causal", "window", "biased"),
    [(True, None, False), (True, 20, False), (False, None, False), (True, None, True)],
)
@pytest.mark.usefixtures("_way")
def test_equals_attention_over_rows(
    dtype: torch.dtype,
    heads: int,
    kv_heads: int,
    dim: int,
    causal: bool,
    window: int | None,
    biased: bool,
) -> None:
    generator = torch.Generator().manual_seed(dim)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    total = sum(map(pages_for, KEYS))
    numbers = torch.randperm(total, generator=generator).tolist()
    pages = [[numbers.pop() for _ in range(pages_for(keys))] for keys in KEYS]
    keys, values, q = (
        random(sum(KEYS), kv_heads, dim),
        random(sum(KEYS), kv_heads, dim),
        random(sum(ROWS), heads, dim),
    )
    bias = torch.randn(heads, 2 * 128 + 1, generator=generator) if biased else None
    [memory] = empty_pages(1, total, kv_heads, dim, dtype, "cpu")
    for tensor in memory:
        tensor.fill_(torch.nan)
    before = [every - own for every, own in zip(KEYS, ROWS, strict=True)]
    old = torch.cat(
        [
            torch.arange(first, first + count)
            for first, count in zip(paged.starts(KEYS), before, strict=True)
        ]
    )
    new = torch.cat(
        [
            torch.arange(last - own, last)
            for last, own in zip(torch.tensor(KEYS).cumsum(0).tolist(), ROWS, strict=True)
        ]
    )
    some = [place for place, count in enumerate(before) if count]
    stored = PagedLayout.from_lengths(
        [before[i] for i in some], [pages[i] for i in some], rows=[before[i] for i in some]
    )
    paged.store(keys[old], values[old], memory, stored)
    where = PagedLayout.from_lengths(KEYS, pages, rows=ROWS)
    found = paged.attend(
        q, keys[new], values[new], memory, where, scale=0.2, causal=causal, window=window, bias=bias
    )  # fmt: skip
    wanted = varlen_attention(
        q.float(),
        keys.float(),
        values.float(),
        BatchLayout.from_lengths(ROWS, KEYS),
        scale=0.2,
        causal=causal,
        window=window,
        bias=bias,
    )
    bound = 1e-5 if dtype is torch.float32 else 0.05
    torch.testing.assert_close(found.float(), wanted, rtol=bound, atol=bound)


@pytest.mark.usefixtures("_way")
def test_queries_without_keys_see_the_stored_keys() -> None:
    """A decoder attends to an encoder's states, and pages without rows are unchanged."""
    [memory] = empty_pages(1, 4, 2, 16, torch.float32, "cpu")
    memory[0].zero_(), memory[1].zero_()
    k, v, q = torch.randn(40, 2, 16), torch.randn(40, 2, 16), torch.randn(3, 2, 16)
    paged.store(k, v, memory, PagedLayout.from_lengths([40], [[2, 0]], rows=[40]))
    found = paged.attend(
        q, None, None, memory, PagedLayout.from_lengths([40], [[2, 0]], rows=[0], queries=[3]),
        scale=0.25, causal=False
    )  # fmt: skip
    torch.testing.assert_close(
        found,
        varlen_attention(q, k, v, BatchLayout.from_lengths([3], [40]), scale=0.25),
        rtol=1e-5,
        atol=1e-5,
    )
    assert not memory[0][[1, 3]].any()
    assert not memory[1][[1, 3]].any()
    assert not memory[0][0, :, :, 40 - PAGE :].any()
