"""SigLIP 2 NaFlex (arXiv 2502.14786): images of any proportions, each scaled to a budget of
patches, with resampled positions.

`siglip` has SigLIP 2 of a fixed size.
"""

from __future__ import annotations

from math import isqrt

from libs.models.images.families.family import TowerSpec
from libs.models.images.families.siglip import REST as REST
from libs.models.images.families.siglip import image_tower, text_tower
from libs.models.images.patches import PatchSpec
from libs.models.layers.spec import Config

VISION_ONLY = "siglip2_vision_model"
MODEL_TYPES = ("siglip2", VISION_ONLY)
PROCESSOR = "Siglip2ImageProcessor"


def towers(config: Config) -> dict[str, TowerSpec]:
    if config.text("model_type") == VISION_ONLY:
        return {"image": image_tower(config, _patches(config), prefixes=("", "vision_model."))}
    images = config.part("vision_config")
    return {
        "dense": text_tower(config.part("text_config")),
        "image": image_tower(images, _patches(images), part="vision_model."),
    }


def _patches(config: Config) -> PatchSpec:
    config.require("num_channels", 3)
    side = isqrt(config.size("num_patches", 256))
    return PatchSpec(
        config.size("hidden_size", 768),
        config.size("patch_size", 16),
        (side, side),
        class_token=False,
        resampled=True,
        interpolation="bilinear",
        antialias=True,
        linear=True,
    )
