"""Recognize LoRA adapters in PEFT's format: their files, and the model that an adapter is for.

Needs only the standard library: the store and `shoal up` use it without the packages of a worker.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from libs.catalog.checkpoint.files import read_config, shortened

FILE: Final = "adapter_config.json"
"""A directory with this file is an adapter."""

WEIGHTS: Final = "adapter_model.safetensors"
TORCH_WEIGHTS: Final = "adapter_model.bin"
"""PEFT's older file; the store converts it."""

MODEL_WEIGHTS: Final = (
    "model.safetensors",
    "model.safetensors.index.json",
    "modules.json",
    "open_clip_model.safetensors",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)
"""A directory with one of these is a model, even if it has an adapter's configuration."""

_MAX_NAME: Final = 300  # characters: more than a model id has


def read_base_model(directory: Path) -> str:
    """The name of the model that a directory is an adapter of; empty for a model. Raises
    ModelBroken if the adapter names none.
    """
    if any((directory / name).is_file() for name in MODEL_WEIGHTS):
        return ""
    config = read_config(directory, FILE)
    if config is None:
        return ""
    name = config.text("base_model_name_or_path")
    if not name:
        raise config.broken(
            "base_model_name_or_path", "is missing: it names the model that this is an adapter of"
        )
    return shortened(name, _MAX_NAME)
