"""The interface of a model's heads: hidden states to outputs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from libs.models.packed import Packed, Rows
from libs.models.work import InputSequence, Output, YieldPoint

Array = NDArray[np.generic]


class ModelHead(Protocol):
    """Turns hidden states into an output for each sequence, in two steps with one copy from the
    device between them.
    """

    @property
    def rows(self) -> Rows | None:
        """The only row of each sequence that the head looks at; None: all."""

    def forward(
        self, hidden: Tensor, batch: Packed, sequences: Sequence[InputSequence]
    ) -> tuple[Tensor, ...]:
        """On the device, without waiting for it.

        `hidden`: [tokens, hidden], or [sequences, hidden] where `rows` chose them. `sequences`:
        those of the batch, in its order.
        """

    def split(self, arrays: tuple[Array, ...], sequences: Sequence[InputSequence]) -> list[Output]:
        """Splits the output of `forward`, now on the host, into one output per sequence."""


@runtime_checkable
class PreemptedHead(Protocol):
    """A head with layers of its own, between which it may be preempted."""

    def forward_preemptible(
        self,
        hidden: Tensor,
        batch: Packed,
        sequences: Sequence[InputSequence],
        yield_point: YieldPoint,
    ) -> tuple[Tensor, ...]:
        """As `forward`; `yield_point`, a preemption point, is called between two layers."""


@runtime_checkable
class ReadsDevice(Protocol):
    """A head whose `forward` reads a value from the device and so waits for all that was launched
    before.
    """

    reads_device: Literal[True]


@runtime_checkable
class CapturableHead(ModelHead, Protocol):
    """A head with one output, a row for each sequence, that can be computed in a CUDA graph."""

    def pool(self, hidden: Tensor, cu_seqlens: Tensor, *, is_one_row: bool) -> Tensor:
        """Compute the output of `forward` without reading a value on the host.

        `hidden`: [tokens, hidden], or [sequences, hidden] if `rows` chose them (`is_one_row`).
        `cu_seqlens`: [sequences + 1].
        """


@runtime_checkable
class Compacts(Protocol):
    """A head that compacts its output on the device, to copy less to the host. `split` then gets
    the compacted arrays.
    """

    def compact(self, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """`tensors`: the output of `forward`. Called after the batch's last launch, so it may wait
        for the device.

        Another batch may have been launched since, so `tensors` must not be views of the hidden
        states.
        """


def split_rows(array: Array) -> list[Output]:
    """[sequences, ...] -> one row per sequence."""
    return list(array.astype(np.float32, copy=False))


def split_token_rows(array: Array, sequences: Sequence[InputSequence]) -> list[Output]:
    """[tokens, ...] -> the rows of each sequence's tokens."""
    ends = np.cumsum([sequence.tokens for sequence in sequences])[:-1]
    return list(np.split(array.astype(np.float32, copy=False), ends))
