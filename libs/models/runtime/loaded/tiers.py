"""Move a loaded model between device and host memory. Its tensors share one buffer on either side,
moved by one copy.

Weights of recurrent layers have separate buffers on the device. This is used after a model was
loaded on an accelerator, and whenever it becomes warm or resident again. The copy to the device is
asynchronous, on a separate stream; the first forward's stream waits for it, the host never does. On
a CPU nothing is moved.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache
from threading import Condition
from typing import Final, Generic, TypeVar

import torch
from torch import Tensor, nn

from libs.models.runtime.loaded.pinned import ALIGNMENT, HostBuffer

_Model = TypeVar("_Model")


def find_tensors(*roots: object) -> list[Tensor]:
    """Return all distinct tensors of modules: parameters, buffers, and attributes, also within
    tuples, lists and mappings.
    """
    found: dict[int, Tensor] = {}
    seen: set[int] = set()
    waiting = list(roots)
    while waiting:
        one = waiting.pop()
        if isinstance(one, Tensor):
            found[id(one)] = one
        elif id(one) not in seen and isinstance(one, nn.Module | Mapping | tuple | list):
            seen.add(id(one))
            waiting.extend(_parts(one))
    return list(found.values())


def _parts(
    one: nn.Module | Mapping[object, object] | tuple[object, ...] | list[object],
) -> Iterable[object]:
    if isinstance(one, nn.Module):
        return vars(one).values()
    return one.values() if isinstance(one, Mapping) else one


def _apart(*roots: object) -> set[int]:
    """Return the ids of recurrent layers' tensors: cuDNN needs each layer's in one contiguous,
    exclusive buffer.
    """
    modules = [module for root in roots if isinstance(root, nn.Module) for module in root.modules()]
    return {
        id(tensor)
        for module in modules
        if isinstance(module, nn.RNNBase)
        for tensor in module.parameters()
    }


@dataclass(frozen=True, slots=True)
class ParkedModel(Generic[_Model]):
    """A model in host memory."""

    model: _Model
    host_bytes: int
    arena: Arena | None
    """None if device and host memory are the same."""

    def resume(self) -> _Model:
        if self.arena is not None:
            self.arena.bring()
        return self.model


@dataclass(frozen=True, slots=True)
class _View:
    """A tensor and its location in a region: `begin` in bytes, the rest as in torch.as_strided."""

    tensor: Tensor
    region: int
    begin: int
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Region:
    """The memory of one torch storage: `bytes` of host and device memory from `begin` on. Its views
    keep their offsets.
    """

    begin: int
    bytes: int
    is_apart: bool


class Arena:
    """The tensors of `roots` (modules) on `device`: `stow` moves them to host memory, `bring` moves
    them back.

    Tensors that shared storage still share it. Callers of `stow` and `bring` need exclusive use of
    the model.
    """

    def __init__(self, roots: Iterable[object], device: torch.device) -> None:
        roots = tuple(roots)
        self._device = device
        self._views: list[_View] = []
        self._regions: list[_Region] = []
        # Mutable state. The tensors' memory is the device's, or that of `_host`.
        self._pieces: list[Tensor] | None = None  # of the device, one for each region
        self._host: HostBuffer | None = None
        self._arrived: torch.cuda.Event | None = None
        mine = [
            one
            for one in find_tensors(*roots)
            if one.device.type == device.type and one.layout is torch.strided
        ]
        self._lay_out(mine, _apart(*roots))

    @property
    def bytes(self) -> int:
        """Return the size of the tensors, equal on the device and in host memory."""
        return sum(_padded(region.bytes) for region in self._regions)

    @property
    def host_bytes(self) -> int:
        """Return the size of the copy in host memory; 0 without one."""
        return 0 if self._host is None else self.bytes

    def stow(self) -> None:
        """Move the tensors to host memory and free the device's. Copies nothing if the host has a
        copy: weights never change.
        """
        self._settle()
        if self._host is None:
            with copying(self._device):
                self._host = self._copied()
        self._bind([self._host.part(region.begin, region.bytes) for region in self._regions])
        self._pieces = None

    def bring(self) -> None:
        """Move the stowed tensors to the device, without waiting for the copy."""
        if self._host is None:
            raise RuntimeError("the tensors are not stowed")
        with copying(self._device):
            whole = sum(_padded(region.bytes) for region in self._regions if not region.is_apart)
            buffer = torch.empty(whole, dtype=torch.uint8, device=self._device)
            buffer.copy_(self._host.part(0, whole), non_blocking=True)
            self._pieces = [self._piece(region, buffer, self._host) for region in self._regions]
            if self._device.type == "cuda":
                self._arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
                self._arrived.record()
        self._bind(self._pieces)

    def wait(self) -> None:
        """Make the current stream wait for the copy to the device. Called before a forward."""
        if self._arrived is not None:
            torch.cuda.current_stream(self._device).wait_event(self._arrived)
            self._arrived = None

    def drop_host_copy(self) -> None:
        """Free the host copy of a resident model."""
        self._settle()
        self._host = None

    def _settle(self) -> None:
        if self._arrived is not None:
            self._arrived.synchronize()

    @staticmethod
    def _piece(region: _Region, buffer: Tensor, host: HostBuffer) -> Tensor:
        if not region.is_apart:
            return buffer[region.begin : region.begin + region.bytes]
        piece = torch.empty(region.bytes, dtype=torch.uint8, device=buffer.device)
        return piece.copy_(host.part(region.begin, region.bytes), non_blocking=True)

    def _lay_out(self, tensors: Iterable[Tensor], apart: set[int]) -> None:
        """Lay out one region for each storage, for the part that its tensors span. Regions with
        separate buffers are last.
        """
        by_storage: dict[int, list[Tensor]] = {}
        for tensor in tensors:
            by_storage.setdefault(tensor.untyped_storage().data_ptr(), []).append(tensor)
        ordered = sorted(by_storage.values(), key=lambda group: id(group[0]) in apart)
        begin = 0
        for group in ordered:
            spans = [_span(tensor) for tensor in group]
            first = min(start for start, _ in spans) // ALIGNMENT * ALIGNMENT
            size = max(end for _, end in spans) - first
            for tensor, (start, _) in zip(group, spans, strict=True):
                self._views.append(
                    _View(
                        tensor,
                        len(self._regions),
                        start - first,
                        tensor.dtype,
                        tuple(tensor.size()),
                        tensor.stride(),
                    )
                )
            self._regions.append(_Region(begin, size, is_apart=id(group[0]) in apart))
            begin += _padded(size)

    def _copied(self) -> HostBuffer:
        """Copy the tensors from the device to host memory."""
        host = HostBuffer(self.bytes, self._device)
        for number, region in enumerate(self._regions):
            view = next(view for view in self._views if view.region == number)
            start = _span(view.tensor)[0] - view.begin
            stored = _byte_view(view.tensor.untyped_storage(), start, region.bytes)
            host.part(region.begin, region.bytes).copy_(stored, non_blocking=True)
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()
        return host

    def _bind(self, pieces: list[Tensor]) -> None:
        """Point every tensor at the buffer of its region. The tensor objects stay, so references to
        them remain valid.
        """
        for view in self._views:
            piece = pieces[view.region]
            offset = (piece.storage_offset() + view.begin) // view.dtype.itemsize
            bound = torch.empty(0, dtype=view.dtype, device=piece.device)
            view.tensor.data = bound.set_(piece.untyped_storage(), offset, view.size, view.stride)


def _span(tensor: Tensor) -> tuple[int, int]:
    """Return the tensor's range of bytes within its storage, end exclusive."""
    start = int(tensor.storage_offset()) * tensor.itemsize
    if tensor.numel() == 0:
        return start, start
    last = sum(
        (size - 1) * stride
        for size, stride in zip(tuple(tensor.size()), tensor.stride(), strict=True)
    )
    return start, start + (last + 1) * tensor.itemsize


def _byte_view(storage: torch.UntypedStorage, start: int, size: int) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(
        storage, start, (size,), (1,)
    )


def _padded(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


@cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


@contextmanager
def copying(device: torch.device) -> Iterator[None]:
    """Use the stream for loads and copies, separate from the serving stream. Its memory is separate
    too, so filling it need not wait for the serving stream.
    """
    with sharing(), torch.cuda.stream(_stream(device)) if device.type == "cuda" else nullcontext():
        yield


class _Users:
    """The threads, other than the device thread, that allocate, copy or free device memory. Guarded
    by `changed`.
    """

    def __init__(self) -> None:
        self.changed = Condition()
        self.count = 0
        self.is_alone = False


_USERS: Final = _Users()


@contextmanager
def sharing() -> Iterator[None]:
    """Work on device memory during forwards, on any thread. Waits while the device thread captures
    a graph, which such work could spoil. Reentrant.
    """
    with _USERS.changed:
        _USERS.changed.wait_for(lambda: not _USERS.is_alone)
        _USERS.count += 1
    try:
        yield
    finally:
        with _USERS.changed:
            _USERS.count -= 1


@contextmanager
def alone() -> Iterator[bool]:
    """Keep such work from starting; yields False if some is in progress. Never waits."""
    with _USERS.changed:
        is_alone = _USERS.count == 0 and not _USERS.is_alone
        _USERS.is_alone |= is_alone
    try:
        yield is_alone
    finally:
        if is_alone:
            with _USERS.changed:
                _USERS.is_alone = False
                _USERS.changed.notify_all()
