"""Attention by torch's dense operators: each run of equally long sequences is viewed as one dense
batch.

`varlen.py` uses it on a CPU, and without Triton. Nothing is padded. Masks and biases depend only
on the distance of key and query, so slices of one matrix per batch, built from a table by distance,
serve every run and layer. Long sequences are split into blocks of queries that are computed against
their visible keys only, so memory stays bounded and masked blocks cost nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from libs.kernels.layout import BatchLayout, SequenceRun

# Measured on AVX512-BF16 cores, torch 2.13: softmax between two matrix products beats torch's fused
# kernel in half precision above, and in float32 below these sizes. Without AVX512 the fused kernel
# is never slower (bfloat16, 4 texts of 256 tokens: 14 against 231 ms).
_FUSED_UP_TO_TOKENS_HALF = 48
_FUSED_FROM_KEYS_FLOAT = 192
# Maximum scores between the two products: 2 MiB of float32, about the size of a core's cache (2
# sequences of 512 tokens, 12 heads: 26 ms in blocks, 57 to 76 without).
_MAX_SCORES = 1 << 19
# Queries of one block of a windowed sequence (8,192 tokens, 64 keys on each side: 98 ms with 64,
# 121 with 128, 175 with 256).
_BAND_ROWS = 64
# Side of the matrix of masks and biases that is cached for all layers; larger ones are built block
# by block.
_KEPT = 512


@dataclass(frozen=True, slots=True)
class _Sight:
    """The keys that are visible to queries, and the bias on their scores."""

    causal: bool
    window: int | None
    bias: Tensor | None

    def keys(self, first: int, last: int, keys: int) -> tuple[int, int]:
        """Return the keys [low, high) that are visible to any query at positions `first` to
        `last`.
        """
        low = 0 if self.window is None else max(0, first - self.window)
        high = last + 1 if self.causal else keys if self.window is None else last + 1 + self.window
        return low, min(high, keys)

    def is_all(self, first: int, last: int, low: int, high: int) -> bool:
        """Return whether all keys [low, high) are visible to all these queries without a bias."""
        right = 0 if self.causal else self.window
        too_far = self.window is not None and last - low > self.window
        return self.bias is None and not too_far and (right is None or high - 1 - first <= right)

    def is_triangle(self, run: SequenceRun) -> bool:
        """Return whether a plain causal mask from the first key on suffices."""
        return (
            self.causal
            and self.bias is None
            and run.offset == 0
            and (self.window is None or self.window >= run.queries - 1)
        )

    def seeing(self, run: SequenceRun) -> int:
        """Return how many queries of each sequence see any key: with fewer keys than queries, those
        beyond the window see none.
        """
        return (
            run.queries
            if self.window is None
            else min(run.queries, run.keys + self.window - run.offset)
        )


@dataclass(frozen=True, slots=True)
class _Block:
    """Sequences [start, stop) of a run, their queries [top, bottom) and all keys [low, high)
    visible to them.
    """

    start: int
    stop: int
    top: int
    bottom: int
    low: int
    high: int


@dataclass(frozen=True, slots=True)
class _Step:
    """One block, the bias or mask added to its scores, and its method of computation.

    Attributes:
        added: [1 or heads, rows, keys].
        behind: Distance of the first query after the first key, to build `added` from the table. If
            `added` is None too, nothing is added.
        triangle: Use the fused kernel's causal mask.
    """

    block: _Block
    fused: bool
    triangle: bool = False
    added: Tensor | None = None
    behind: int | None = None


class _Plan:
    """The attention steps for one batch, planned for the first layer of a kind and reused by all
    others.
    """

    def __init__(
        self, layout: BatchLayout, sight: _Sight, like: Tensor, softcap: float | None
    ) -> None:
        heads, self._softcap = like.shape[1], softcap
        self._table = _table(layout.max_positions, sight, like)
        side = min(_KEPT, layout.max_positions, self._table.shape[1] // 2 + 1)
        self._matrix = (
            _by_distance(self._table, 0, side, side)
            if layout.max_queries > 1 and sight != _Sight(False, None, None)
            else None
        )
        self.steps = tuple(
            (run, tuple(self._steps(run, heads, sight, like))) for run in layout.runs
        )

    def added(self, step: _Step) -> Tensor | None:
        """Return [1 or heads, rows, keys] in the type of the queries."""
        if step.behind is None:
            return step.added
        block = step.block
        return _by_distance(
            self._table, step.behind, block.bottom - block.top, block.high - block.low
        )

    def _steps(self, run: SequenceRun, heads: int, sight: _Sight, like: Tensor) -> Iterator[_Step]:
        # torch's fused kernel has no soft cap.
        fused = self._softcap is None and _prefers_fused(like, run)
        for block in _blocks(run, heads, sight, fused):
            first, last = run.offset + block.top, run.offset + block.bottom - 1
            rows, keys, behind = block.bottom - block.top, block.high - block.low, first - block.low
            if sight.is_all(first, last, block.low, block.high):
                yield _Step(block, fused)
            elif fused and sight.is_triangle(run):
                yield _Step(block, fused, triangle=True)
            elif self._matrix is not None and max(behind + rows, keys) <= self._matrix.shape[1]:
                yield _Step(block, fused, added=self._matrix[:, behind : behind + rows, :keys])
            else:
                yield _Step(block, fused, behind=behind)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: BatchLayout,
    scale: float,
    causal: bool,
    window: int | None,
    bias: Tensor | None,
    softcap: float | None = None,
) -> Tensor:
    """Compute `varlen_attention` on any device and type."""
    sight = _Sight(causal, window, bias)
    plan = layout.memo.get(key := (sight, q.shape[1], q.dtype, softcap))
    if not isinstance(plan, _Plan):
        plan = layout.memo[key] = _Plan(layout, sight, q, softcap)
    out = q.new_empty(q.shape)
    for run, steps in plan.steps:
        queries = slice(run.query, run.query + run.count * run.queries)
        keys = slice(run.key, run.key + run.count * run.keys)
        own, mixed = (t[queries].view(run.count, run.queries, *t.shape[1:]) for t in (q, out))
        theirs, values = (t[keys].view(run.count, run.keys, *t.shape[1:]) for t in (k, v))
        for step in steps:
            block = step.block
            a, target = (
                _part(t, block.start, block.stop, block.top, block.bottom) for t in (own, mixed)
            )
            b, c = (
                _part(t, block.start, block.stop, block.low, block.high) for t in (theirs, values)
            )
            added = plan.added(step)
            if step.fused:
                target.copy_(_by_fused_kernel(a, b, c, scale, added, step.triangle))
            else:
                target.copy_(_by_products(a, b, c, scale, added, softcap))
        blind = sight.seeing(run)
        if blind < run.queries:
            mixed[:, blind:] = 0
    return out


def _part(t: Tensor, start: int, stop: int, low: int, high: int) -> Tensor:
    """Return t[start:stop, low:high], without slicing if that is the whole tensor."""
    if stop - start == t.shape[0] and high - low == t.shape[1]:
        return t
    return t[start:stop, low:high]


def _prefers_fused(q: Tensor, run: SequenceRun) -> bool:
    if q.device.type != "cpu" or not _has_avx512():
        return True
    if q.dtype in (torch.bfloat16, torch.float16):
        return run.count * run.keys <= _FUSED_UP_TO_TOKENS_HALF
    return run.keys >= _FUSED_FROM_KEYS_FLOAT


@cache
def _has_avx512() -> bool:
    return torch.backends.cpu.get_cpu_capability() == "AVX512"


def _blocks(run: SequenceRun, heads: int, sight: _Sight, fused: bool) -> Iterator[_Block]:
    queries = sight.seeing(run)
    low, high = sight.keys(run.offset, run.offset + queries - 1, run.keys)
    rows, sequences, width = queries, run.count, high - low
    if sight.window is not None and width >= 2 * (2 * sight.window + _BAND_ROWS):
        rows, width = min(queries, _BAND_ROWS), _BAND_ROWS + 2 * sight.window
    elif fused:
        masked = not sight.is_all(
            run.offset, run.offset + queries - 1, low, high
        ) and not sight.is_triangle(run)
        if masked and max(run.offset + queries, high) > _KEPT:
            rows = _MAX_SCORES // ((1 if sight.bias is None else heads) * width)
    elif heads * queries * width > _MAX_SCORES:
        rows = _MAX_SCORES // (heads * width)
    rows = min(queries, max(16, rows))
    if not fused:
        sequences = max(1, _MAX_SCORES // (heads * rows * width))
    for start in range(0, run.count, sequences):
        for top in range(0, queries, rows):
            bottom = min(top + rows, queries)
            low, high = sight.keys(run.offset + top, run.offset + bottom - 1, run.keys)
            yield _Block(start, min(start + sequences, run.count), top, bottom, low, high)


def _by_fused_kernel(
    q: Tensor, k: Tensor, v: Tensor, scale: float, added: Tensor | None, triangle: bool
) -> Tensor:
    """Compute queries [sequences, rows, heads, dim], with keys and values alike; `added` [1 or
    heads, rows, keys].
    """
    grouped = k.shape[2] != q.shape[2]
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    mask = None if added is None else added[None]
    out = F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=triangle, scale=scale, enable_gqa=grouped
    )
    return out.transpose(1, 2)


def _by_products(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    added: Tensor | None,
    softcap: float | None = None,
) -> Tensor:
    """Compute the same by two matrix products and a softmax."""
    count, rows, heads, dim = q.shape
    length, shared = k.shape[1:3]
    # Queries that share a key head become more rows of one product, so keys are never repeated.
    q = (
        q.view(count, rows, shared, heads // shared, dim)
        .permute(0, 2, 3, 1, 4)
        .reshape(count * shared, -1, dim)
    )
    k, v = (t.transpose(1, 2).reshape(count * shared, length, dim) for t in (k, v))
    scores = torch.baddbmm(q.new_empty(1, 1, 1), q, k.transpose(1, 2), beta=0, alpha=scale)
    if softcap is not None:
        scores.div_(softcap).tanh_().mul_(softcap)
    if added is not None:
        scores.view(count, heads, rows, length).add_(added)
    return torch.bmm(scores.softmax(-1), v).view(count, heads, rows, dim).transpose(1, 2)


def _table(positions: int, sight: _Sight, like: Tensor) -> Tensor:
    """Return bias and mask by distance, -inf for invisible keys: [1 or heads, 2 * reach + 1] in the
    type of `like`.
    """
    reach = positions if sight.bias is None else sight.bias.shape[1] // 2
    table = (
        like.new_zeros(1, 2 * reach + 1)
        if sight.bias is None
        else sight.bias.to(like.dtype, copy=True)
    )
    if sight.window is not None:
        table[:, : max(0, reach - sight.window)] = float("-inf")
        table[:, reach + sight.window + 1 :] = float("-inf")
    if sight.causal:
        table[:, reach + 1 :] = float("-inf")
    return table


def _by_distance(table: Tensor, behind: int, rows: int, keys: int) -> Tensor:
    """Expand a table by distance to the matrix [.., rows, keys]; the first query is `behind`
    positions after the first key.
    """
    # The table begins with the last row's distances; every row begins one column before the row
    # above it.
    begin = table.shape[1] // 2 - (behind + rows - 1)
    return table[:, begin : begin + rows - 1 + keys].unfold(1, keys, 1).flip(1)
