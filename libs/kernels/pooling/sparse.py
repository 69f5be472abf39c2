"""Weights over a vocabulary for each sequence: SPLADE's maximum over tokens, and the largest weight
of each token id (bge-m3).

Called by the sparse heads: `splade_max` at the end of a forward, `max_by_id` on results in host
memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from libs.kernels.rows.segments import reduce

_ALIGNED: Final = 16

SpladeActivation = Literal["log1p_relu", "log1p_relu_twice"]
"""log(1 + relu(x)) (SPLADE, arXiv 2109.10086), or log(1 + log(1 + relu(x)))
(opensearch-neural-sparse v3).
"""


def splade_max(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    cu_seqlens: Tensor,
    lengths: Sequence[int],
    *,
    activation: SpladeActivation = "log1p_relu",
    chunk_elements: int | None = None,
) -> Tensor:
    """Return the maximum of activation(hidden W' + bias) over each sequence's tokens: [sequences,
    vocabulary], float32.

    The activation is monotonic, and bias is the same for every token, so both are applied after the
    maximum. Does not wait for the device.

    Args:
        hidden: [tokens, hidden]
        weight: [vocabulary, hidden], of the same type.
        bias: [vocabulary]
        cu_seqlens: [sequences + 1], equal to `lengths` on the host.
        chunk_elements: Maximum logits at a time, unless one column of a sequence exceeds it; None
            for the device's default.
    """
    chunk_elements = _suited(hidden) if chunk_elements is None else chunk_elements
    best = hidden.new_empty(len(lengths), weight.shape[0], dtype=torch.float32)
    for first, group, start in _groups(lengths, chunk_elements // min(weight.shape[0], 512)):
        rows = hidden[start : start + sum(group)]
        ends = cu_seqlens[first : first + len(group) + 1] - start
        columns = _columns(chunk_elements, rows.shape[0])
        for left in range(0, weight.shape[0], columns):
            right = left + columns
            logits = F.linear(rows, weight[left:right])
            best[first : first + len(group), left:right] = reduce(logits, "max", ends)
    if bias is not None:
        best += bias
    best.relu_().log1p_()
    return best.log1p_() if activation == "log1p_relu_twice" else best


def splade_sum(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    cu_seqlens: Tensor,
    *,
    activation: SpladeActivation = "log1p_relu",
    chunk_elements: int | None = None,
) -> Tensor:
    """Return the sum over each sequence's tokens instead (SPLADE's first version, arXiv
    2107.05720).
    """
    chunk_elements = _suited(hidden) if chunk_elements is None else chunk_elements
    columns = _columns(chunk_elements, hidden.shape[0])
    sums = []
    for left in range(0, weight.shape[0], columns):
        logits = F.linear(hidden, weight[left : left + columns]).float()
        if bias is not None:
            logits += bias[left : left + columns]
        logits.relu_().log1p_()
        if activation == "log1p_relu_twice":
            logits.log1p_()
        sums.append(reduce(logits, "sum", cu_seqlens))
    return torch.cat(sums, dim=1)


def max_by_id(
    ids: Tensor, weights: Tensor, lengths: Sequence[int]
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the largest weight of each distinct id in each sequence, as rows of a CSR matrix, ids
    ascending.

    ids, weights: [tokens], in host memory, since the size of the result depends on them. Returns
    offsets [sequences + 1] int64, ids [entries] int64 and weights [entries] in the type of
    `weights`.
    """
    sequence = torch.arange(len(lengths)).repeat_interleave(
        torch.tensor(lengths, dtype=torch.int64), output_size=len(ids)
    )
    above = int(ids.max()) + 1 if len(ids) else 1
    ordered, order = (sequence * above + ids).sort()
    is_new = F.pad(ordered.diff() != 0, (1, 0), value=True) if len(ids) else ordered.bool()
    pairs = ordered[is_new]
    best = weights.new_full(pairs.shape, float("-inf")).scatter_reduce_(
        0, is_new.cumsum(0) - 1, weights[order], "amax"
    )
    offsets = F.pad(torch.bincount(pairs // above, minlength=len(lengths)).cumsum(0), (1, 0))
    return offsets, pairs % above, best


def _suited(hidden: Tensor) -> int:
    """Return the default `chunk_elements`: on a CPU logits should stay in its caches, on a GPU
    products should be large (32 MiB of bfloat16).
    """
    return 1 << 24 if hidden.is_cuda else 1 << 19


def _columns(chunk_elements: int, rows: int) -> int:
    """Return the logits of each of `rows` tokens that are computed at a time.

    Rows of logits begin at multiples of 16 numbers: cuBLAS has slower products for others, and
    Triton compiles the reduction once for such rows and once for all others.
    """
    columns = chunk_elements // rows
    return columns // _ALIGNED * _ALIGNED if columns >= _ALIGNED else max(1, columns)


def _groups(lengths: Sequence[int], budget: int) -> Iterator[tuple[int, Sequence[int], int]]:
    """Yield consecutive sequences of at most `budget` tokens together, a longer one alone: index of
    the first, lengths, first row.
    """
    first = start = used = 0
    for number, length in enumerate(lengths):
        if used and used + length > budget:
            yield first, lengths[first:number], start
            first, start, used = number, start + used, 0
        used += length
    if lengths:
        yield first, lengths[first:], start
