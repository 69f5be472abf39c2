"""The queue of one CUDA device: batches are launched on the current stream, and events mark where
each begins and ends.

Answers are copied to page-locked memory behind the batch's kernels, so that a batch is over when
its last event is. Waiting for an event releases the interpreter's lock. It has run on an H200
(docs/gpu.md).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache

import torch
from torch import Tensor


class CudaSubmission:
    """A `Submission`. `before`: the end of the batch before."""

    def __init__(
        self,
        copies: tuple[Tensor, ...],
        before: torch.cuda.Event | None,
        began: torch.cuda.Event,
        ended: torch.cuda.Event,
    ) -> None:
        self.copies = copies
        self._before, self._began, self._ended = before, began, ended

    def is_done(self) -> bool:
        try:
            return bool(self._ended.query())  # type: ignore[no-untyped-call]
        except RuntimeError:  # the device is lost: `wait` raises it
            return True

    def wait(self) -> None:
        self._ended.synchronize()

    @property
    def seconds(self) -> float:
        return float(self._began.elapsed_time(self._ended)) / 1000

    @property
    def idle_seconds(self) -> float:
        return 0.0 if self._before is None else float(self._before.elapsed_time(self._began)) / 1000


class CudaQueue:
    """A `DeviceQueue`."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # Apart from the stream of the batches, so that it need not wait for a batch that was
        # launched since.
        self._reads = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._began = _event()
        self._ended: torch.cuda.Event | None = None

    def begin(self) -> None:
        self._began = _event()
        self._began.record(torch.cuda.current_stream(self._device))

    def submit(self, tensors: Sequence[Tensor]) -> CudaSubmission:
        copies = tuple(
            torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True) for tensor in tensors
        )
        for copy, tensor in zip(copies, tensors, strict=True):
            copy.copy_(tensor, non_blocking=True)
        before, self._ended = self._ended, _event()
        self._ended.record(torch.cuda.current_stream(self._device))
        return CudaSubmission(copies, before, self._began, self._ended)

    def read(self, function: Callable[[], tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
        with torch.cuda.stream(self._reads):
            # `cpu` waits for this stream, so the results may be freed afterwards although another
            # stream has allocated them.
            return tuple(tensor.cpu() for tensor in function())


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


@cache
def cuda_queue(device: torch.device) -> CudaQueue:
    """Return the queue of this device, which all models on it share."""
    return CudaQueue(device)
