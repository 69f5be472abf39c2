"""States that layers carry from one forward of a sequence to the next, such as the last inputs of a
convolution.

A layer has one tensor for each of its states, [slots, ...]. A sequence reads and replaces one slot
in all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from libs.kernels.layout import to_device


@dataclass(frozen=True, slots=True)
class StateShape:
    """The shape of a sequence's state in one layer. `exact`: it is float32 for every encoder."""

    shape: tuple[int, ...]
    exact: bool = False


@dataclass(frozen=True, slots=True)
class CarriedWindow:
    """The rows of a batch, each sequence with the `before` rows that precede it.

    Attributes:
        rows: Rows of the earlier inputs [sequences * before] followed by the batch's [tokens], in
            the order of the sequences: [sequences * before + tokens] int64.
        positions: Each row's position in its sequence, from 0: the same size, int64.
        own: Places of the batch's rows: [tokens] int64.
        last: Places of the last `before` rows of each sequence: [sequences * before] int64.
    """

    rows: Tensor
    positions: Tensor
    own: Tensor
    last: Tensor


@dataclass(frozen=True, slots=True)
class Carried:
    """The states of a forward's sequences.

    Attributes:
        lengths: New tokens of each sequence.
        slots: Each sequence's slot, [sequences] int64.
        resumed: Whether a sequence has a state, [sequences] bool; None if all have one.
    """

    lengths: tuple[int, ...]
    slots: Tensor
    resumed: Tensor | None
    _windows: dict[int, CarriedWindow] = field(default_factory=dict, repr=False)
    _written: list[tuple[Tensor, Tensor]] = field(default_factory=list, repr=False)

    @staticmethod
    def create(
        slots: Sequence[int],
        lengths: Sequence[int],
        resumed: Sequence[bool],
        device: torch.device | str = "cpu",
    ) -> Carried:
        begins = None if all(resumed) else to_device(np.array(resumed, np.int32), device).bool()
        return Carried(
            tuple(lengths), to_device(np.array(slots, np.int32), device, np.int64), begins
        )

    @property
    def is_step(self) -> bool:
        """Return whether each sequence has one new token."""
        return set(self.lengths) == {1}

    def read(self, memory: Tensor) -> Tensor:
        """Return each sequence's state, [sequences, ...]; zeros for a sequence that begins."""
        state = memory.index_select(0, self.slots)
        if self.resumed is None:
            return state
        # The memory of a sequence that begins has any values, even NaN.
        shape = (-1,) + (1,) * (state.dim() - 1)
        return torch.where(self.resumed.view(shape), state, state.new_zeros(()))

    def write(self, memory: Tensor, state: Tensor) -> None:
        """Replace each sequence's state when the forward ends, by `commit`."""
        self._written.append((memory, state.to(memory.dtype)))

    def commit(self) -> None:
        """Replace the states. A forward that fails has changed none, so that it can be repeated."""
        for memory, state in self._written:
            memory.index_copy_(0, self.slots, state)
        self._written.clear()

    def window(self, before: int) -> CarriedWindow:
        """Return the rows of the batch with `before` earlier ones of each sequence."""
        made = self._windows.get(before)
        if made is None:
            made = self._windows[before] = self._window(before)
        return made

    def _window(self, before: int) -> CarriedWindow:
        new = np.asarray(self.lengths)
        sizes = new + before
        ends = np.cumsum(sizes)
        positions = np.arange(sizes.sum()) - np.repeat(ends - sizes, sizes)
        sequences = np.repeat(np.arange(len(new)), sizes)
        is_own = positions >= before
        rows = np.where(
            is_own,
            len(new) * before + np.cumsum(is_own) - 1,
            sequences * before + positions,
        )
        last = (ends[:, None] - before + np.arange(before)).reshape(-1)
        return CarriedWindow(
            *(
                to_device(each, self.slots.device, np.int64)
                for each in (rows, positions, np.flatnonzero(is_own), last)
            )
        )
