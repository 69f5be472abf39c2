"""A device that records forwards, where there is none: it runs them again at each replay, on buffers that stay where they are."""

from __future__ import annotations

import torch
from torch import Tensor

from libs.models.graphs.capture import Forward
from libs.models.packed import Ids


class FakeCaptured:
    """`replays`: how many there were."""

    def __init__(self, forward: Forward, inputs: Ids, size: int) -> None:
        self.buffer, self.bytes, self.replays = torch.from_numpy(inputs.copy()), size, 0
        self._forward = forward
        self._output = forward(self.buffer).clone()

    def replay(self, inputs: Ids) -> Tensor:
        self.replays += 1
        self.buffer.copy_(torch.from_numpy(inputs))
        self._output.copy_(self._forward(self.buffer))
        # A copy, as the answers' way from a device to the host is one, and on a CPU is none.
        return self._output.clone()


class FakeCapture:
    """`made`: what was captured. `size`: bytes of a graph. `is_busy`: another thread uses the device. `error`: of captures."""

    def __init__(self, size: int = 1000) -> None:
        self.made: list[FakeCaptured] = []
        self.size = size
        self.is_busy = False
        self.error: Exception | None = None

    def capture(self, forward: Forward, inputs: Ids) -> FakeCaptured | None:
        if self.is_busy:
            return None
        if self.error is not None:
            raise self.error
        self.made.append(FakeCaptured(forward, inputs, self.size))
        return self.made[-1]
