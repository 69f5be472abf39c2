"""DeiT (arXiv 2012.12877): a ViT with a distillation token before the patches.

It is the encoder of TrOCR's small models (`libs/models/readers`), and is not served alone.
"""

from __future__ import annotations

from dataclasses import replace

from libs.models.images.families import vit
from libs.models.images.families.family import TowerSpec
from libs.models.images.patches import PatchSpec
from libs.models.layers.spec import Config
from libs.models.weights import Rule

PROCESSOR = "DeiTImageProcessor"

WEIGHTS: dict[str, Rule] = vit.WEIGHTS | {"embeddings.distillation_token": "embed.distilled_token"}


def towers(config: Config) -> dict[str, TowerSpec]:
    tower = vit.towers(config)["image"]
    if not isinstance(tower.input, PatchSpec):
        raise TypeError("ViT reads patches")
    return {"image": replace(tower, input=replace(tower.input, distilled=True), weights=WEIGHTS)}
