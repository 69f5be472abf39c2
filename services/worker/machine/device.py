"""The device that a worker owns: its choice, its memory, and how models are loaded onto it."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal, Protocol

import torch

from libs import memory
from libs.catalog.overrides import Catalog
from libs.errors import InvalidInput
from libs.kernels import native
from libs.kernels.linear import int8
from libs.models import Model, load_served_model
from libs.models.graphs.cuda import CudaCapture
from libs.models.graphs.graphs import Graphs, Owner
from libs.models.loaded.tiers import sharing
from libs.models.text.registry import default_dtype
from services.worker.settings import Settings

log = logging.getLogger(__name__)

_CPU_BATCH_TOKENS = 2048
_ACCELERATOR_BATCH_TOKENS = 16384
_CPU_SHARE = 0.6
"""Of the host's memory, for models. The rest is for everything else that runs there."""

_ACCELERATOR_RESERVE = 1 << 30
_ACCELERATOR_SHARE = 0.93
"""Of the memory beyond the reserve. The rest is for the driver's context, kernels' own memory, and
allocator fragmentation.
"""

_HOST_SHARE = 0.5
"""Of the host's memory, for warm models beside an accelerator."""

_MAX_KERNELS = 256
"""Characters of a heartbeat's `kernels` that a router takes."""

_CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")


class Load(Protocol):
    def __call__(self, directory: Path, model: str, base: Path | None = None, /) -> Model:
        """Reads a model from its directory; `base`: of an adapter, that of the model it is merged
        into. Raises ShoalError.
        """


def _nothing() -> None:
    return


@dataclass(frozen=True, slots=True)
class Device:
    """The interface of the device to the rest of the worker.

    `memory_bytes`: device memory for models, activations included. `host_bytes`: host memory for
    warm models. `shares_memory`: both are the same. `item_bytes`: size of a weight. `has_int8`:
    whether models may be in int8; else those have the device's own type. `load`: must run on a
    thread of its own. `recover`: called after a failed forward pass; raises if the device is lost.
    `trim`: returns freed memory to the system. `enter`: called first on the device thread.
    `kernels`: the native kernels that a CPU uses, or "none: " and why. `graphs`: makes the graphs
    of one model; None: forwards are not captured. `batches_in_flight`: how many batches may be
    launched and not collected; 1: each is launched once the answers of the last one are on the
    host.
    """

    name: str
    memory_bytes: int
    batch_tokens: int
    item_bytes: int
    load: Load
    recover: Callable[[], None] = _nothing
    trim: Callable[[], None] = _nothing
    enter: Callable[[], None] = _nothing
    host_bytes: int = 0
    shares_memory: bool = True
    has_int8: bool = False
    batches_in_flight: Literal[1, 2] = 1
    kernels: str = ""
    graphs: Callable[[Owner], Graphs] | None = None


def open_device(settings: Settings) -> Device:
    """Raises InvalidInput if the device asked for is not there, or does not compute in the number
    format asked for.
    """
    has_cuda = torch.cuda.is_available()
    if settings.device == "cuda" and not has_cuda:
        raise InvalidInput(
            "SHOAL_DEVICE is cuda, but torch finds no such device", field="SHOAL_DEVICE"
        )
    device = torch.device("cuda" if has_cuda and settings.device != "cpu" else "cpu")
    dtype = default_dtype(device) if settings.dtype == "auto" else _DTYPES[settings.dtype]
    if dtype is torch.int8:
        missing = int8.missing() if device.type == "cpu" else "int8 is for CPUs"
        if missing:
            raise InvalidInput(f"SHOAL_DTYPE is int8, but {missing}", field="SHOAL_DTYPE")
    return (
        _accelerator(settings, device, dtype)
        if device.type == "cuda"
        else _cpu(settings, device, dtype)
    )


_DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32, "int8": torch.int8}


def use_threads(count: int) -> None:
    """Sets the number of torch's threads for the calling thread, whatever other threads set for
    themselves later.

    Besides the calling thread's own number torch sets one for all threads that have not computed
    yet. A thread that has set its own still takes that one with its first operation, so this must
    be followed by one: reading the number is enough.
    """
    torch.set_num_threads(count)
    torch.get_num_threads()


def _load(device: torch.device, dtype: torch.dtype, catalog: Catalog, memory_bytes: int) -> Load:
    def load(directory: Path, model: str, base: Path | None = None, /) -> Model:
        """Runs on a thread of its own, for which it limits torch to one thread, so that loads do
        not slow down serving.
        """
        use_threads(1)
        return load_served_model(
            directory, model, device, dtype, catalog.of(model), base, memory_bytes
        )

    return load


def _cpu(settings: Settings, device: torch.device, dtype: torch.dtype) -> Device:
    memory_bytes = settings.memory_bytes or int(_host_bytes() * _CPU_SHARE)
    return Device(
        name="cpu",
        kernels=native.name()[:_MAX_KERNELS],
        memory_bytes=memory_bytes,
        host_bytes=settings.host_bytes or 0,
        batch_tokens=settings.batch_tokens or _CPU_BATCH_TOKENS,
        item_bytes=dtype.itemsize,
        load=_load(device, dtype, settings.catalog, memory_bytes),
        trim=memory.trim,
        has_int8=not int8.missing(),
        enter=partial(use_threads, settings.threads),
    )


def _accelerator(settings: Settings, device: torch.device, dtype: torch.dtype) -> Device:
    # By default cuDNN computes convolutions and LSTMs of float32 models with the 10 bits of
    # TensorFloat-32.
    torch.backends.cudnn.allow_tf32 = False
    total = torch.cuda.get_device_properties(device).total_memory
    if settings.memory_bytes:
        # Beside other processes on the device the budget is a promise: torch must free its caches
        # rather than grow beyond it.
        torch.cuda.set_per_process_memory_fraction(
            min(1.0, settings.memory_bytes / _ACCELERATOR_SHARE / total), device
        )
    memory_bytes = settings.memory_bytes or int((total - _ACCELERATOR_RESERVE) * _ACCELERATOR_SHARE)
    return Device(
        name=torch.cuda.get_device_name(device),
        memory_bytes=memory_bytes,
        host_bytes=int(_host_bytes() * _HOST_SHARE)
        if settings.host_bytes is None
        else settings.host_bytes,
        shares_memory=False,
        batch_tokens=settings.batch_tokens or _ACCELERATOR_BATCH_TOKENS,
        item_bytes=dtype.itemsize,
        load=_load(device, dtype, settings.catalog, memory_bytes),
        batches_in_flight=2 if settings.cuda_in_flight == 2 else 1,
        recover=_recover_accelerator,
        trim=_trim_accelerator,
        graphs=partial(_graphs, device, settings.cuda_graphs) if settings.cuda_graphs else None,
    )


def _graphs(device: torch.device, most: int, owner: Owner) -> Graphs:
    """The graphs of one model, in one memory pool."""
    return Graphs(CudaCapture(device), owner, most=most)


def _recover_accelerator() -> None:
    """After running out of memory, frees the caches. After an error that corrupts the CUDA context,
    synchronize raises it again.
    """
    with sharing():  # a synchronisation beside a capture would raise, and end the capture
        torch.cuda.synchronize()
        _free_caches()


def _trim_accelerator() -> None:
    with sharing():
        _free_caches()
    memory.trim()


def _free_caches() -> None:
    """Returns torch's unused memory to the device. A failure is logged: the allocator has lost
    count, but the device is not lost, which only `synchronize` can say."""
    try:
        torch.cuda.empty_cache()
    except RuntimeError:
        log.exception(
            "torch could not return unused memory to the device: forward passes go on with the memory that is free"
        )


def _host_bytes() -> int:
    """Memory of this machine, or of this container if that is less."""
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        limit = _CGROUP_LIMIT.read_text().strip()
    except OSError:
        return physical
    return min(physical, int(limit)) if limit.isdigit() else physical
