"""What every head is to a TextModel."""

from __future__ import annotations

from collections.abc import Sequence as Many
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from libs.models.packed import Packed, Rows
from libs.models.work import Output, Sequence

Array = NDArray[np.generic]


class TextHead(Protocol):
    """Turns hidden states into an output for each sequence, in two steps with one copy from the device between them."""

    @property
    def rows(self) -> Rows | None:
        """The only row of each sequence that the head looks at; None: all."""

    def forward(self, hidden: Tensor, batch: Packed, sequences: Many[Sequence]) -> tuple[Tensor, ...]:
        """On the device, without waiting for it.

        `hidden`: [tokens, hidden], or [sequences, hidden] where `rows` chose them. `sequences`: those of the batch, in its order.
        """

    def split(self, arrays: tuple[Array, ...], sequences: Many[Sequence]) -> list[Output]:
        """What `forward` gave, on the host, as one output a sequence."""


@runtime_checkable
class Compacts(Protocol):
    """A head that leaves out, on the device, what need not be copied from it. `split` then gets what is left."""

    def compact(self, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """`tensors`: what `forward` gave. Called when all work of the batch was given to the device: it may wait for it."""


def row_each(array: Array) -> list[Output]:
    """[sequences, ...] -> a row for each."""
    return list(array.astype(np.float32, copy=False))


def rows_each(array: Array, sequences: Many[Sequence]) -> list[Output]:
    """[tokens, ...] -> the rows of each sequence's tokens."""
    ends = np.cumsum([sequence.tokens for sequence in sequences])[:-1]
    return list(np.split(array.astype(np.float32, copy=False), ends))
