"""Load any checkpoint directory, by the loader of its kind (`libs/kinds`)."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Final, cast

import torch

from libs.catalog.detect import detect
from libs.catalog.overrides import Overrides
from libs.errors import ModelBroken
from libs.kinds.kind import Kind
from libs.models.interface.model import Model
from libs.models.interface.source import LoadArguments
from libs.models.runtime.packed_model import PackedModel

GENERATIVE: Final = "generative"
"""The kind of generative models."""


def load_model(
    directory: Path,
    model_id: str,
    device: torch.device,
    dtype: torch.dtype,
    overrides: Overrides | None = None,
    base: Path | None = None,
) -> PackedModel:
    """Load a model that is not generative, as `load_served_model` does. Raises ModelBroken for
    others.
    """
    source = LoadArguments(directory, model_id, device, dtype, overrides, base)
    kind = _find_kind(source)
    if kind.name == GENERATIVE:  # before its weights are read
        raise ModelBroken(
            f"models of the kind {kind.name!r}, such as {model_id}, have no vectors, scores or "
            "labels"
        )
    return cast("PackedModel", _load(kind, source))


def load_served_model(
    directory: Path,
    model_id: str,
    device: torch.device,
    dtype: torch.dtype,
    overrides: Overrides | None = None,
    base: Path | None = None,
    memory_bytes: int = 0,
) -> Model:
    """Load a checkpoint directory. Encoders compute in `dtype` unless the card has a type; heads in
    float32.

    With torch.int8, or a card's int8, weights are quantised and everything else uses the worker's
    type (`dtype`, or the device's default). On an accelerator, for an image model, and on a CPU
    without int8 support, the whole model uses that type and a warning is logged.

    Args:
        overrides: The catalog's overrides for the model.
        base: The model that the LoRA adapter in `directory` is merged into.
        memory_bytes: Of a generative model: accelerator memory for all models, of which keys and
            values get a share; 0 for all of it.

    Raises ModelBroken with the file and the key or tensor at fault, or with the accuracy that int8
    would lose.
    """
    source = LoadArguments(directory, model_id, device, dtype, overrides, base, memory_bytes)
    return _load(_find_kind(source), source)


def _find_kind(source: LoadArguments) -> Kind:
    _, kind = detect(source.directory, source.model_id, source.overrides, source.base)
    return kind


def _load(kind: Kind, source: LoadArguments) -> Model:
    model: Model = import_module(f"libs.kinds.{kind.folder}.model").load(source)
    return model
