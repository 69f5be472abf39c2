"""The Triton kernel of decode steps equals attention over gathered pages: interpreted here,
compiled where there is a GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from libs.kernels.attention import paged
from libs.kernels.attention.paged import PagedLayout, Pages, empty_pages, pages_for
from libs.kernels.attention.varlen import varlen_attention
from libs.kernels.layout import BatchLayout
from tests.kernels.ways import use_dense
from tests.support.device import no_synchronization

pytest.importorskip("triton")

from libs.kernels.attention import paged_triton

KEYS = (1, 31, 32, 33, 64, 65, 100, 200)
HEADS = ((4, 4, 16), (7, 1, 64), (6, 2, 20), (4, 2, 32), (20, 1, 8))
SIGHTS = (
    (None, False, None),
    (20, False, None),
    (None, True, None),
    (None, False, 5.0),
    (33, True, 5.0),
)


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
    def create(
        keys: Sequence[int], heads: int, kv_heads: int, dim: int, dtype: torch.dtype, device: str
    ) -> Case:
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
        stored = PagedLayout.from_lengths(
            before, [pages[place] for place in some], device, rows=before
        )
        paged._store(every_k[old], every_v[old], memory, stored)
        # Queries, keys and values are views of one tensor, as a layer's projection makes them.
        fused = random(len(keys), heads + 2 * kv_heads, dim)
        q, k, v = fused.split_with_sizes((heads, kv_heads, kv_heads), dim=1)
        k.copy_(every_k[last]), v.copy_(every_v[last])
        bias = torch.randn(heads, 2 * 256 + 1, generator=generator).to(device)
        where = PagedLayout.from_lengths(keys, pages, device, rows=[1] * len(keys))
        return Case(memory, where, q, k, v, every_k, every_v, bias)


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The step by Triton's interpreter, everything else by torch's operators."""
    use_dense(monkeypatch)
    monkeypatch.setattr(paged, "has_triton", lambda x: True)
    monkeypatch.setattr(paged, "attend_gathered", _never)
    # The interpreter takes about a millisecond for each program.
    monkeypatch.setattr(paged_triton, "splits", lambda sequences, kv_heads: 4)


def _never(*arguments: object) -> Tensor:
    raise AssertionError("gathered")


@pytest.mark.skipif(torch.cuda.is_available(), reason="compiled where there is a GPU")
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), HEADS)
@pytest.mark.parametrize(("window", "biased", "softcap"), SIGHTS)
@pytest.mark.usefixtures("interpreted")
def test_step_equals_attention_over_gathered_pages(
    heads: int, kv_heads: int, dim: int, window: int | None, biased: bool, softcap: float | None
) -> None:
    """Tests of bfloat16 need a GPU: Triton's interpreter cannot multiply such matrices."""
    case = Case.create(KEYS, heads, kv_heads, dim, torch.float32, "cpu")
    check(case, window, biased, softcap, 1e-5)


@pytest.mark.skipif(torch.cuda.is_available(), reason="compiled where there is a GPU")
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), HEADS)
@pytest.mark.usefixtures("interpreted")
def test_float16_is_computed_in_float32(heads: int, kv_heads: int, dim: int) -> None:
    """A type changes loads and stores; masks do not depend on it."""
    case = Case.create(KEYS, heads, kv_heads, dim, torch.float16, "cpu")
    check(case, 33, True, 5.0, 0.004)


@pytest.mark.skipif(torch.cuda.is_available(), reason="compiled where there is a GPU")
@pytest.mark.parametrize("count", [8, 16, 32])
@pytest.mark.usefixtures("interpreted")
def test_more_splits_than_pages_give_the_same(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paged_triton, "splits", lambda sequences, kv_heads: count)
    case = Case.create(KEYS, 6, 2, 20, torch.float32, "cpu")
    check(case, 33, True, 5.0, 1e-5)


def check(
    case: Case, window: int | None, biased: bool, softcap: float | None, bound: float
) -> None:
    """The result, and the pages after it."""
    bias = case.bias if biased else None
    sight: dict[str, Any] = {
        "scale": 0.2,
        "causal": True,
        "window": window,
        "bias": bias,
        "softcap": softcap,
    }
    before = [tensor.clone() for tensor in case.memory]
    found = paged.attend(case.q, case.k, case.v, case.memory, case.where, **sight)
    wanted = varlen_attention(
        case.q.float(),
        case.every_k.float(),
        case.every_v.float(),
        BatchLayout.from_lengths(case.where.queries, case.where.keys, case.q.device),
        **sight,
    )
    torch.testing.assert_close(found.float(), wanted, rtol=bound, atol=bound)
    paged._store(case.k, case.v, (before[0], before[1]), case.where)
    for now, then in zip(case.memory, before, strict=True):
        torch.testing.assert_close(now, then, rtol=0, atol=0, equal_nan=True)


@pytest.mark.skipif(torch.cuda.is_available(), reason="compiled where there is a GPU")
@pytest.mark.usefixtures("interpreted")
def test_sequences_without_keys_get_zeros_and_store_nothing() -> None:
    """Unused slots of a graph's batch have arbitrary page tables."""
    case = Case.create((40, 7), 4, 2, 16, torch.float32, "cpu")
    before = [tensor.clone() for tensor in case.memory]
    q, k, v = (
        torch.cat((tensor[:1], torch.full_like(tensor, torch.nan), tensor[1:]))
        for tensor in (case.q, case.k, case.v)
    )
    cu_keys = torch.tensor([0, 40, 40, 40, 47], dtype=torch.int32)
    numbers = torch.cat(
        (case.where.numbers[:1], torch.zeros_like(case.where.numbers), case.where.numbers[1:])
    )
    found = paged_triton.attend(q, k, v, case.memory, cu_keys, numbers, 0.2, None, None, None)
    wanted = varlen_attention(
        case.q,
        case.every_k,
        case.every_v,
        BatchLayout.from_lengths((1, 1), (40, 7)),
        scale=0.2,
        causal=True,
    )
    torch.testing.assert_close(found[[0, 3]], wanted, rtol=1e-5, atol=1e-5)
    assert not found[1:3].any()
    paged._store(case.k, case.v, (before[0], before[1]), case.where)
    for now, then in zip(case.memory, before, strict=True):
        torch.testing.assert_close(now, then, rtol=0, atol=0, equal_nan=True)


@pytest.mark.skipif(torch.cuda.is_available(), reason="compiled where there is a GPU")
@pytest.mark.usefixtures("interpreted")
def test_queries_without_keys_see_the_stored_keys() -> None:
    """A decoder attends to an encoder's states."""
    [memory] = empty_pages(1, 6, 2, 16, torch.float32, "cpu")
    memory[0].fill_(torch.nan), memory[1].fill_(torch.nan)
    k, v, q = torch.randn(73, 2, 16), torch.randn(73, 2, 16), torch.randn(2, 4, 16)
    pages = [[4, 0], [2, 5]]
    paged._store(k, v, memory, PagedLayout.from_lengths([40, 33], pages, rows=[40, 33]))
    where = PagedLayout.from_lengths([40, 33], pages, rows=[0, 0], queries=[1, 1])
    found = paged.attend(q, None, None, memory, where, scale=0.25, causal=False)
    wanted = varlen_attention(q, k, v, BatchLayout.from_lengths([1, 1], [40, 33]), scale=0.25)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.skipif(torch.cuda.is_available(), reason="compiled where there is a GPU")
def test_prefill_takes_the_path_of_gathered_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    use_dense(monkeypatch)
    monkeypatch.setattr(paged, "has_triton", lambda x: True)
    monkeypatch.setattr(paged_triton, "attend", _never)
    [memory] = empty_pages(1, 2, 2, 16, torch.float32, "cpu")
    k, v = torch.randn(40, 2, 16), torch.randn(40, 2, 16)
    for rows, queries in ((40, 40), (40, 1)):
        where = PagedLayout.from_lengths([40], [[1, 0]], rows=[rows], queries=[queries])
        found = paged.attend(k[-queries:], k, v, memory, where, scale=0.25)
        wanted = varlen_attention(
            k[-queries:], k, v, BatchLayout.from_lengths([queries], [40]), scale=0.25, causal=True
        )
        torch.testing.assert_close(found, wanted, rtol=0, atol=0)


@pytest.mark.parametrize("group", [1, 7, 20, 64])
def test_programs_are_a_power_of_two_of_splits(group: int) -> None:
    assert paged_triton.takes(group, 1, 256)
    assert not paged_triton.takes(group, 1, 257)
    assert not paged_triton.takes(65 * group, group, 64)
    for sequences in (1, 2, 3, 8, 33, 64, 500):
        count = paged_triton.splits(sequences, group)
        assert count in (4, 8, 16, 32)
        assert count >= paged_triton.splits(sequences + 1, group)


def test_slots_are_those_of_the_last_rows() -> None:
    where = PagedLayout.from_lengths([40, 3, 65], [[4, 1], [0], [7, 6, 2]], rows=[2, 3, 1])
    page, place = where.slots()
    assert (page.tolist(), place.tolist()) == ([1, 1, 0, 0, 0, 2], [6, 7, 0, 1, 2, 0])
    assert page.dtype is place.dtype is torch.int64
    page, place = where.all_slots()
    assert (page[:40].tolist(), place[:40].tolist()) == (
        [4] * 32 + [1] * 8,
        [*range(32), *range(8)],
    )
    assert len(page) == len(place) == 108


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no accelerator")
@pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim"), [*HEADS, (16, 8, 128), (32, 4, 256), (8, 8, 80)]
)
@pytest.mark.parametrize(("window", "biased", "softcap"), SIGHTS)
def test_accelerator_equals_attention_over_rows(
    heads: int, kv_heads: int, dim: int, window: int | None, biased: bool, softcap: float | None
) -> None:
    """All types work with unwritten pages, and without waiting for the device."""
    for dtype, bound in ((torch.float32, 2e-5), (torch.bfloat16, 0.03), (torch.float16, 0.004)):
        case = Case.create(KEYS, heads, kv_heads, dim, dtype, "cuda")
        check(case, window, biased, softcap, bound)
        with no_synchronization():
            paged.attend(
                case.q,
                case.k,
                case.v,
                case.memory,
                case.where,
                scale=0.2,
                window=window,
                softcap=softcap,
            )
