"""Host memory that the driver page-locks, or refuses to."""

from __future__ import annotations

import ctypes
import gc
import logging
import subprocess
from collections.abc import Iterator

import pytest
import torch

from libs.models.runtime.loaded import pinned
from libs.models.runtime.loaded.pinned import ALIGNMENT, PAGE_BYTES, HostBuffer

CUDA = torch.device("cuda")
NOT_PERMITTED = 800  # cudaErrorNotPermitted
ALREADY_REGISTERED = 712  # cudaErrorHostMemoryAlreadyRegistered

LIBRARY = """
static int last;
void fail(int error) { last = error; }
int cudaGetLastError(void) { int error = last; last = 0; return error; }
int cudaPeekAtLastError(void) { return last; }
"""


class FakeRuntime:
    """`torch.cuda.cudart()`: registers memory, or fails with `status` and leaves that pending, as
    CUDA does. No page is registered twice.
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        self.library = library
        self.status = 0
        self.registered: dict[int, int] = {}

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        pages = _pages(address, size)
        taken = any(pages & _pages(*other) for other in self.registered.items())
        status = ALREADY_REGISTERED if taken else self.status
        if status:
            self.library.fail(status)
        else:
            self.registered[address] = size
        return status

    def cudaHostUnregister(self, address: int) -> int:
        del self.registered[address]
        return 0


def _pages(address: int, size: int) -> set[int]:
    return set(range(address // PAGE_BYTES, -(-(address + size) // PAGE_BYTES)))


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """A runtime of the version 99, loaded into this process as torch loads its own."""
    folder = tmp_path_factory.mktemp("runtime")
    (folder / "runtime.c").write_text(LIBRARY)
    built = folder / "libcudart.so.99"
    command = [
        "gcc",
        "-shared",
        "-fPIC",
        f"-Wl,-soname,{built.name}",
        "-o",
        str(built),
        str(folder / "runtime.c"),
    ]
    subprocess.run(command, check=True)
    return ctypes.CDLL(str(built))


@pytest.fixture
def runtime(library: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeRuntime]:
    made = FakeRuntime(library)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: made)
    monkeypatch.setattr(torch.version, "cuda", "99.1")
    pinned._runtime_library.cache_clear()
    pinned._warn_once.cache_clear()
    yield made
    library.cudaGetLastError()
    pinned._runtime_library.cache_clear()
    pinned._warn_once.cache_clear()


def test_memory_is_locked_while_it_is_held(runtime: FakeRuntime) -> None:
    memory = HostBuffer(1000, CUDA)
    address = memory.part(0, 1000).data_ptr()
    assert address % ALIGNMENT == 0
    assert memory.is_pinned
    assert runtime.registered == {address: PAGE_BYTES}
    del memory
    gc.collect()
    assert runtime.registered == {}


def test_small_models_share_no_page(runtime: FakeRuntime) -> None:
    """Allocations of the heap lie next to each other."""
    memories = [HostBuffer(size, CUDA) for size in (1000, 5000, PAGE_BYTES, 700) * 8]
    assert all(memory.is_pinned for memory in memories)
    assert all(address % ALIGNMENT == 0 for address in runtime.registered)


def test_memory_that_cannot_be_locked_is_used_as_it_is_and_leaves_no_error(
    runtime: FakeRuntime, caplog: pytest.LogCaptureFixture
) -> None:
    runtime.status = NOT_PERMITTED
    with caplog.at_level(logging.WARNING):
        memories = [HostBuffer(1000, CUDA) for _ in range(3)]
    assert not any(memory.is_pinned for memory in memories)
    memories[0].part(10, 5).fill_(7)
    assert memories[0].part(8, 8).tolist()[2:7] == [7] * 5
    assert runtime.library.cudaPeekAtLastError() == 0, "the next kernel launch would raise it"
    assert [record.getMessage().partition(":")[0] for record in caplog.records] == [
        "host memory could not be page-locked (cudaHostRegister returned 800)"
    ]


def test_without_a_runtime_by_that_name_a_launch_clears_the_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    launches: list[torch.device] = []

    def launch(size: int, device: torch.device) -> torch.Tensor:
        launches.append(device)
        raise RuntimeError("CUDA error: operation not permitted")

    monkeypatch.setattr(torch.version, "cuda", "98.0")
    monkeypatch.setattr(torch, "empty", launch)
    pinned._runtime_library.cache_clear()
    try:
        pinned.clear_error(CUDA)
    finally:
        pinned._runtime_library.cache_clear()
    assert launches == [CUDA]


def test_memory_for_a_cpu_is_not_locked(runtime: FakeRuntime) -> None:
    assert not HostBuffer(1000, torch.device("cpu")).is_pinned
    assert not HostBuffer(0, CUDA).is_pinned, "the driver refuses to lock nothing"
    assert runtime.registered == {}
