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
from libs.models.runtime.graphs.cuda import CudaCapture
from libs.models.runtime.graphs.graphs import Graphs, Owner
from libs.models.runtime.loaded.tiers import sharing
from libs.models.text.registry import default_dtype
from services.worker.settings import Settings

log = logging.getLogger(__name__)

_CPU_BATCH_TOKENS = 2048
_ACCELERATOR_BATCH_TOKENS = 16384
_CPU_SHARE = 0.6
"""Share of the host's memory for models. The rest is for other processes."""

_ACCELERATOR_RESERVE = 1 << 30
_ACCELERATOR_SHARE = 0.93
"""Share of the memory beyond the reserve. The rest is for the driver's context, kernels' memory,
and allocator fragmentation.
"""

_HOST_SHARE = 0.5
"""Share of the host's memory for warm models with an accelerator."""

_MAX_KERNELS = 256
"""Maximum characters of a heartbeat's `kernels` that a router accepts."""

_CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")


class Load(Protocol):
    def __call__(self, directory: Path, model: str, base: Path | None = None, /) -> Model:
        """Read a model from its directory. For a merged adapter, `base` is the directory of its
        base model. Raises ShoalError.
        """


def _nothing() -> None:
    return


@dataclass(frozen=True, slots=True)
class Device:
    """The interface of the device to the rest of the worker."""

    name: str
    memory_bytes: int
    """Device memory for models, including activations."""
    batch_tokens: int
    item_bytes: int
    """Size of a weight."""
    load: Load
    """Must run on a separate thread."""
    recover: Callable[[], None] = _nothing
    """Called after a failed forward pass. Raises if the device is lost."""
    trim: Callable[[], None] = _nothing
    """Returns freed memory to the system."""
    enter: Callable[[], None] = _nothing
    """Called first on the device thread."""
    host_bytes: int = 0
    """Host memory for warm models."""
    shares_memory: bool = True
    """Whether device memory is host memory."""
    has_int8: bool = False
    """Whether models may be in int8. If not, they use the device's type."""
    batches_in_flight: Literal[1, 2] = 1
    """Maximum batches that are launched and not collected. With 1, each is launched once the
    answers of the last one are on the host.
    """
    kernels: str = ""
    """The native kernels that a CPU uses, or "none: " and the reason."""
    graphs: Callable[[Owner], Graphs] | None = None
    """Makes the graphs of one model. None disables capturing."""


def open_device(settings: Settings) -> Device:
    """Open the configured device. Raises InvalidInput if it does not exist or lacks the number
    format.
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
    """Set torch's number of threads for the calling thread, independently of later calls in other
    threads.

    torch also sets one number for all threads that have not computed yet. A thread that has set its
    own number still adopts that one at its first operation, so this does one: reading the number is
    enough.
    """
    torch.set_num_threads(count)
    torch.get_num_threads()


def _load(device: torch.device, dtype: torch.dtype, catalog: Catalog, memory_bytes: int) -> Load:
    def load(directory: Path, model: str, base: Path | None = None, /) -> Model:
        """Load with a single torch thread, so that loads do not slow down serving."""
        use_threads(1)
        return load_served_model(
            directory, model, device, dtype, catalog.overrides(model), base, memory_bytes
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
        # With other processes on the device the budget is a promise: torch must free its caches
        # rather than exceed it.
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
    """Make the graphs of one model, in one memory pool."""
    return Graphs(CudaCapture(device), owner, most=most)


def _recover_accelerator() -> None:
    """Free the caches. If the CUDA context is corrupt, `synchronize` raises the error again."""
    with sharing():  # synchronising during a capture would raise and end it
        torch.cuda.synchronize()
        _free_caches()


def _trim_accelerator() -> None:
    with sharing():
        _free_caches()
    memory.trim()


def _free_caches() -> None:
    """Return torch's unused memory to the device.

    A failure is only logged: it means that the allocator's accounting is off. Only `synchronize`
    shows whether the device is lost.
    """
    try:
        torch.cuda.empty_cache()
    except RuntimeError:
        log.exception(
            "torch failed to return unused memory to the device; continuing with the free memory"
        )


def _host_bytes() -> int:
    """Return the memory of this machine, or of this container if that is less."""
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        limit = _CGROUP_LIMIT.read_text().strip()
    except OSError:
        return physical
    return min(physical, int(limit)) if limit.isdigit() else physical
