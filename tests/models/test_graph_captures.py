"""State after a capture on CUDA: torch's allocator and its pools, the stream and the generator of
random numbers.

`FakeCuda` replaces a GPU. Its pools are counted as in torch's `CUDACachingAllocator.cpp`, and
graphs end a capture in the order of `CUDAGraph.cpp`: torch 2.11's, in which a failed capture stays
active, and that of later versions (`is_fixed`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from weakref import ref

import numpy as np
import pytest
import torch
from torch import Tensor

from libs.models.interface.packed import Ids
from libs.models.runtime.graphs import cuda
from libs.models.runtime.graphs.cuda import CudaCapture
from libs.models.runtime.loaded.tiers import sharing

Pool = tuple[int, int]


class FakeStream:
    def __init__(self, cuda: FakeCuda) -> None:
        self.is_capturing = False
        self._cuda = cuda

    def wait_stream(self, other: object) -> None: ...

    def wait_event(self, event: object) -> None: ...

    def synchronize(self) -> None:
        if self.is_capturing:
            self._cuda.is_invalid = True
            raise RuntimeError("operation not permitted when stream is capturing")


class FakeEvent:
    def record(self, stream: object = None) -> None: ...

    def synchronize(self) -> None: ...


class FakeCUDAGraph:
    """A fake of torch.cuda.CUDAGraph."""

    def __init__(self, cuda: FakeCuda) -> None:
        self._cuda, self._pool = cuda, (0, 0)
        self._has_pool = self._is_ended = False
        self.replays = 0

    def capture_begin(self, pool: Pool, capture_error_mode: str) -> None:
        assert capture_error_mode == "thread_local"
        self._pool = pool
        self._cuda.begin_allocate(pool)
        self._has_pool = True
        self._cuda.stream.is_capturing, self._cuda.is_invalid, self._cuda.is_drawing = (
            True,
            False,
            True,
        )

    def capture_end(self) -> None:
        if not self._cuda.stream.is_capturing:
            raise RuntimeError("illegal state: the stream does not capture")
        self._cuda.stream.is_capturing = False
        is_invalid = self._cuda.is_invalid
        if self._cuda.is_fixed:
            self._cuda.end_allocate(0, self._pool)
        if is_invalid:
            raise RuntimeError("operation failed due to a previous error during capture")
        if not self._cuda.is_fixed:
            self._cuda.end_allocate(0, self._pool)
        self._cuda.is_drawing = False
        self._is_ended = True

    def replay(self) -> None:
        assert self._is_ended
        self.replays += 1

    def reset(self) -> None:
        if self._is_ended or (self._cuda.is_fixed and self._has_pool):
            self._cuda.release(0, self._pool)
        self._is_ended = self._has_pool = False


class FakeCuda:
    """A fake of CUDA's capture.

    Attributes:
        uses: Number of graphs of each pool.
        underway: Pools in which a capture allocates.
        is_drawing: Whether the generator serves a capture.
        cleared: An entry for each clearing of cuBLAS' workspaces: whether a capture was under way.
    """

    def __init__(self, *, is_fixed: bool) -> None:
        self.is_fixed = is_fixed
        self.stream = FakeStream(self)
        self.uses: dict[Pool, int] = {}
        self.underway: list[Pool] = []
        self.is_invalid = self.is_drawing = False
        self.free = 2 << 30
        self.emptied = 0
        self.cleared: list[bool] = []
        self._handles = 0

    def handle(self) -> Pool:
        self._handles += 1
        return (0, self._handles)

    def begin_allocate(self, pool: Pool) -> None:
        assert self.uses.get(pool, 1) > 0, "a pool that may be freed is used again"
        assert pool not in self.underway
        self.uses[pool] = self.uses.get(pool, 0) + 1
        self.underway.append(pool)

    def end_allocate(self, index: int, pool: Pool) -> None:
        if pool not in self.underway:
            raise RuntimeError("endAllocatePool: not currently recording to mempool_id")
        self.underway.remove(pool)

    def release(self, index: int, pool: Pool) -> None:
        self.uses[pool] -= 1
        assert self.uses[pool] >= 0, "released twice"

    def empty_cache(self) -> None:
        assert not self.underway, "captures_underway.empty() INTERNAL ASSERT FAILED"
        self.uses = {pool: count for pool, count in self.uses.items() if count}
        self.emptied += 1

    def reserved(self, device: object) -> int:
        return 1000 * len(self.uses)

    def restore(self, state: object) -> None:
        self.is_drawing = False

    @contextmanager
    def on(self, stream: object) -> Iterator[None]:
        yield


class FakeGenerator:
    def __init__(self, fake: FakeCuda) -> None:
        self._fake = fake

    def seed(self) -> int:
        return 0

    def graphsafe_get_state(self) -> object:
        return self

    def graphsafe_set_state(self, state: object) -> None:
        self._fake.restore(state)


@pytest.fixture(params=[False, True], ids=["2.11", "fixed"])
def gpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCuda]:
    fake = FakeCuda(is_fixed=request.param)
    stands: dict[str, Any] = {
        "CUDAGraph": partial(FakeCUDAGraph, fake),
        "Event": FakeEvent,
        "Stream": lambda device: fake.stream,
        "stream": fake.on,
        "current_stream": lambda device=None: fake.stream,
        "is_current_stream_capturing": lambda: fake.stream.is_capturing,
        "graph_pool_handle": fake.handle,
        "memory_reserved": fake.reserved,
        "mem_get_info": lambda device: (fake.free, 1 << 40),
        "empty_cache": fake.empty_cache,
        "default_generators": (FakeGenerator(fake),),
    }
    for name, stand in stands.items():
        monkeypatch.setattr(torch.cuda, name, stand)
    monkeypatch.setattr(torch, "Generator", lambda device: FakeGenerator(fake))
    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", fake.end_allocate, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_releasePool", fake.release, raising=False)
    monkeypatch.setattr(
        torch._C,
        "_cuda_clearCublasWorkspaces",
        lambda: fake.cleared.append(fake.stream.is_capturing),
        raising=False,
    )
    monkeypatch.setattr(cuda, "has_triton", lambda tensor: True)
    monkeypatch.setattr(cuda, "_pinned_like", torch.empty_like)
    cuda._streams.cache_clear()
    yield fake
    cuda._streams.cache_clear()


@pytest.fixture
def capture(gpu: FakeCuda) -> CudaCapture:
    return CudaCapture(torch.device("cpu", 0))


def inputs() -> Ids:
    return np.arange(4, dtype=np.int32)


def doubled(buffer: Tensor) -> Tensor:
    return buffer * 2


def of_graphs(gpu: FakeCuda) -> list[int]:
    return [count for count in gpu.uses.values() if count]


def waits(gpu: FakeCuda, buffer: Tensor) -> Tensor:
    """Waits for the device within the capture, which invalidates it."""
    gpu.stream.synchronize()
    return doubled(buffer)


def is_spoilt(gpu: FakeCuda, buffer: Tensor) -> Tensor:
    """Something else invalidates the capture, which shows when it ends."""
    gpu.is_invalid = gpu.stream.is_capturing
    return doubled(buffer)


def lacks_memory(gpu: FakeCuda, buffer: Tensor) -> Tensor:
    """Runs out of memory within the capture, which stays valid."""
    if gpu.stream.is_capturing:
        raise torch.OutOfMemoryError("CUDA out of memory")
    return doubled(buffer)


def test_graphs_of_a_capture_share_a_pool_and_leave_it_together(
    gpu: FakeCuda, capture: CudaCapture
) -> None:
    graphs = [capture.capture(doubled, inputs()) for _ in range(3)]
    assert of_graphs(gpu) == [3]
    assert [graph.bytes for graph in graphs if graph is not None] == [1000, 32, 32], (
        "buffer and output, if nothing more"
    )
    assert capture.bytes == 1064
    assert gpu.cleared == [False] * 6, "before and after each capture, never within it"
    capture.drop()
    assert (of_graphs(gpu), capture.bytes) == ([], 0)
    assert all(graph is not None and graph.buffer.numel() == 0 for graph in graphs), (
        "a graph still held keeps no memory"
    )
    gpu.empty_cache()
    assert capture.capture(doubled, inputs()) is not None, "in a new pool"
    assert of_graphs(gpu) == [1]


def test_graph_dropped_alone_leaves_the_pool_to_the_others(
    gpu: FakeCuda, capture: CudaCapture
) -> None:
    first, second = (capture.capture(doubled, inputs()) for _ in range(2))
    assert first is not None
    assert second is not None
    first.drop()
    first.drop()
    assert of_graphs(gpu) == [1]
    second.drop()
    assert capture.capture(doubled, inputs()) is not None, (
        "the first pool may have been freed, and is not used again"
    )
    assert len(gpu.uses) == 2


@pytest.mark.parametrize("forward", [waits, is_spoilt, lacks_memory])
@pytest.mark.parametrize("before", [0, 2])
def test_failed_capture_leaves_the_allocator_usable(
    gpu: FakeCuda, capture: CudaCapture, forward: Any, before: int
) -> None:
    earlier = [capture.capture(doubled, inputs()) for _ in range(before)]
    with pytest.raises(torch.OutOfMemoryError if forward is lacks_memory else RuntimeError):
        capture.capture(partial(forward, gpu), inputs())
    assert not gpu.stream.is_capturing
    assert gpu.underway == []
    assert of_graphs(gpu) == [], "released once, and so are the graphs before"
    assert not gpu.is_drawing
    assert all(graph is not None and graph.is_dropped for graph in earlier)
    gpu.empty_cache()
    assert (gpu.uses, capture.bytes) == ({}, 0)
    graph = capture.capture(doubled, inputs())
    assert graph is not None
    assert graph.replay(lambda array: None).tolist() == [0, 2, 4, 6]


def test_caches_are_freed_before_a_capture_that_may_need_the_memory(
    gpu: FakeCuda, capture: CudaCapture
) -> None:
    assert capture.capture(doubled, inputs()) is not None
    assert gpu.emptied == 0
    gpu.free = 1 << 20
    assert capture.capture(doubled, inputs()) is not None
    assert gpu.emptied == 1


def test_nothing_is_captured_during_a_load(gpu: FakeCuda, capture: CudaCapture) -> None:
    with sharing():
        assert capture.capture(doubled, inputs()) is None
    assert gpu.uses == {}
    assert capture.capture(doubled, inputs()) is not None


def test_inputs_and_answers_go_through_host_memory(gpu: FakeCuda, capture: CudaCapture) -> None:
    graph = capture.capture(doubled, inputs())
    assert graph is not None

    def fill(array: Ids) -> None:
        array[:] = 7

    output = graph.replay(fill)
    assert graph.buffer.tolist() == [7, 7, 7, 7]
    answers = []
    for number in range(2):
        output.fill_(number)
        answers.append(graph.start_copy())
    assert [answer.wait().tolist() for answer in answers] == [[0] * 4, [1] * 4], (
        "two may be pending"
    )


def test_without_triton_nothing_is_captured(
    gpu: FakeCuda, capture: CudaCapture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda, "has_triton", lambda tensor: False)
    with pytest.raises(RuntimeError, match="Triton"):
        capture.capture(doubled, inputs())
    assert gpu.uses == {}


def test_device_has_read_the_buffer_before_a_failed_warm_up_frees_it(
    gpu: FakeCuda, capture: CudaCapture, monkeypatch: pytest.MonkeyPatch
) -> None:
    buffers: list[ref[Tensor]] = []
    alive: list[bool] = []
    monkeypatch.setattr(gpu.stream, "synchronize", lambda: alive.append(buffers[-1]() is not None))

    def fail_second(buffer: Tensor) -> Tensor:
        buffers.append(ref(buffer))
        if len(buffers) == 2:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return doubled(buffer)

    with pytest.raises(torch.OutOfMemoryError):
        capture.capture(fail_second, inputs())
    assert alive == [True], "kernels of the first run may still be in progress"


def test_dropped_graph_is_not_replayed_nor_are_its_inputs_written(
    gpu: FakeCuda, capture: CudaCapture
) -> None:
    graph = capture.capture(doubled, inputs())
    assert graph is not None
    graph.drop()
    written: list[Ids] = []
    with pytest.raises(RuntimeError, match="the graph is dropped"):
        graph.replay(written.append)
    assert written == []
