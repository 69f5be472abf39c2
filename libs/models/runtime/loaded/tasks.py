"""The LoRA adapters that are part of a checkpoint, one for each of its tasks (jina-embeddings-v3
and -v5).

jina-embeddings-v3 stores them among the model's tensors, as parametrizations of its linear layers
and tables: `X.parametrizations.weight.original` replaces `X.weight`, and
`X.parametrizations.weight.0.lora_A` and `lora_B` hold all tasks, with the task as the first
dimension. jina-embeddings-v5 has a PEFT directory for each.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from libs.catalog.checkpoint.tasks import OwnAdapters
from libs.errors import ModelBroken
from libs.models.runtime.loaded.lora import Adapters
from libs.models.runtime.loaded.peft import AdapterFactors, LayerPlace, LayerShape, TensorNames
from libs.models.weights import TensorFile

_ORIGINAL: Final = ".parametrizations.weight.original"
_FACTOR: Final = re.compile(
    r"(?P<module>.+)\.parametrizations\.weight\.0\.lora_(?P<factor>[AB])", re.ASCII
)


def without_parametrizations(tensors: TensorFile) -> tuple[TensorFile, TensorFile]:
    """Return the tensors with the names of a checkpoint without parametrizations, and the factors
    of the parametrizations.
    """
    factors, plain = tensors.partition(lambda name: _FACTOR.fullmatch(name) is not None)
    return plain.renamed(_plain_name), factors


def _plain_name(stored: str) -> str:
    return f"{stored.removesuffix(_ORIGINAL)}.weight" if stored.endswith(_ORIGINAL) else stored


def add_own_adapters(
    adapters: Adapters, own: OwnAdapters, directory: Path, factors: TensorFile
) -> None:
    """Load every adapter of the checkpoint. Raises ModelBroken with the file and the key or tensor
    at fault.
    """
    if not own.names and factors.names():
        name = factors.names()[0]
        raise ModelBroken(
            f"{factors.tensor_file(name)}: tensor {name!r} belongs to an adapter, but config.json "
            "names none"
        )
    if not own.names:
        return
    if own.folder:
        for name in own.names:
            adapters.add_own(name, _read_directory(adapters, directory, f"{own.folder}/{name}"))
        return
    by_task = _read_factors(factors, own, adapters.names, adapters.shapes)
    for name, pieces in zip(own.names, by_task, strict=True):
        adapters.add_own(name, pieces)


def _read_directory(adapters: Adapters, directory: Path, folder: str) -> list[AdapterFactors]:
    try:
        return adapters.read(directory / folder)
    except ModelBroken as error:
        raise ModelBroken(f"{folder}/{error.message}") from error


def _read_factors(
    factors: TensorFile, own: OwnAdapters, names: TensorNames, shapes: Mapping[str, LayerShape]
) -> list[list[AdapterFactors]]:
    """Return the pieces of each task's adapter, in the order of config.json's
    `lora_adaptations`.
    """
    found: dict[str, dict[str, str]] = {}
    for stored in factors.names():
        match = _FACTOR.fullmatch(stored)
        if match is not None:
            found.setdefault(match["module"], {})[match["factor"]] = stored
    pieces: list[list[AdapterFactors]] = [[] for _ in own.names]
    for module, stored_by in found.items():
        stored = next(iter(stored_by.values()))
        place = _place(module, names, factors, stored)
        if place is None:
            continue
        shape = shapes.get(place.layer)
        if shape is None or place.slot is not None or len(stored_by) < 2:
            raise _broken(
                factors,
                stored,
                "does not adapt a whole linear layer or table of this model, or has no partner",
            )
        a, b = (
            (len(own.names), own.rank, shape.inputs),
            (len(own.names), sum(shape.slots), own.rank),
        )
        if shape.is_table:
            a, b = (
                (len(own.names), shape.inputs, own.rank),
                (len(own.names), own.rank, sum(shape.slots)),
            )
        _check_shape(factors, stored_by["A"], a)
        _check_shape(factors, stored_by["B"], b)
        down, up = factors.read(stored_by["A"]), factors.read(stored_by["B"])
        for task, own_pieces in enumerate(pieces):
            own_pieces.append(
                AdapterFactors(
                    place, down[task], up[task].T if shape.is_table else up[task], own.scale
                )
            )
    if not pieces[0]:
        raise ModelBroken(
            f"{factors.source}: the tensors of the adapters {', '.join(own.names)}, "
            "listed in `lora_adaptations` of config.json, are missing"
        )
    return pieces


def _place(module: str, names: TensorNames, factors: TensorFile, stored: str) -> LayerPlace | None:
    """Return the place of the adapted module; None for one that the family omits."""
    try:
        return names.place(module)
    except KeyError:
        raise _broken(factors, stored, "is unknown to this family of models") from None
    except LookupError as error:
        raise _broken(factors, stored, str(error)) from None


def _check_shape(factors: TensorFile, stored: str, wanted: tuple[int, ...]) -> None:
    shape = factors.shape(stored)
    if shape != wanted:
        raise _broken(factors, stored, f"has shape {list(shape)}; config.json needs {list(wanted)}")


def _broken(factors: TensorFile, stored: str, problem: str) -> ModelBroken:
    return ModelBroken(f"{factors.tensor_file(stored)}: tensor {stored!r} {problem}")
