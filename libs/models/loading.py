"""Load any checkpoint directory. Its card selects a text, image or generative model."""

from __future__ import annotations

from pathlib import Path

import torch

from libs.catalog.detect import read_card
from libs.catalog.kinds.embedding.static import is_static
from libs.catalog.kinds.vision.images import images_folder
from libs.catalog.kinds.vision.vision_language import is_vision_language
from libs.catalog.kinds.writing.image_writer import is_image_writer
from libs.catalog.overrides import Overrides
from libs.models.generation.serving import load_generative_model
from libs.models.images.serving import load_image_model
from libs.models.images.vlm.serving import load_vision_language_model
from libs.models.model import Model
from libs.models.packed_model import PackedModel
from libs.models.readers.serving import load_reader_model
from libs.models.text.loading import load_text_model
from libs.models.text.static import load_static_model


def load_model(
    directory: Path,
    model_id: str,
    device: torch.device,
    dtype: torch.dtype,
    overrides: Overrides | None = None,
    base: Path | None = None,
) -> PackedModel:
    """Load a checkpoint directory. Encoders compute in `dtype` unless the card has a type; heads in
    float32.

    With torch.int8, or a card's int8, weights are quantised and everything else uses the worker's
    type (`dtype`, or the device's default). On an accelerator, for an image model, and on a CPU
    without int8 support, the whole model uses that type and a warning is logged.

    Args:
        overrides: The catalog's overrides for the model.
        base: The model that the LoRA adapter in `directory` is merged into.

    Raises ModelBroken with the file and the key or tensor at fault, or with the accuracy that int8
    would lose.
    """
    if base is not None or is_vision_language(directory):
        return load_vision_language_model(directory, model_id, device, dtype, overrides, base)
    if images_folder(directory) is not None:
        return load_image_model(directory, model_id, device, dtype, overrides)
    if is_static(directory):
        return load_static_model(directory, model_id, device, overrides)
    return load_text_model(directory, model_id, device, dtype, overrides)


def load_served_model(
    directory: Path,
    model_id: str,
    device: torch.device,
    dtype: torch.dtype,
    overrides: Overrides | None = None,
    base: Path | None = None,
    memory_bytes: int = 0,
) -> Model:
    """Load any model, generative ones included. `memory_bytes`: see `load_generative_model`."""
    if base is None and is_image_writer(
        directory, None if overrides is None else overrides.detect.kind
    ):
        return load_reader_model(directory, model_id, device, dtype, overrides, memory_bytes)
    if base is None and read_card(directory, model_id, overrides).kind == "writer":
        return load_generative_model(directory, model_id, device, dtype, overrides, memory_bytes)
    return load_model(directory, model_id, device, dtype, overrides, base)
