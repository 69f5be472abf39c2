"""Load a checkpoint directory as a language model for generation."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

import torch

from libs.catalog.checkpoint.files import need_config
from libs.models.generation.decoding.language_model import LanguageModel
from libs.models.generation.decoding.settings import DecodeSettings, read_settings
from libs.models.generation.families import bart, causal, t5
from libs.models.layers.spec import Config
from libs.models.weights import TensorFile


class GenerativeFamily(Protocol):
    """The interface of a module in `families`."""

    @property
    def MODEL_TYPES(self) -> tuple[str, ...]: ...

    def load(
        self,
        config: Config,
        tensors: TensorFile,
        settings: DecodeSettings,
        dtype: torch.dtype,
        device: torch.device,
    ) -> LanguageModel: ...


_FAMILIES: tuple[GenerativeFamily, ...] = (causal, bart, t5)


def load_language_model(directory: Path, device: torch.device, dtype: torch.dtype) -> LanguageModel:
    """Load the model by the `model_type` of its config.json, in `dtype`.

    Raises ModelBroken with the file and the key or tensor at fault.
    """
    config = Config(need_config(directory, "config.json").values)
    name = config.text("model_type")
    family = next((family for family in _FAMILIES if name in family.MODEL_TYPES), None)
    if family is None:
        known = ", ".join(sorted(kind for family in _FAMILIES for kind in family.MODEL_TYPES))
        raise config.unsupported("model_type", f"generative models are {known}")
    return family.load(config, TensorFile.open(directory), read_settings(directory), dtype, device)
