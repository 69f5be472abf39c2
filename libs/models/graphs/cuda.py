"""Records forwards as CUDA graphs. Nothing is decided here.

Each graph has a private memory pool, so that dropping it frees its memory and what it takes can be measured. Capture and replay
belong to the device thread.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from libs.kernels.triton_here import has_triton
from libs.models.graphs.capture import Forward
from libs.models.loaded.tiers import alone
from libs.models.packed import Ids

_WARM_UPS: Final = 2
"""Kernels are compiled and libraries take their workspaces in the first run, neither of which may happen within a capture."""


class CudaGraph:
    """A `Captured`. Inputs come from pinned host memory, on a stream of their own, ordered by events."""

    def __init__(self, graph: torch.cuda.CUDAGraph, buffer: Tensor, output: Tensor, copies: torch.cuda.Stream, size: int) -> None:
        self.buffer, self.bytes = buffer, size
        self._graph, self._output, self._copies = graph, output, copies
        self._pinned = torch.empty(buffer.shape, dtype=buffer.dtype, pin_memory=True)
        self._copied, self._ran = (torch.cuda.Event() for _ in range(2))  # type: ignore[no-untyped-call]

    def replay(self, inputs: Ids) -> Tensor:
        computing = torch.cuda.current_stream(self.buffer.device)
        self._copied.synchronize()  # the last copy has read the pinned memory
        self._pinned.copy_(torch.from_numpy(inputs))
        self._copies.wait_event(self._ran)  # the last replay has read the buffer
        with torch.cuda.stream(self._copies):
            self.buffer.copy_(self._pinned, non_blocking=True)
            self._copied.record()
        computing.wait_event(self._copied)
        self._graph.replay()
        self._ran.record(computing)
        return self._output


class CudaCapture:
    """A `Capture` of one CUDA device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._captures, self._copies = (torch.cuda.Stream(device) for _ in range(2))  # type: ignore[no-untyped-call]

    def capture(self, forward: Forward, inputs: Ids) -> CudaGraph | None:
        with alone() as is_alone:
            return self._captured(forward, inputs) if is_alone else None

    def _captured(self, forward: Forward, inputs: Ids) -> CudaGraph:
        buffer = torch.from_numpy(inputs).to(self._device)
        if not has_triton(buffer):
            raise RuntimeError("without Triton, attention launches one kernel for each run of equal lengths")
        before = torch.cuda.memory_reserved(self._device)
        graph = torch.cuda.CUDAGraph()
        self._captures.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._captures):
            for _ in range(_WARM_UPS):
                forward(buffer)
            self._captures.synchronize()
            # Of this thread alone: others may call what would end a capture, such as the preparation of pinned memory.
            graph.capture_begin(capture_error_mode="thread_local")
            try:
                output = forward(buffer)
            finally:
                graph.capture_end()
        torch.cuda.current_stream(self._device).wait_stream(self._captures)
        taken = torch.cuda.memory_reserved(self._device) - before
        return CudaGraph(graph, buffer, output, self._copies, max(taken, buffer.nbytes + output.nbytes))
