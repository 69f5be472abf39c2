"""Read the factors of LoRA adapters in PEFT's format, and map them to the layers of a family.

As with weights, every tensor of a file must be accounted for by the family's table, or reading
fails with its name.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from torch import Tensor

from libs.catalog.checkpoint.adapter import FILE, TORCH_WEIGHTS, WEIGHTS
from libs.catalog.checkpoint.files import NOT_OPENED, shortened
from libs.errors import ModelBroken
from libs.models.runtime.loaded.adapter_config import Adapter, read_adapter
from libs.models.weights import AllowedExtra, HeadRule, LowRankUpdate, Rule, TensorFile, find

# `base_model.model.` is PEFT's wrapper. The adapter's name stands between lora_A and weight until
# PEFT removes it.
_NAME: Final = re.compile(
    r"(?:base_model\.model\.)?(?P<module>.+)\.lora_"
    r"(?:(?P<factor>[AB])(?:\.[\w-]+)?\.weight|(?P<magnitude>magnitude_vector)(?:\.[\w-]+){0,2})",
    re.ASCII,
)
_MAGNITUDE: Final = "magnitude_vector"

_MAX_NAME: Final = 1024
"""Characters of a name. Layers of real models have names of a hundred."""


@dataclass(frozen=True, slots=True)
class LayerShape:
    """The shape of an adaptable layer: `slots` add up to its outputs.

    Attributes:
        is_table: Whether the layer is a lookup table of `inputs` rows.
    """

    inputs: int
    slots: tuple[int, ...]
    is_table: bool = False


@dataclass(frozen=True, slots=True)
class TensorNames:
    """The tensor names of a family's checkpoints: the family's table, the prefixes of its names,
    and the head's table.
    """

    table: Mapping[str, Rule]
    prefixes: tuple[str, ...]
    head_table: Mapping[str, HeadRule]

    def place(self, module: str) -> LayerPlace | None:
        """Return the place of a linear layer by its name; None if the family ignores such layers.

        Raises KeyError for an unknown name, and LookupError with the reason for a layer that cannot
        have adapters.
        """
        for prefix in sorted(self.prefixes, key=len, reverse=True):
            stem = module.removeprefix(prefix)
            if not module.startswith(prefix):
                continue
            own = find(f"{stem}.weight", self.head_table)
            if own is not None and self.head_table[own.stem] is not None:
                raise LookupError(
                    "belongs to the model's head; only layers of the encoder can have adapters"
                )
            found = find(f"{stem}.weight", self.table)
            if found is not None:
                return _place(self.table[found.stem], found.number)
        raise KeyError(module)


@dataclass(frozen=True, slots=True)
class LayerPlace:
    """Our name of a linear layer, and the index of its slot; None for the whole layer."""

    layer: str
    slot: int | None
    optional: bool = False
    """Some models of the family do not have the layer, although their checkpoints do."""


def _place(rule: Rule, number: str) -> LayerPlace | None:
    if rule is None:
        return None
    if isinstance(rule, tuple):
        return LayerPlace(rule[0].format(number), rule[1])
    if isinstance(rule, AllowedExtra):
        return LayerPlace(rule.target.format(number), None, optional=True)
    return LayerPlace(rule.format(number), None)


@dataclass(frozen=True, slots=True)
class AdapterFactors:
    """The two factors of one adapted module, as stored: a [rank, inputs], b [outputs, rank], and
    the scale of their product b a.

    For a lookup table, a is [rows, rank]. `magnitude` (DoRA): length of each row of the model's
    weight plus the product.
    """

    place: LayerPlace
    a: Tensor
    b: Tensor
    scale: float
    magnitude: Tensor | None = None


def slot_outputs(place: LayerPlace, shape: LayerShape) -> tuple[int, int]:
    """Return the first output of a slot, and the number of its outputs."""
    if place.slot is None:
        return 0, sum(shape.slots)
    return sum(shape.slots[: place.slot]), shape.slots[place.slot]


def read_pieces(
    directory: Path, names: TensorNames, shapes: Mapping[str, LayerShape]
) -> list[AdapterFactors]:
    """Read an adapter's factors as views of the mapped file. Raises ModelBroken with the file and
    the key or tensor at fault.
    """
    adapter = read_adapter(directory)
    tensors = _open(directory)
    factors: dict[str, dict[str, str]] = {}
    for stored in tensors.names():
        module, factor = _parse(stored)
        if factors.setdefault(module, {}).setdefault(factor, stored) != stored:
            raise _broken(stored, f"is a duplicate of {factors[module][factor]!r}")
    pieces = [
        _piece(module, found, adapter, tensors, names, shapes) for module, found in factors.items()
    ]
    wanted = [piece for piece in pieces if piece is not None]
    if not wanted:
        raise ModelBroken(f"{WEIGHTS}: no tensor adapts a layer of this model")
    places = [piece.place for piece in wanted]
    twice = next((place for number, place in enumerate(places) if place in places[:number]), None)
    if twice is not None:
        raise ModelBroken(f"{WEIGHTS}: two modules adapt the same layer ({twice.layer})")
    return wanted


def read_updates(directory: Path) -> dict[str, LowRankUpdate]:
    """Read an adapter's factors by module, to merge them into a checkpoint's tensors. Raises as
    `read_pieces`.
    """
    adapter = read_adapter(directory)
    tensors = _open(directory)
    factors: dict[str, dict[str, str]] = {}
    for stored in tensors.names():
        module, factor = _parse(stored)
        factors.setdefault(module, {})[factor] = stored
    updates = {}
    for module, found in factors.items():
        _check_partners(found)
        a, b, rank = tensors.read(found["A"]), tensors.read(found["B"]), adapter.module_rank(module)
        if a.dim() != 2 or b.dim() != 2 or len(a) != rank or b.shape[1] != rank:
            raise _broken(
                found["A"],
                f"and its partner have the shapes {list(a.shape)} and {list(b.shape)}; the "
                f"rank is {rank}",
            )
        updates[module] = LowRankUpdate(
            a, b, adapter.module_scale(module), _magnitude(found, adapter, tensors, len(b))
        )
    return updates


def _open(directory: Path) -> TensorFile:
    if (directory / WEIGHTS).is_file():
        return TensorFile.open_file(directory, WEIGHTS)
    if (directory / TORCH_WEIGHTS).is_file():
        raise ModelBroken(f"{TORCH_WEIGHTS}: {NOT_OPENED}")
    raise ModelBroken(f"{WEIGHTS}: no such file")


def _parse(stored: str) -> tuple[str, str]:
    """Parse a tensor's name into module and factor (A, B or magnitude_vector)."""
    match = _NAME.fullmatch(stored)
    if match is not None and len(stored) <= _MAX_NAME:
        return match["module"], match["factor"] or match["magnitude"]
    if "lora_embedding_" in stored:
        raise _broken(stored, "adapts an embedding; only linear layers can have adapters")
    if "lora_" in stored:
        raise _broken(
            stored, "is not supported; only lora_A.weight and lora_B.weight of linear layers are"
        )
    raise _broken(
        stored,
        "was trained as a whole (modules_to_save, or a bias); only LoRA's factors are supported",
    )


def _piece(
    module: str,
    found: Mapping[str, str],
    adapter: Adapter,
    tensors: TensorFile,
    names: TensorNames,
    shapes: Mapping[str, LayerShape],
) -> AdapterFactors | None:
    """Return the piece of a module; None for a layer that the family omits from the model."""
    stored = next(iter(found.values()))
    _check_partners(found)
    if not adapter.is_target(module):
        raise ModelBroken(
            f"{FILE}: `target_modules` does not name the module of tensor {stored!r} of {WEIGHTS}"
        )
    try:
        place = names.place(module)
    except KeyError:
        raise _broken(stored, "is unknown to this family of models") from None
    except LookupError as error:
        raise _broken(stored, str(error)) from None
    if place is None:
        return None
    shape = shapes.get(place.layer)
    if shape is None and place.optional:
        return None
    if shape is None or shape.is_table:
        raise _broken(
            stored,
            "adapts a layer that is not a linear layer of this model; only linear layers can "
            "have adapters",
        )
    rank = adapter.module_rank(module)
    _check_shape(tensors, found["A"], (rank, shape.inputs))
    _check_shape(tensors, found["B"], (slot_outputs(place, shape)[1], rank))
    magnitude = _magnitude(found, adapter, tensors, slot_outputs(place, shape)[1])
    return AdapterFactors(
        place,
        tensors.read(found["A"]),
        tensors.read(found["B"]),
        adapter.module_scale(module),
        magnitude,
    )


def _check_partners(found: Mapping[str, str]) -> None:
    for factor in "AB":
        if factor not in found:
            raise _broken(next(iter(found.values())), f"has no partner lora_{factor}")


def _magnitude(
    found: Mapping[str, str], adapter: Adapter, tensors: TensorFile, outputs: int
) -> Tensor | None:
    """Return the magnitudes of a DoRA module. Raises ModelBroken if adapter_config.json and the
    tensors disagree.
    """
    stored = found.get(_MAGNITUDE)
    if (stored is not None) != adapter.dora:
        named = stored or found["A"]
        raise _broken(
            named,
            f"has {'a' if stored else 'no'} magnitude, but `use_dora` in {FILE} is {adapter.dora}",
        )
    if stored is None:
        return None
    _check_shape(tensors, stored, (outputs,))
    return tensors.read(stored)


def _check_shape(tensors: TensorFile, stored: str, wanted: tuple[int, ...]) -> None:
    shape = tensors.shape(stored)
    if shape != wanted:
        raise _broken(
            stored,
            f"has shape {list(shape)}; the model and the rank in {FILE} need {list(wanted)}",
        )


def _broken(stored: str, problem: str) -> ModelBroken:
    return ModelBroken(f"{WEIGHTS}: tensor {shortened(stored)!r} {problem}")
