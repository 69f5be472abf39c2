"""Sums, means and maxima over the rows of each sequence, in one launch on a GPU.

Called by all of `libs/kernels/pooling`. Accumulation is in float32, whatever the type of the rows.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from libs.kernels import native
from libs.kernels.triton_here import has_triton

Reduction = Literal["sum", "mean", "max"]


def reduce(values: Tensor, how: Reduction, cu_seqlens: Tensor) -> Tensor:
    """Reduce [tokens, size] with [sequences + 1] to [sequences, size] float32. No sequence is
    empty.
    """
    if has_triton(values):
        from libs.kernels.rows import fused_triton

        return fused_triton.reduce(values, cu_seqlens, how)
    done = native.reduce(values, how, cu_seqlens)
    if done is not None:
        return done
    if values.device.type == "cpu":
        # Four to eight times faster than segment_reduce, which reduces one column after another.
        out = values.new_empty(cu_seqlens.shape[0] - 1, values.shape[1], dtype=torch.float32)
        ends: list[int] = cu_seqlens.tolist()
        for row, begin, end in zip(out, ends, ends[1:], strict=False):
            part = values[begin:end]
            if how == "max":
                row.copy_(part.amax(0))
            elif how == "sum":
                torch.sum(part, 0, dtype=torch.float32, out=row)
            else:
                torch.mean(part, 0, dtype=torch.float32, out=row)
        return out
    # unsafe skips a check of the offsets that would make the host wait for the device.
    return torch.segment_reduce(values.float(), how, offsets=cu_seqlens.long(), axis=0, unsafe=True)
