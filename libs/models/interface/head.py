"""The interface of a model's heads, which turn hidden states into outputs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from libs.models.interface.packed import Packed, Rows
from libs.models.interface.sequences import InputSequence, Output, YieldPoint

Array = NDArray[np.generic]


class ModelHead(Protocol):
    """Turns hidden states into one output per sequence, in two steps with one device-to-host copy
    between them.
    """

    @property
    def rows(self) -> Rows | None:
        """The only row of each sequence that the head reads; None for all rows."""

    def forward(
        self, hidden: Tensor, batch: Packed, sequences: Sequence[InputSequence]
    ) -> tuple[Tensor, ...]:
        """Compute the head's tensors on the device, without waiting for it.

        Args:
            hidden: [tokens, hidden], or [sequences, hidden] if `rows` selected them.
            sequences: The sequences of the batch, in its order.
        """

    def split(self, arrays: tuple[Array, ...], sequences: Sequence[InputSequence]) -> list[Output]:
        """Split the output of `forward`, now on the host, into one output per sequence."""


@runtime_checkable
class PreemptedHead(Protocol):
    """A head that may be preempted between two of its layers."""

    def forward_preemptible(
        self,
        hidden: Tensor,
        batch: Packed,
        sequences: Sequence[InputSequence],
        yield_point: YieldPoint,
    ) -> tuple[Tensor, ...]:
        """Compute `forward`, and call `yield_point` between two layers."""


@runtime_checkable
class ReadsDevice(Protocol):
    """A head with a `forward` that waits for all earlier launches, as it reads from the device."""

    reads_device: Literal[True]


@runtime_checkable
class CapturableHead(ModelHead, Protocol):
    """A head with one output, a row for each sequence, that can be computed in a CUDA graph."""

    def pool(self, hidden: Tensor, cu_seqlens: Tensor, *, is_one_row: bool) -> Tensor:
        """Compute the output of `forward` without reading a value on the host.

        Args:
            hidden: [tokens, hidden], or [sequences, hidden] if `rows` chose them (`is_one_row`).
            cu_seqlens: [sequences + 1]
        """


@runtime_checkable
class Compacts(Protocol):
    """A head that compacts its output on the device to copy less to the host. `split` receives the
    compacted arrays.
    """

    def compact(self, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Compact `tensors`, the output of `forward`. Called after the batch's last launch, so it
        may wait for the device.

        Another batch may have been launched since, so `tensors` must not be views of the hidden
        states.
        """


def split_rows(array: Array) -> list[Output]:
    """Split [sequences, ...] into one row per sequence."""
    return list(array.astype(np.float32, copy=False))


def split_token_rows(array: Array, sequences: Sequence[InputSequence]) -> list[Output]:
    """Split [tokens, ...] into the token rows of each sequence."""
    ends = np.cumsum([sequence.tokens for sequence in sequences])[:-1]
    return list(np.split(array.astype(np.float32, copy=False), ends))
