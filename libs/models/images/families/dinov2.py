"""DINOv2 (arXiv 2304.07193): a ViT whose blocks' outputs are scaled, for images of any size; its positions are resampled."""

from __future__ import annotations

from dataclasses import replace

from libs.models.images.families.family import TowerSpec, encoder_spec, square_grid
from libs.models.images.families.vit import EMBEDDINGS, class_token
from libs.models.images.patches import PatchSpec
from libs.models.layers.spec import Config
from libs.models.weights import HeadRule, Rule

MODEL_TYPES = ("dinov2",)
PROCESSOR = "BitImageProcessor"
REST: dict[str, HeadRule] = {}

WEIGHTS: dict[str, Rule] = EMBEDDINGS | {
    "encoder.layer.{}.norm1": "layers.{}.attn_norm",
    "encoder.layer.{}.norm2": "layers.{}.ffn_norm",
    "encoder.layer.{}.mlp.fc1": "layers.{}.ffn.up",
    "encoder.layer.{}.mlp.fc2": "layers.{}.ffn.down",
}

SCALES: dict[str, HeadRule] = {
    "encoder.layer.{}.layer_scale1": "layers.{}.attn",
    "encoder.layer.{}.layer_scale2": "layers.{}.ffn",
}


def towers(config: Config) -> dict[str, TowerSpec]:
    """Raises ModelBroken for the giant model's gated feed-forward."""
    config.require("use_swiglu_ffn", False)
    ffn = config.size("hidden_size", 768) * config.size("mlp_ratio", 4)
    spec = encoder_spec(config, hidden=768, layers=12, heads=12, ffn=ffn, eps=1e-6, activation="gelu")
    spec = replace(spec, ffn=ffn, qkv_bias=config.flag("qkv_bias", True))
    patch, grid = square_grid(config, 224, 14)
    return {
        "image": TowerSpec(
            spec,
            PatchSpec(spec.hidden, patch, grid, resampled=True),
            WEIGHTS,
            class_token,
            prefixes=("", "dinov2."),
            head_table=SCALES,
            layer_scale=True,
        )
    }
