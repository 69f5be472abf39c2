"""A device that records forwards, where there is none: it runs them again at each replay, on
buffers that stay where they are.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from libs.models.interface.packed import Ids
from libs.models.runtime.graphs.capture import Fill, Forward


class FakeCopy:
    def __init__(self, answer: Tensor) -> None:
        self._answer = answer

    def wait(self) -> NDArray[np.generic]:
        return self._answer.numpy().copy()


class FakeCaptured:
    """`replays`: how many there were."""

    def __init__(self, forward: Forward, inputs: Ids, size: int) -> None:
        self.buffer, self.bytes, self.replays, self.is_dropped = (
            torch.from_numpy(inputs.copy()),
            size,
            0,
            False,
        )
        self._inputs = inputs.copy()
        self._forward = forward
        self._output = forward(self.buffer).clone()
        self._answers = [torch.empty_like(self._output) for _ in range(2)]

    def replay(self, fill: Fill) -> Tensor:
        assert not self.is_dropped, "a dropped graph was replayed"
        self.replays += 1
        fill(self._inputs)
        self.buffer.copy_(torch.from_numpy(self._inputs))
        self._output.copy_(self._forward(self.buffer))
        # A copy, as the answers' way from a device to the host is one, and on a CPU is none.
        return self._output.clone()

    def start_copy(self) -> FakeCopy:
        answer = self._answers[0]
        self._answers.reverse()
        return FakeCopy(answer.copy_(self._output))

    def drop(self) -> None:
        self.is_dropped = True


class FakeCapture:
    """A fake capture pool."""

    def __init__(self, size: int = 1000) -> None:
        self.made: list[FakeCaptured] = []
        """All captured graphs, in order."""
        self.size = size
        """Bytes of a graph."""
        self.is_busy = False
        """Another thread uses the device."""
        self.error: Exception | None = None
        """Raised by captures."""

    @property
    def bytes(self) -> int:
        return sum(one.bytes for one in self.made if not one.is_dropped)

    @property
    def kept(self) -> list[FakeCaptured]:
        return [one for one in self.made if not one.is_dropped]

    def capture(self, forward: Forward, inputs: Ids) -> FakeCaptured | None:
        if self.is_busy:
            return None
        if self.error is not None:
            self.drop()
            raise self.error
        self.made.append(FakeCaptured(forward, inputs, self.size))
        return self.made[-1]

    def drop(self) -> None:
        for one in self.made:
            one.drop()
