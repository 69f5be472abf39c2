"""The memory of the states that a model's layers carry from token to token: one slot for each row
of a decode loop.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class StatePool:
    """States of `total` rows. A sequence claims one slot for each of its rows until it ends.

    Attributes:
        layers: The states of each layer, [total, ...] each; empty for layers without.
    """

    def __init__(self, total: int, layers: Sequence[Sequence[Tensor]]) -> None:
        self.total = total
        self.layers = tuple(map(tuple, layers))
        self._free = list(range(total - 1, -1, -1))

    @property
    def unclaimed(self) -> int:
        return len(self._free)

    def claim(self, slots: int) -> list[int]:
        """Claim slots; at most `unclaimed`."""
        return [self._free.pop() for _ in range(slots)]

    def end(self, slots: list[int]) -> None:
        """Return claimed slots."""
        self._free.extend(slots)
        slots.clear()

    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy states at the same time, from the first slot of each pair to the second."""
        if not pairs:
            return
        for memory in (each for layer in self.layers for each in layer):
            origins, to = (
                torch.tensor(slots, device=memory.device) for slots in zip(*pairs, strict=True)
            )
            memory.index_copy_(0, to, memory.index_select(0, origins))
