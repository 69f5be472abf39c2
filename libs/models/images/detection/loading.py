"""Load a checkpoint directory of a detector. Its config.json names the family."""

from __future__ import annotations

from pathlib import Path

import torch

from libs.catalog.checkpoint.files import need_config
from libs.models.images.detection import dino, owl
from libs.models.images.detection.detector import Detector
from libs.models.images.detection.dino_loading import load_dino
from libs.models.images.detection.owl_loading import load_owl
from libs.models.layers.spec import Config


def model_types() -> tuple[str, ...]:
    """Return every `model_type` that `load_detector` supports."""
    return (*dino.MODEL_TYPES, *owl.MODEL_TYPES)


def load_detector(directory: Path, *, dtype: torch.dtype, device: torch.device) -> Detector:
    """Load a detector. Its encoders compute in `dtype`, its heads in float32.

    Raises ModelBroken with the file and the key or tensor that is not supported.
    """
    config = Config(need_config(directory, "config.json").values)
    if config.text("model_type") in owl.MODEL_TYPES:
        return load_owl(directory, config, dtype, device)
    if config.text("model_type") in dino.MODEL_TYPES:
        return load_dino(directory, config, dtype, device)
    raise config.unsupported("model_type", f"supported are {', '.join(model_types())}")
