"""From a card to the head that it describes, and the table of tensors which that head takes from the encoder's files."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from libs.catalog.card import Card, DenseModule
from libs.errors import ModelBroken
from services.worker.models.heads.labels import LabelsHead, labels_head, layout_of
from services.worker.models.heads.linear import HeadLinear, check_shape
from services.worker.models.heads.pooled import PooledHead
from services.worker.models.heads.tokens import TokenHead
from services.worker.models.weights import HeadRule, TensorFile

AnyHead = PooledHead | TokenHead | LabelsHead


def head_table(card: Card) -> dict[str, HeadRule]:
    """Stems of the head's tensors among the encoder's; modules.json's layers have files of their own."""
    if card.kind == "sequence_labels":
        layout = layout_of(card.family)
        return {layout.first: "first", layout.second: "second"}
    if card.kind == "token_labels":
        return {"classifier": "classifier"}
    return {"linear": "linear"} if any(not module.folder for module in card.modules) else {}


def build_head(card: Card, directory: Path, state: Mapping[str, Tensor], hidden: int, device: torch.device) -> AnyHead:
    """`state`: what `head_table` named. Raises ModelBroken for tensors that are missing or have another shape."""
    file = str(Path(card.encoder_folder) / "model.safetensors")
    if card.kind == "sequence_labels":
        return labels_head(card.family, state, hidden, len(card.classes), file)
    if card.kind == "token_labels":
        check_shape(state, "classifier.weight", (len(card.classes), hidden), file)
        return TokenHead([HeadLinear(state, "classifier", "identity")])
    layers = [_layer(module, directory, state, device) for module in card.modules]
    return PooledHead(card.pooling, layers) if card.kind == "dense" else TokenHead(layers)


def _layer(module: DenseModule, directory: Path, state: Mapping[str, Tensor], device: torch.device) -> HeadLinear:
    file = f"{module.folder}/model.safetensors" if module.folder else "model.safetensors"
    if module.folder:
        state = _read(directory / module.folder, device)
    wanted: dict[str, tuple[int, ...]] = {"linear.weight": (module.out_features, module.in_features)}
    if module.bias:
        wanted["linear.bias"] = (module.out_features,)
    if module.residual and module.in_features != module.out_features:
        wanted["residual.weight"] = (module.out_features, module.in_features)
    for name, shape in wanted.items():
        check_shape(state, name, shape, file)
    for name in state:
        if name not in wanted:
            raise ModelBroken(f"{file}: tensor {name!r} is not known")
    return HeadLinear(state, "linear", module.activation, residual=module.residual)


def _read(directory: Path, device: torch.device) -> dict[str, Tensor]:
    tensors = TensorFile.open(directory)
    return {name: tensors.read(name).to(device=device, dtype=torch.float32) for name in tensors.names()}
