"""LoRA adapters of a loaded model: bind a batch's adapters to the linear layers (multi-LoRA).

Adapters are loaded and unloaded while a resident model serves. `PackedModel.forward` binds a
batch's adapters to the layers (`Adapters.bound`), which add the low-rank products
(`libs/kernels/linear/lora.py`). `peft.py` reads their files.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from itertools import accumulate
from pathlib import Path
from threading import Lock
from typing import Any, Final, Generic, Protocol, TypeVar, runtime_checkable

import torch
from torch import Tensor, nn

from libs.catalog.checkpoint.adapter import FILE
from libs.errors import ModelBroken
from libs.kernels.linear.lora import AdapterRows, LoraUpdates, LowRank
from libs.kernels.linear.packed import PackedLinear, must_widen
from libs.models.layers.embeddings import EmbeddingTable
from libs.models.layers.encoder import PackedEncoder
from libs.models.runtime.loaded.peft import (
    AdapterFactors,
    LayerShape,
    TensorNames,
    read_pieces,
    slot_outputs,
)
from libs.models.weights import TensorFile, stored_tensor

MERGE: Final = "merge it (merge_and_unload) and serve the result as a model"


class AdapterConstants(Protocol):
    """State that an encoder computed from an adapter, in addition to the adapter's factors."""

    @property
    def bytes(self) -> int: ...


Weights = tuple[Tensor, Tensor | None]
"""A layer's weight [outputs, inputs] and bias, float32."""

_Made = TypeVar("_Made", covariant=True)


@runtime_checkable
class PrecomputesConstants(Protocol):
    """An encoder that precomputes constants with linear layers after loading (DeBERTa), and
    recomputes them for each adapter.
    """

    def spent(self) -> Mapping[str, LayerShape]:
        """Return the layers that were freed after this computation, by name."""

    def relearn(self, parts: Mapping[str, LowRank]) -> Mapping[str, AdapterConstants]:
        """Return the adapter's share of the constants, by the name of the module to bind it to as
        `delta` (`BoundConstants`).
        """


@dataclass(frozen=True, slots=True)
class BoundConstants(Generic[_Made]):
    """The results of `PrecomputesConstants.relearn` for one module and the adapters of a batch, by
    their numbers in `rows`.
    """

    rows: AdapterRows
    parts: Mapping[int, _Made]


@runtime_checkable
class _Bindable(Protocol):
    """A module to which a batch's adapters are bound for the duration of a forward."""

    delta: Any


_Binding = tuple[_Bindable, "LoraUpdates | BoundConstants[Any]"]


@dataclass(frozen=True, slots=True)
class Loaded:
    """An adapter on the device.

    Attributes:
        parts: The factors by our name of a linear layer.
        learned: Learned tensors by name of a module (`PrecomputesConstants`).
    """

    directory: Path
    bytes: int
    parts: Mapping[str, LowRank]
    learned: Mapping[str, AdapterConstants]


class OwnFactors(nn.Module):
    """The adapters that belong to a checkpoint. It is a module, so their tensors are counted and
    moved with the model's.
    """

    def __init__(self) -> None:
        super().__init__()
        self.adapters: dict[str, Loaded] = {}

    def add(self, name: str, parts: Mapping[str, LowRank]) -> None:
        """Add an adapter. Its tensors are views of few buffers."""
        tensors = _list_tensors(parts)
        for tensor in tensors:
            self.register_buffer(f"factor_{len(self._buffers)}", tensor, persistent=False)
        self.adapters[name] = Loaded(Path(), sum(tensor.nbytes for tensor in tensors), parts, {})


def _list_tensors(parts: Mapping[str, LowRank]) -> list[Tensor]:
    return [
        one
        for part in parts.values()
        for one in (part.a, part.b, part.gain, part.shift)
        if one is not None
    ]


class Adapters:
    """The adapters of one model, by name. Any thread may call `add` and `remove`, also during a
    forward.

    Binding writes to the layers, so a forward needs exclusive use of the encoder
    (`PackedModel.forward` takes a lock).
    """

    def __init__(
        self,
        encoder: PackedEncoder,
        names: TensorNames,
        dtype: torch.dtype,
        device: torch.device,
        base: Callable[[], TensorFile] | None = None,
    ) -> None:
        """Create the set of adapters.

        `base`: opens the encoder's tensors, since adapters with magnitudes (DoRA) need the weights;
        None if such adapters are not supported.
        """
        self._encoder, self.names, self._device, self._base = encoder, names, device, base
        self._dtype = (
            torch.float32 if must_widen(torch.empty(0, dtype=dtype, device=device)) else dtype
        )
        self._bindable = {
            name: module
            for name, module in encoder.named_modules()
            if isinstance(module, _Bindable)
        }
        linears = {
            name: module
            for name, module in self._bindable.items()
            if isinstance(module, PackedLinear)
        }
        self.shapes = {
            name: LayerShape(linear.inputs, linear.slots) for name, linear in linears.items()
        }
        if isinstance(encoder, PrecomputesConstants):
            self.shapes.update(encoder.spent())
        tables = {
            name: module
            for name, module in self._bindable.items()
            if isinstance(module, EmbeddingTable)
        }
        self.shapes.update(
            {
                name: LayerShape(len(table.weight), table.weight.shape[1:], is_table=True)
                for name, table in tables.items()
            }
        )
        self.own = OwnFactors()
        """The factors of the checkpoint's adapters, which are part of the model."""
        # Copy on write: a forward keeps the mapping that it began with. The lock is for writers.
        self._loaded: Mapping[str, Loaded] = {}
        self._replacing = Lock()
        self._followed: Adapters | None = None
        self._bound: list[_Binding] = []

    @property
    def bytes(self) -> int:
        """Return the device memory of all adapters."""
        return sum(adapter.bytes for adapter in self._loaded.values())

    def directories(self) -> dict[str, Path]:
        """Return the directory of each adapter, by name."""
        return {name: adapter.directory for name, adapter in self._loaded.items()}

    @torch.inference_mode()
    def add(self, name: str, directory: Path) -> int:
        """Load an adapter's directory and return its bytes on the device. Raises ModelBroken with
        the file and key or tensor.
        """
        parts = self._parts(self.read(directory))
        size = sum(tensor.nbytes for tensor in _list_tensors(parts))
        learned = (
            self._encoder.relearn(parts) if isinstance(self._encoder, PrecomputesConstants) else {}
        )
        size += sum(made.bytes for made in learned.values())
        with self._replacing:
            self._loaded = {**self._loaded, name: Loaded(directory, size, parts, learned)}
        return size

    def read(self, directory: Path) -> list[AdapterFactors]:
        """Read the factors in an adapter's directory. Raises ModelBroken with the file and key or
        tensor.
        """
        return read_pieces(directory, self.names, self.shapes)

    @torch.inference_mode()
    def add_own(self, name: str, pieces: Sequence[AdapterFactors]) -> None:
        """Add an adapter of the checkpoint, which stays with the model, also in host memory. Call
        it before any forward.
        """
        self.own.add(name, self._parts(pieces))

    def remove(self, name: str) -> None:
        """Unload an adapter if it is loaded. Its memory is free after the forward in progress."""
        with self._replacing:
            self._loaded = {
                other: adapter for other, adapter in self._loaded.items() if other != name
            }

    @contextmanager
    def bound(self, names: Sequence[str], lengths: Sequence[int]) -> Iterator[None]:
        """Bind a batch's adapters to the layers. A batch that preempts another replaces its
        bindings and restores them.

        Args:
            names: Adapter of each sequence; empty for none.
            lengths: Tokens of each sequence.

        Raises KeyError for an adapter that is not loaded, ModelBroken for one from another model
        (`follow`) that cannot be read.
        """
        used = {name: number for number, name in enumerate(dict.fromkeys(filter(None, names)))}
        before = self._bound
        if not used and not before:
            yield
            return
        known = self._loaded if self._followed is None else self._fetched(used, self._followed)
        known = {**self.own.adapters, **known}
        bindings = self._bindings(
            [known[name] for name in used],
            AdapterRows.from_adapters([used.get(name) for name in names], lengths),
        )
        try:
            self._bind(bindings)
            yield
        finally:
            self._bind(before)

    def _bind(self, bindings: list[_Binding]) -> None:
        """Replace the current bindings."""
        for module, _ in self._bound:
            module.delta = None
        for module, delta in bindings:
            module.delta = delta
        self._bound = bindings

    def follow(self, other: Adapters) -> None:
        """Load missing adapters from the directories of `other`, the same model in another data
        type, when a batch needs them.
        """
        self._followed = other

    def _fetched(self, names: Iterable[str], other: Adapters) -> Mapping[str, Loaded]:
        directories = other.directories()
        for name in names:
            if name not in self._loaded and name in directories:
                self.add(name, directories[name])
        return self._loaded

    def _bindings(self, used: Sequence[Loaded], rows: AdapterRows) -> list[_Binding]:
        parts: dict[str, dict[int, LowRank]] = {}
        learned: dict[str, dict[int, AdapterConstants]] = {}
        for number, adapter in enumerate(used):
            for name, part in adapter.parts.items():
                parts.setdefault(name, {})[number] = part
            for name, made in adapter.learned.items():
                learned.setdefault(name, {})[number] = made
        found = [
            (self._bindable[name], LoraUpdates(rows, own))
            for name, own in parts.items()
            if name in self._bindable
        ]
        return [
            *found,
            *((self._bindable[name], BoundConstants(rows, own)) for name, own in learned.items()),
        ]

    def _parts(self, pieces: Sequence[AdapterFactors]) -> dict[str, LowRank]:
        """Return the factors of each layer, on the device."""
        by_layer: dict[str, list[AdapterFactors]] = {}
        for piece in pieces:
            by_layer.setdefault(piece.place.layer, []).append(piece)
        weights = self._weights(pieces)
        fused = [
            _fused(of_it, self.shapes[layer], cache(partial(weights, layer)))
            for layer, of_it in by_layer.items()
        ]
        factors = iter(
            self._placed([factor for one in fused for factor in (one.a, one.b)], self._dtype)
        )
        # A gain is near 1, where bfloat16 has steps of 0.8 %.
        scales = iter(self._placed([scale for one in fused for scale in one.scales], torch.float32))
        return {
            layer: LowRank(next(factors), next(factors), *(next(scales) for _ in one.scales))
            for layer, one in zip(by_layer, fused, strict=True)
        }

    def _placed(self, tensors: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
        """Move the tensors to one buffer on the device."""
        if not tensors:
            return []
        buffer = torch.cat([tensor.flatten() for tensor in tensors]).to(
            device=self._device, dtype=dtype
        )
        ends = accumulate(tensor.numel() for tensor in tensors)
        return [
            buffer[end - tensor.numel() : end].view(tensor.shape)
            for tensor, end in zip(tensors, ends, strict=True)
        ]

    def _weights(self, pieces: Sequence[AdapterFactors]) -> Callable[[str], Weights]:
        """Return a function that reads the stored weight and bias of a layer, which magnitudes
        need.
        """
        if all(piece.magnitude is None for piece in pieces):
            return _no_weights
        if self._base is None or isinstance(self._encoder, PrecomputesConstants):
            raise ModelBroken(
                f"{FILE}: `use_dora` is not supported for this family of models: {MERGE}"
            )
        tensors = self._base()

        def weights(layer: str) -> Weights:
            weight = stored_tensor(tensors, self.names.table, self.names.prefixes, layer, "weight")
            if weight is None:
                raise ModelBroken(
                    f"{tensors.source}: the weight of {layer}, needed for `use_dora`, is "
                    f"missing: {MERGE}"
                )
            return weight, stored_tensor(
                tensors, self.names.table, self.names.prefixes, layer, "bias"
            )

        return weights


def _no_weights(layer: str) -> Weights:
    raise LookupError(layer)


@dataclass(frozen=True, slots=True)
class _Fused:
    """One layer's factors in float32: a [ranks, inputs], b [ranks, outputs], 0 outside a piece's
    slot.

    Attributes:
        scales: Gain and shift (`LowRank`), if a piece has magnitudes.
    """

    a: Tensor
    b: Tensor
    scales: tuple[Tensor, ...] = ()


def _fused(
    pieces: Sequence[AdapterFactors], shape: LayerShape, weights: Callable[[], Weights]
) -> _Fused:
    """Fuse the pieces of a layer. `weights`: reads the layer's weight for pieces that need it."""
    if shape.is_table:
        return _Fused(pieces[0].a.float(), pieces[0].b.float().T * pieces[0].scale)
    a = torch.cat([piece.a.float() for piece in pieces])
    b = torch.zeros(len(a), sum(shape.slots))
    gain, shift = torch.ones(sum(shape.slots)), torch.zeros(sum(shape.slots))
    first = 0
    for piece in pieces:
        start, size = slot_outputs(piece.place, shape)
        own, last = slice(start, start + size), first + len(piece.a)
        b[first:last, own] = piece.b.float().T * piece.scale
        if piece.magnitude is not None:
            weight, bias = weights()
            summed = weight[own] + b[first:last, own].T @ piece.a.float()
            gain[own] = piece.magnitude.float() / torch.linalg.vector_norm(summed, dim=1)
            b[first:last, own] *= gain[own]
            shift[own] = 0.0 if bias is None else (1 - gain[own]) * bias[own]
        first = last
    return _Fused(
        a, b, (gain, shift) if any(piece.magnitude is not None for piece in pieces) else ()
    )
