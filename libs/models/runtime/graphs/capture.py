"""The interface of a device that records forwards: `CudaCapture` (`cuda.py`), and a fake in
tests.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from libs.models.interface.packed import Ids

Forward = Callable[[Tensor], Tensor]
"""A forward of an int32 buffer on the device. Only the buffer's shape determines its launches."""

Fill = Callable[[Ids], None]
"""Writes the inputs of one replay to an int32 array on the host, which holds those of an earlier
replay.
"""


class PendingCopy(Protocol):
    """A running copy of one replay's output to the host."""

    def wait(self) -> NDArray[np.generic]:
        """Wait for the replay and the copy, and return a stable array. Call it one time, on any
        thread.
        """


class Captured(Protocol):
    """A recorded forward with its buffer and output at fixed addresses."""

    @property
    def bytes(self) -> int:
        """Device memory by which its capture enlarged the pool, including buffer and output."""

    @property
    def buffer(self) -> Tensor:
        """The inputs of the last replay, on the device."""

    def replay(self, fill: Fill) -> Tensor:
        """Copy the inputs that `fill` writes to the device and run the forward; return its output
        on the device. Does not wait for the device.

        The next replay of any graph of the pool may overwrite the output, and the next one of this
        graph the buffer. The caller's launches on them must be ordered before it, as they are on
        the same stream. Data that outlives a replay, such as tokens for the next decode step, must
        be in memory allocated outside a capture.
        """

    def start_copy(self) -> PendingCopy:
        """Start to copy the output of the last replay to page-locked host memory. Does not wait for
        the device.

        Two copies may be pending; a third one overwrites the first.
        """

    def drop(self) -> None:
        """Return the memory to the pool of its capture. The graph must not be replayed afterwards.
        Idempotent.
        """


class Capture(Protocol):
    """Records the forwards of one model into one memory pool. They are replayed one after another
    and share the memory.
    """

    @property
    def bytes(self) -> int:
        """Device memory of the pool."""

    def capture(self, forward: Forward, inputs: Ids) -> Captured | None:
        """Record `forward` of a buffer like `inputs`, after running it with them. Waits for the
        device.

        Returns None if another thread is using the device. Raises what `forward` raises, and
        RuntimeError if the device cannot record it. After an exception all graphs of the pool are
        dropped.
        """

    def drop(self) -> None:
        """Drop all graphs, so the device's next trim frees their memory. No forward may be in
        progress on the device.
        """
