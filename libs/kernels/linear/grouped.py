"""Products of tokens with the weights of their experts: tokens are sorted by expert, and the bounds
of each expert's tokens stay on the device.

torch's grouped product (`torch._grouped_mm`) reads these bounds on the device only on GPUs of
compute capability 9.0, and only in bfloat16. Elsewhere it would copy them to the host, so a forward
would wait for the device.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

_ALIGNMENT_BYTES = 16
"""Rows of both operands begin at multiples of this."""


@dataclass(frozen=True, slots=True)
class ByExpert:
    """Pairs of a row and one of its experts, sorted by expert.

    Attributes:
        rows: [pairs] the row of each pair.
        experts: [pairs] its expert, non-decreasing.
        ends: [experts] int32, the end of each expert's pairs.
        places: [rows, used] index of each pair of a row in the order of `rows`.
    """

    rows: Tensor
    experts: Tensor
    ends: Tensor
    places: Tensor

    @staticmethod
    def from_chosen(chosen: Tensor, experts: int) -> ByExpert:
        """Sort pairs by expert, without waiting for the device.

        Args:
            chosen: int64 [rows, used], the experts of each row.
            experts: Number of all experts.
        """
        by_expert, order = chosen.flatten().sort(stable=True)
        numbers = torch.arange(len(order), device=chosen.device)
        ends = torch.searchsorted(
            by_expert, torch.arange(experts, device=chosen.device), right=True, out_int32=True
        )
        places = torch.empty_like(order).scatter_(0, order, numbers).view_as(chosen)
        return ByExpert(order // chosen.shape[1], by_expert, ends, places)

    def product(self, x: Tensor, weights: Tensor) -> Tensor:
        """Multiply x [pairs, inputs] by each expert's weights [experts, inputs, outputs] -> [pairs,
        outputs].
        """
        return torch._grouped_mm(x, weights, offs=self.ends)

    def weighted(self, answers: Tensor, shares: Tensor) -> Tensor:
        """Return the float32 sum over each row's experts of share * answer.

        Args:
            answers: [pairs, size]
            shares: [rows, used]
        """
        return (answers[self.places].float() * shares.float()[..., None]).sum(1)


def has_grouped(x: Tensor, *sizes: int) -> bool:
    """Return whether grouped products of `x` with weights of these sizes run without waiting for
    the device.
    """
    is_aligned = all(size * x.element_size() % _ALIGNMENT_BYTES == 0 for size in sizes)
    return x.is_cuda and x.dtype is torch.bfloat16 and is_aligned and _on_device(x.get_device())


@cache
def _on_device(index: int) -> bool:
    return hasattr(torch, "_grouped_mm") and torch.cuda.get_device_capability(index)[0] == 9
