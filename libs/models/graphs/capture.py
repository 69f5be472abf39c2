"""The interface of a device that records forwards: `CudaCapture` (`cuda.py`), and a fake in tests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from torch import Tensor

from libs.models.packed import Ids

Forward = Callable[[Tensor], Tensor]
"""A forward of an int32 buffer on the device, whose shape alone decides what is launched."""


class Captured(Protocol):
    """A recorded forward, with a buffer and an output of its own, which both stay where they are."""

    @property
    def bytes(self) -> int:
        """Device memory that it takes, buffer and output included."""

    @property
    def buffer(self) -> Tensor:
        """What it reads: the content of the last replay."""

    def replay(self, inputs: Ids) -> Tensor:
        """Fills the buffer and runs the forward; returns its output, which the next replay overwrites. Does not wait for the
        device. What the caller launches on the output and the buffer must be over before the next replay."""


class Capture(Protocol):
    def capture(self, forward: Forward, inputs: Ids) -> Captured | None:
        """Records `forward` of a buffer like `inputs`, which it is also run with before. Waits for the device.

        None: not now, because another thread is using the device. Raises what `forward` raises, and RuntimeError if the device
        cannot record it.
        """
