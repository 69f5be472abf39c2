"""Moves a loaded model between device and host memory: all its tensors in one piece of memory on either side, moved by one copy.

After a model was loaded on an accelerator, and whenever it is made warm or resident again. The copy to the device is asynchronous,
on a stream of its own; the first forward's stream waits for it, the host never does. On a CPU there is nothing to move.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Final, Generic, TypeVar

import torch
from torch import Tensor, nn

_Model = TypeVar("_Model")

_ALIGNMENT: Final = 256  # bytes; what kernels and copies at most want


def tensors_of(*roots: object) -> list[Tensor]:
    """Each tensor once that modules hold: parameters, buffers, and those in attributes, also within tuples, lists and mappings."""
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


def _parts(one: nn.Module | Mapping[object, object] | tuple[object, ...] | list[object]) -> Iterable[object]:
    if isinstance(one, nn.Module):
        return vars(one).values()
    return one.values() if isinstance(one, Mapping) else one


def _apart(*roots: object) -> set[int]:
    """Tensors of recurrent layers, by id: cuDNN wants each layer's in one piece of memory that holds nothing else."""
    modules = [module for root in roots if isinstance(root, nn.Module) for module in root.modules()]
    return {id(tensor) for module in modules if isinstance(module, nn.RNNBase) for tensor in module.parameters()}


@dataclass(frozen=True, slots=True)
class ParkedModel(Generic[_Model]):
    """A model in host memory."""

    model: _Model
    host_bytes: int
    arena: Arena | None
    """None: device and host memory are the same."""

    def resume(self) -> _Model:
        if self.arena is not None:
            self.arena.bring()
        return self.model


@dataclass(frozen=True, slots=True)
class _View:
    """A tensor, and where its numbers lie in a region: `begin` in bytes, the rest as in torch.as_strided."""

    tensor: Tensor
    region: int
    begin: int
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Region:
    """What one storage gave: `bytes` of host and device memory from `begin` on. Views of it keep their places in it."""

    begin: int
    bytes: int
    is_apart: bool


class Arena:
    """The tensors of `device` that `roots` (modules) hold: `stow` takes them to host memory, `bring` back.

    Tensors that share memory still do. Only who is alone with the model may call `stow` and `bring`.
    """

    def __init__(self, roots: Iterable[object], device: torch.device) -> None:
        roots = tuple(roots)
        self._device = device
        self._views: list[_View] = []
        self._regions: list[_Region] = []
        # Mutable state. The tensors' memory is the device's, or that of `_host`.
        self._pieces: list[Tensor] | None = None  # of the device, one for each region
        self._host: _HostMemory | None = None
        self._arrived: torch.cuda.Event | None = None
        mine = [one for one in tensors_of(*roots) if one.device.type == device.type and one.layout is torch.strided]
        self._lay_out(mine, _apart(*roots))

    @property
    def bytes(self) -> int:
        """Of either side."""
        return sum(_padded(region.bytes) for region in self._regions)

    @property
    def host_bytes(self) -> int:
        """Of the copy in host memory; 0: there is none."""
        return 0 if self._host is None else self.bytes

    def stow(self) -> None:
        """To host memory; the device's is free then. Without a copy if the host has one already: weights never change."""
        self._settle()
        if self._host is None:
            with copying(self._device):
                self._host = self._copied()
        self._bind([self._host.part(region.begin, region.bytes) for region in self._regions])
        self._pieces = None

    def bring(self) -> None:
        """To the device, of what was stowed. Does not wait for the copy."""
        if self._host is None:
            raise RuntimeError("nothing was stowed")
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
        """Before a forward: the current stream waits for the copy."""
        if self._arrived is not None:
            torch.cuda.current_stream(self._device).wait_event(self._arrived)
            self._arrived = None

    def drop_host_copy(self) -> None:
        """Of a model on the device."""
        self._settle()
        self._host = None

    def _settle(self) -> None:
        if self._arrived is not None:
            self._arrived.synchronize()

    @staticmethod
    def _piece(region: _Region, buffer: Tensor, host: _HostMemory) -> Tensor:
        if not region.is_apart:
            return buffer[region.begin : region.begin + region.bytes]
        piece = torch.empty(region.bytes, dtype=torch.uint8, device=buffer.device)
        return piece.copy_(host.part(region.begin, region.bytes), non_blocking=True)

    def _lay_out(self, tensors: Iterable[Tensor], apart: set[int]) -> None:
        """One region for each storage: the part of it that its tensors span. Those apart come last."""
        by_storage: dict[int, list[Tensor]] = {}
        for tensor in tensors:
            by_storage.setdefault(tensor.untyped_storage().data_ptr(), []).append(tensor)
        ordered = sorted(by_storage.values(), key=lambda group: id(group[0]) in apart)
        begin = 0
        for group in ordered:
            spans = [_span(tensor) for tensor in group]
            first = min(start for start, _ in spans) // _ALIGNMENT * _ALIGNMENT
            size = max(end for _, end in spans) - first
            for tensor, (start, _) in zip(group, spans, strict=True):
                self._views.append(
                    _View(tensor, len(self._regions), start - first, tensor.dtype, tuple(tensor.size()), tensor.stride())
                )
            self._regions.append(_Region(begin, size, is_apart=id(group[0]) in apart))
            begin += _padded(size)

    def _copied(self) -> _HostMemory:
        """What lies on the device, in host memory."""
        host = _HostMemory(self.bytes, self._device)
        for number, region in enumerate(self._regions):
            view = next(view for view in self._views if view.region == number)
            start = _span(view.tensor)[0] - view.begin
            stored = _bytes_of(view.tensor.untyped_storage(), start, region.bytes)
            host.part(region.begin, region.bytes).copy_(stored, non_blocking=True)
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()
        return host

    def _bind(self, pieces: list[Tensor]) -> None:
        """Lets every tensor lie in the piece of its region. The tensor objects stay, and so does all that refers to them."""
        for view in self._views:
            piece = pieces[view.region]
            offset = (piece.storage_offset() + view.begin) // view.dtype.itemsize
            bound = torch.empty(0, dtype=view.dtype, device=piece.device)
            view.tensor.data = bound.set_(piece.untyped_storage(), offset, view.size, view.stride)


class _HostMemory:
    """`size` bytes, aligned, and pinned for a device that copies from pinned memory itself.

    It is registered rather than allocated as such: torch keeps pinned allocations for good, and rounds them up to powers of two.
    """

    def __init__(self, size: int, device: torch.device) -> None:
        whole = torch.empty(size + _ALIGNMENT, dtype=torch.uint8)
        skipped = -whole.data_ptr() % _ALIGNMENT
        self._bytes = whole[skipped : skipped + size]
        if device.type == "cuda":
            runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
            if int(runtime.cudaHostRegister(self._bytes.data_ptr(), size, 0)) == 0:  # else it is slower, and as right
                weakref.finalize(self, runtime.cudaHostUnregister, self._bytes.data_ptr())

    def part(self, begin: int, size: int) -> Tensor:
        return self._bytes[begin : begin + size]


def _span(tensor: Tensor) -> tuple[int, int]:
    """First and last byte, exclusive, within its storage."""
    start = int(tensor.storage_offset()) * tensor.itemsize
    if tensor.numel() == 0:
        return start, start
    last = sum((size - 1) * stride for size, stride in zip(tuple(tensor.size()), tensor.stride(), strict=True))
    return start, start + (last + 1) * tensor.itemsize


def _bytes_of(storage: torch.UntypedStorage, start: int, size: int) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage, start, (size,), (1,))


def _padded(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


@cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def copying(device: torch.device) -> AbstractContextManager[object]:
    """What loads and copies run in: a stream beside the one that serves. Its memory is its own, too, so that nothing must be waited
    for before it is filled."""
    return torch.cuda.stream(_stream(device)) if device.type == "cuda" else nullcontext()
