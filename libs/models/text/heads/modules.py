"""The Dense modules of sentence-transformers' modules.json. Each has its tensors in a folder."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from libs.catalog.card import Card, DenseModule
from libs.errors import ModelBroken
from libs.models.text.heads.linear import HeadLinear, check_shape
from libs.models.weights import HeadRule, TensorFile


def linear_table(card: Card) -> dict[str, HeadRule]:
    """Return the stem of a module without a folder, which has its tensors among the encoder's."""
    return {"linear": "linear"} if any(not module.folder for module in card.modules) else {}


def dense_layers(
    card: Card, directory: Path, state: Mapping[str, Tensor], device: torch.device
) -> list[HeadLinear]:
    """Load the layers. Raises ModelBroken for a tensor that is missing or has another shape.

    Args:
        state: The tensors stored with the encoder's, for a module without a folder.
    """
    return [_layer(module, directory, state, device) for module in card.modules]


def _layer(
    module: DenseModule, directory: Path, state: Mapping[str, Tensor], device: torch.device
) -> HeadLinear:
    file = f"{module.folder}/model.safetensors" if module.folder else "model.safetensors"
    if module.folder:
        state = _read(directory, module.folder, device)
    wanted: dict[str, tuple[int, ...]] = {
        "linear.weight": (module.out_features, module.in_features)
    }
    if module.bias:
        wanted["linear.bias"] = (module.out_features,)
    if module.residual and module.in_features != module.out_features:
        wanted["residual.weight"] = (module.out_features, module.in_features)
    for name, shape in wanted.items():
        check_shape(state, name, shape, file)
    for name in state:
        if module.folder and name not in wanted:
            raise ModelBroken(f"{file}: tensor {name!r} is unknown")
    return HeadLinear(state, "linear", module.activation, residual=module.residual)


def _read(directory: Path, folder: str, device: torch.device) -> dict[str, Tensor]:
    tensors = TensorFile.open(directory, folder)
    return {
        name: tensors.read(name).to(device=device, dtype=torch.float32) for name in tensors.names()
    }
