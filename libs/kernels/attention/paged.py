"""Attention over cached keys and values in pages of a fixed size (as in vLLM, arXiv 2309.06180).

A layer's keys are one tensor [pages, kv_heads, dim, PAGE], its values another [pages, kv_heads,
PAGE, dim]. A sequence has a list of pages, which need not be adjacent. On x86-64 CPUs a C++ kernel
stores and reads them in place (`native/paged.py`), on CUDA a Triton kernel for one query a sequence
(`paged_triton.py`). Elsewhere the rows are gathered for `varlen_attention`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from libs.kernels.attention.varlen import varlen_attention
from libs.kernels.layout import BatchLayout, cumulated, to_device
from libs.kernels.native import paged as native_paged
from libs.kernels.triton_here import has_triton

PAGE: Final = 32
"""Tokens of a page; must equal native/source/paged/paged.h."""


@dataclass(frozen=True, slots=True)
class PagedLayout:
    """The sequences of a forward and their pages.

    Attributes:
        layout: Queries and all keys of each sequence, stored or about to be.
        cu_rows: Bounds of the rows to store, the last keys of their sequence: [sequences + 1]
            int32.
        numbers: Pages of each sequence, [sequences, most] int32.
        host_numbers: The same on the host.
        fresh: No keys were stored before these rows, so the forward's keys are all keys.
    """

    layout: BatchLayout
    cu_rows: Tensor
    numbers: Tensor
    host_numbers: NDArray[np.int32]
    queries: tuple[int, ...]
    keys: tuple[int, ...]
    rows: tuple[int, ...]
    fresh: bool = False

    @staticmethod
    def from_lengths(
        keys: Sequence[int],
        pages: Sequence[Sequence[int]],
        device: torch.device | str = "cpu",
        *,
        rows: Sequence[int],
        queries: Sequence[int] | None = None,
    ) -> PagedLayout:
        """Build the layout.

        Args:
            keys: Keys of each sequence, including those of this forward.
            rows: Number of them that this forward stores.
            queries: None for as many as rows.
        """
        queries = rows if queries is None else queries
        most = max(map(len, pages))
        numbers = np.zeros((len(pages), max(1, most)), np.int32)
        for own, found in zip(numbers, pages, strict=True):
            own[: len(found)] = found
        layout = BatchLayout.from_lengths(queries, keys, device)
        cu_rows = layout.cu_queries if tuple(rows) == tuple(queries) else cumulated(rows, device)
        fresh = all(own == every for own, every in zip(rows, keys, strict=True))
        counts = tuple(queries), tuple(keys), tuple(rows)
        return PagedLayout(layout, cu_rows, to_device(numbers, device), numbers, *counts, fresh)

    @property
    def is_step(self) -> bool:
        """Return whether each sequence has one query, and stores one key or none."""
        return self.layout.max_queries == 1 and (set(self.rows) <= {1} or not any(self.rows))

    def slots(self) -> tuple[Tensor, Tensor]:
        """Return the page of each stored row and the index in it: [rows] int64 twice."""
        return self._places("rows", self.rows)

    def all_slots(self) -> tuple[Tensor, Tensor]:
        """Return the same for all keys."""
        return self._places("keys", self.keys)

    def _places(self, name: str, counts: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Return the slots of the last `counts` keys of each sequence. Computed on the host, and
        uploaded one time for all layers.
        """
        made = self.layout.memo.get((PagedLayout, name))
        if not isinstance(made, tuple):
            own = np.asarray(counts)
            ends = np.cumsum(own)
            positions = np.arange(own.sum()) - np.repeat(ends - np.asarray(self.keys), own)
            sequences = np.repeat(np.arange(len(own)), own)
            slots = np.stack((self.host_numbers[sequences, positions // PAGE], positions % PAGE))
            made = tuple(to_device(slots, self.numbers.device, np.int64))
            self.layout.memo[PagedLayout, name] = made
        return made


Pages = tuple[Tensor, Tensor]
"""Keys and values of one layer, as in the module's docstring."""


def empty_pages(
    layers: int, pages: int, kv_heads: int, dim: int, dtype: torch.dtype, device: torch.device | str
) -> list[Pages]:
    """Allocate all layers' pages in one block."""
    block = torch.empty((layers, 2, pages, kv_heads * dim * PAGE), dtype=dtype, device=device)
    keys, values = (pages, kv_heads, dim, PAGE), (pages, kv_heads, PAGE, dim)
    return [
        (block[number, 0].view(keys), block[number, 1].view(values)) for number in range(layers)
    ]


def page_bytes(layers: int, kv_heads: int, dim: int, dtype: torch.dtype) -> int:
    """Return the bytes of one page in all layers."""
    return 2 * layers * kv_heads * dim * PAGE * dtype.itemsize


def store(k: Tensor, v: Tensor, pages: Pages, where: PagedLayout) -> None:
    """Write rows k, v [rows, kv_heads, dim] to the pages of `where`."""
    if (
        native_paged.attend(
            None, k, v, pages, where.layout, where.cu_rows, where.numbers, 1.0, True, None, None
        )
        is None
    ):
        _store(k, v, pages, where)


def attend(
    q: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    pages: Pages,
    where: PagedLayout,
    *,
    scale: float,
    causal: bool = True,
    window: int | None = None,
    bias: Tensor | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Store k and v [rows, kv_heads, dim], if given, and return `varlen_attention` of q with all
    keys of each sequence.

    q: [queries, heads, dim]; the result has the same shape. Queries are at the last of their
    sequence's keys; if not `causal`, they see all.
    """
    if has_triton(q) and where.is_step:
        from libs.kernels.attention import paged_triton

        if paged_triton.takes(q.shape[1], pages[0].shape[1], q.shape[2]):
            return paged_triton.attend(
                q, k, v, pages, where.layout.cu_keys, where.numbers, scale, window, bias, softcap
            )
    made = None
    if softcap is None:
        made = native_paged.attend(
            q, k, v, pages, where.layout, where.cu_rows, where.numbers, scale, causal, window, bias
        )  # fmt: skip
    return (
        attend_gathered(q, k, v, pages, where, scale, causal, window, bias, softcap)
        if made is None
        else made
    )


def attend_gathered(
    q: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    pages: Pages,
    where: PagedLayout,
    scale: float,
    causal: bool,
    window: int | None,
    bias: Tensor | None,
    softcap: float | None = None,
) -> Tensor:
    """Compute `attend` by torch's operators."""
    if k is not None and v is not None:
        _store(k, v, pages, where)
    page, place = where.all_slots()
    keys, values = pages[0][page, :, :, place], pages[1][page, :, place]
    return varlen_attention(
        q, keys, values, where.layout, scale=scale, causal=causal, window=window, bias=bias,
        softcap=softcap,
    )  # fmt: skip


def _store(k: Tensor, v: Tensor, pages: Pages, where: PagedLayout) -> None:
    page, place = where.slots()
    pages[0][page, :, :, place] = k
    pages[1][page, :, place] = v


def pages_for(tokens: int) -> int:
    """Return the number of pages for `tokens` tokens."""
    return -(-tokens // PAGE)


def copy_page(pages: Sequence[Pages], origin: int, to: int) -> None:
    """Copy one page in all layers."""
    for keys, values in pages:
        keys[to], values[to] = keys[origin], values[origin]


def starts(lengths: Sequence[int]) -> list[int]:
    """Return the start of each length when laid end to end."""
    return [0, *accumulate(lengths)][:-1]
