"""Records forwards as CUDA graphs. Nothing is decided here.

The graphs of one model share a memory pool (`CudaCapture`): they run one after the other, so what
one needs for its activations serves all. Capture and replay belong to the device thread.

A capture that fails must not leave torch's allocator in the state of a capture, because
`empty_cache` would fail from then on: torch 2.11 ends the allocation to the pool only after
`cudaStreamEndCapture` has succeeded (`CUDAGraph::capture_end`, fixed by pytorch pull request
180395). `CudaCapture._abandon` does the rest.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from typing import TYPE_CHECKING, Final
from weakref import WeakSet

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from libs.kernels.triton_here import has_triton
from libs.models.interface.packed import Ids
from libs.models.runtime.graphs.capture import Fill, Forward
from libs.models.runtime.loaded.tiers import alone

if TYPE_CHECKING:
    from torch.cuda import _POOL_HANDLE

_WARM_UPS: Final = 2
"""Kernels are compiled and libraries allocate their workspaces in the first run. Neither may happen
within a capture.
"""

_AMPLE_BYTES: Final = 1 << 30
"""Free device memory with which a capture certainly needs no `cudaFree`, which could invalidate
it.
"""


class CudaCopy:
    """A `PendingCopy`."""

    def __init__(self, answer: Tensor, copied: torch.cuda.Event) -> None:
        self._answer, self._copied = answer, copied

    def wait(self) -> NDArray[np.generic]:
        self._copied.synchronize()
        return self._answer.numpy().copy()


class CudaGraph:
    """A `Captured`. Inputs are copied from page-locked memory on a separate stream, ordered by
    events.
    """

    def __init__(
        self,
        graph: torch.cuda.CUDAGraph,
        buffer: Tensor,
        output: Tensor,
        copies: torch.cuda.Stream,
        size: int,
    ) -> None:
        self.buffer, self.bytes, self.is_dropped = buffer, size, False
        self._graph: torch.cuda.CUDAGraph | None = graph
        self._output, self._copies = output, copies
        self._pinned = _pinned_like(buffer)
        self._inputs: Ids = self._pinned.numpy()
        self._copied, self._ran = (torch.cuda.Event() for _ in range(2))  # type: ignore[no-untyped-call]
        # Page-locked buffers for outputs, each with the event of its last copy; the one to write
        # next is first.
        self._answers: list[tuple[Tensor, torch.cuda.Event]] = []

    def replay(self, fill: Fill) -> Tensor:
        if self._graph is None:
            raise RuntimeError("the graph is dropped")
        computing = torch.cuda.current_stream(self.buffer.device)
        self._copied.synchronize()  # the last copy has read the page-locked memory
        fill(self._inputs)
        if not self._answers:
            # The head is not in the graph: its kernels, launched behind the last replay, may still
            # have to read the buffer.
            self._ran.record(computing)
        self._copies.wait_event(self._ran)  # the last replay has read the buffer
        with torch.cuda.stream(self._copies):
            self.buffer.copy_(self._pinned, non_blocking=True)
            self._copied.record()
        computing.wait_event(self._copied)
        self._graph.replay()
        self._ran.record(computing)
        return self._output

    def start_copy(self) -> CudaCopy:
        if not self._answers:
            # The check after the capture makes the first copy, so no request waits for the buffers.
            self._answers = [(_pinned_like(self._output), torch.cuda.Event()) for _ in range(2)]  # type: ignore[no-untyped-call]
        answer, copied = self._answers[0]
        self._answers.reverse()
        answer.copy_(self._output, non_blocking=True)
        copied.record(torch.cuda.current_stream(self._output.device))
        return CudaCopy(answer, copied)

    def drop(self) -> None:
        if self._graph is not None:
            self.is_dropped = True
            with suppress(RuntimeError):  # the device is lost; its next use raises
                # another batch may have been launched since it was replayed
                self._ran.synchronize()
            self._graph.reset()
            # A graph that a caller still holds must not keep the pool's memory, nor torch's for
            # random numbers in graphs.
            self._graph = None
            self.buffer = self._output = torch.empty(0, dtype=torch.int32)


def _pinned_like(tensor: Tensor) -> Tensor:
    """Return page-locked host memory for a copy."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)


@cache
def _streams(device: torch.device) -> tuple[torch.cuda.Stream, torch.cuda.Stream]:
    """Return the streams of captures and of copies to graphs' buffers, which all models share: one
    after the other uses them.
    """
    return torch.cuda.Stream(device), torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


@contextmanager
def _private_workspaces() -> Iterator[None]:
    """Let cuBLAS allocate its workspaces within the capture, so that they are in the graphs' pool.

    torch keeps one for each stream. One from before the capture may be freed while graphs use it,
    and one from within it would keep the pool's memory when the graphs are gone, so they are
    forgotten at the beginning and at the end (as `torch._inductor` does).
    """
    torch._C._cuda_clearCublasWorkspaces()
    try:
        yield
    finally:
        torch._C._cuda_clearCublasWorkspaces()


class CudaCapture:
    """A `Capture` of one CUDA device: the graphs of one model, or of one step of decoding, and
    their memory pool.
    """

    def __init__(self, device: torch.device) -> None:
        index = device.index
        self._device = torch.device(
            device.type, torch.cuda.current_device() if index is None else index
        )
        self._captures, self._copies = _streams(self._device)
        # Mutable state. torch frees a pool once its last graph is reset, after which its handle
        # must not be used again.
        self._pool: _POOL_HANDLE | None = None
        self._graphs: WeakSet[CudaGraph] = WeakSet()
        self.bytes = 0

    def capture(self, forward: Forward, inputs: Ids) -> CudaGraph | None:
        with alone() as is_alone:
            return self._captured(forward, inputs) if is_alone else None

    def drop(self) -> None:
        for graph in list(self._graphs):
            graph.drop()
        self._graphs.clear()
        self.bytes = 0

    def _captured(self, forward: Forward, inputs: Ids) -> CudaGraph:
        buffer = torch.from_numpy(inputs).to(self._device)
        if not has_triton(buffer):
            raise RuntimeError(
                "without Triton, attention launches one kernel for each run of equal lengths"
            )
        if torch.cuda.mem_get_info(self._device)[0] < _AMPLE_BYTES:
            torch.cuda.empty_cache()
        before = torch.cuda.memory_reserved(self._device)
        computing = torch.cuda.current_stream(self._device)
        self._captures.wait_stream(computing)
        try:
            with torch.cuda.stream(self._captures):
                try:
                    for _ in range(_WARM_UPS):
                        forward(buffer)
                finally:  # kernels of a failed run may still use the buffer, freed on return
                    self._captures.synchronize()
                with _private_workspaces():
                    graph, output = self._record(forward, buffer)
        except BaseException:
            self.drop()
            raise
        computing.wait_stream(self._captures)
        size = max(torch.cuda.memory_reserved(self._device) - before, buffer.nbytes + output.nbytes)
        captured = CudaGraph(graph, buffer, output, self._copies, size)
        self._graphs.add(captured)
        self.bytes += size
        return captured

    def _record(self, forward: Forward, buffer: Tensor) -> tuple[torch.cuda.CUDAGraph, Tensor]:
        """Record on the current stream, into the pool of the graphs before, or a new one if there
        are none.
        """
        graph = torch.cuda.CUDAGraph()
        if self._pool is None or all(one.is_dropped for one in self._graphs):
            self.bytes, self._pool = 0, torch.cuda.graph_pool_handle()
        pool = self._pool
        try:
            # Of this thread alone: other threads may call what would end a capture, such as the
            # allocation of page-locked memory.
            graph.capture_begin(pool=pool, capture_error_mode="thread_local")
            output = forward(buffer)
            graph.capture_end()
        except BaseException:
            self._abandon(graph, pool)
            raise
        return graph, output

    def _abandon(self, graph: torch.cuda.CUDAGraph, pool: _POOL_HANDLE) -> None:
        """Bring the stream, torch's allocator and its random numbers back to their state before a
        capture that failed.

        1. The stream still captures if `forward` raised: the capture is ended, and torch does all
           the rest unless that fails, too.
        2. The graph is reset, which releases the pool if torch ended the allocation to it. In that
           case it must not be released
           again, because `empty_cache` checks that the count is 0, and the following step raises at
           once.
        3. Otherwise the allocation is ended and the pool is released here.
        4. If the capture could not be ended, the generator of random numbers still refuses to be
           used outside of a capture: it gets
           another state.
        """
        index, is_ended = self._device.index, False
        with suppress(Exception):
            if torch.cuda.is_current_stream_capturing():
                graph.capture_end()
                is_ended = True
        with suppress(Exception):
            graph.reset()
        with suppress(Exception):
            torch._C._cuda_endAllocateToPool(index, pool)
            torch._C._cuda_releasePool(index, pool)
        with suppress(Exception):
            if not is_ended:
                fresh = torch.Generator(self._device)
                fresh.seed()
                torch.cuda.default_generators[index].graphsafe_set_state(
                    fresh.graphsafe_get_state()
                )
