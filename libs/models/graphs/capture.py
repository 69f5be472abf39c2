"""The interface of a device that records forwards: `CudaCapture` (`cuda.py`), and a fake in
tests.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from libs.models.packed import Ids

Forward = Callable[[Tensor], Tensor]
"""A forward of an int32 buffer on the device, whose shape alone decides what is launched."""

Fill = Callable[[Ids], None]
"""Writes the inputs of one replay to an int32 array on the host, which holds those of an earlier
replay.
"""


class PendingCopy(Protocol):
    """The output of one replay on its way to the host."""

    def wait(self) -> NDArray[np.generic]:
        """Wait for the replay and the copy, and return an array that stays as it is. Once, on any
        thread.
        """


class Captured(Protocol):
    """A recorded forward with its own buffer and output, which both stay where they are."""

    @property
    def bytes(self) -> int:
        """Device memory by which its capture enlarged the pool, buffer and output included."""

    @property
    def buffer(self) -> Tensor:
        """The inputs of the last replay, on the device."""

    def replay(self, fill: Fill) -> Tensor:
        """Copy what `fill` writes to the device and run the forward; return its output on the
        device. Does not wait for the device.

        The next replay of any graph of the pool may overwrite the output, and the next one of this
        graph the buffer. What the caller launches on them must be ordered before it, which it is on
        the same stream. What outlives a replay, such as tokens of the next step of decoding, must
        be in memory that was allocated outside of a capture.
        """

    def start_copy(self) -> PendingCopy:
        """Start to copy the output of the last replay to page-locked memory of the host. Does not
        wait for the device.

        Two copies may be pending: a third one overwrites the first.
        """

    def drop(self) -> None:
        """Give the memory back to the pool of its capture. It must not be replayed afterwards. May
        be repeated.
        """


class Capture(Protocol):
    """Records forwards into one memory pool: all of one model, which are replayed one after the
    other and share the memory.
    """

    @property
    def bytes(self) -> int:
        """Device memory of the pool."""

    def capture(self, forward: Forward, inputs: Ids) -> Captured | None:
        """Record `forward` of a buffer like `inputs`, with which it is run before. Waits for the
        device.

        Returns None if another thread is using the device. Raises what `forward` raises, and
        RuntimeError if the device cannot record it. After an exception all graphs of the pool are
        dropped.
        """

    def drop(self) -> None:
        """Drop all graphs, so that the device's next trim frees their memory. No forward may be in
        progress on the device.
        """
