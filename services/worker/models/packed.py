"""The batch a model's forward sees: sequences laid end to end, without padding.

Stands between `prepare` (token ids in host memory) and the encoder: everything the host must know during a forward (lengths,
groups) is kept on the host here, so that a forward never asks the device for a number.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from libs.kernels.attention import Group, equal_length_groups

Ids = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Packed:
    """Sequences in the order in which they were given, each of at least one token.

    `groups` are the runs of neighbours of equal length: the CPU's attention handles a run at once, so sort by length before
    packing.
    """

    ids: Tensor  # [tokens] int32
    positions: Tensor  # [tokens] int32, each sequence counted from 0
    type_ids: Tensor | None  # [tokens] int32; None: all of segment 0
    cu_seqlens: Tensor  # [sequences + 1] int32
    max_seqlen: int
    lengths: tuple[int, ...]
    groups: tuple[Group, ...]

    @staticmethod
    def of(sequences: Sequence[Ids], type_ids: Sequence[Ids | None] | None = None, device: torch.device | str = "cpu") -> Packed:
        """Pack token ids; where only some sequences have type ids, the others count as segment 0."""
        lengths = tuple(len(ids) for ids in sequences)
        segments = None
        if type_ids is not None and any(types is not None for types in type_ids):
            segments = np.concatenate([np.zeros(n, np.int32) if t is None else t for n, t in zip(lengths, type_ids, strict=True)])
        return Packed(
            ids=_to_device(np.concatenate(sequences), device),
            positions=_to_device(np.concatenate([np.arange(n, dtype=np.int32) for n in lengths]), device),
            type_ids=None if segments is None else _to_device(segments, device),
            cu_seqlens=_to_device(np.cumsum((0, *lengths), dtype=np.int32), device),
            max_seqlen=max(lengths),
            lengths=lengths,
            groups=equal_length_groups(lengths),
        )

    def first_rows(self) -> Tensor:
        """The row of each sequence's first token ([CLS], <s>): [sequences] int32."""
        return self.cu_seqlens[:-1]

    def last_rows(self) -> Tensor:
        """The row of each sequence's last token: [sequences] int32."""
        return self.cu_seqlens[1:] - 1


def _to_device(array: Ids, device: torch.device | str) -> Tensor:
    tensor = torch.from_numpy(np.ascontiguousarray(array, dtype=np.int32))
    if torch.device(device).type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)
