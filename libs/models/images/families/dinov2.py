"""DINOv2 (arXiv 2304.07193), also with registers (2309.16588): a ViT with layer scale and resampled
positions for images of any size. The giant model has a gated feed-forward.
"""

from __future__ import annotations

from dataclasses import replace

from libs.models.images.families.family import TowerSpec, encoder_spec, square_grid
from libs.models.images.families.vit import EMBEDDINGS, class_token
from libs.models.images.patches import PatchSpec
from libs.models.layers.spec import Config
from libs.models.weights import HeadRule, Rule

WITH_REGISTERS = "dinov2_with_registers"
MODEL_TYPES = ("dinov2", WITH_REGISTERS)
PROCESSOR = "BitImageProcessor"
REST: dict[str, HeadRule] = {}

WEIGHTS: dict[str, Rule] = EMBEDDINGS | {
    "embeddings.register_tokens": "embed.registers",
    "encoder.layer.{}.norm1": "layers.{}.attn_norm",
    "encoder.layer.{}.norm2": "layers.{}.ffn_norm",
    "encoder.layer.{}.mlp.fc1": "layers.{}.ffn.up",
    "encoder.layer.{}.mlp.fc2": "layers.{}.ffn.down",
    "encoder.layer.{}.mlp.weights_in": "layers.{}.ffn.up",  # gate and up, in this order
    "encoder.layer.{}.mlp.weights_out": "layers.{}.ffn.down",
}

SCALES: dict[str, HeadRule] = {
    "encoder.layer.{}.layer_scale1": "layers.{}.attn",
    "encoder.layer.{}.layer_scale2": "layers.{}.ffn",
}


def towers(config: Config) -> dict[str, TowerSpec]:
    gated = config.flag("use_swiglu_ffn", False)
    ffn = config.size("hidden_size", 768) * config.size("mlp_ratio", 4)
    if gated:
        ffn = -(int(ffn * 2 / 3) // -8) * 8  # two thirds, rounded up
    spec = encoder_spec(
        config, hidden=768, layers=12, heads=12, ffn=ffn, eps=1e-6, activation="gelu"
    )
    spec = replace(spec, ffn=ffn, qkv_bias=config.flag("qkv_bias", True), gated=gated)
    if gated:
        spec = replace(spec, activation="silu")
    has_registers = config.text("model_type") == WITH_REGISTERS
    patch, grid = square_grid(config, 224, 16 if has_registers else 14)
    registers = config.size("num_register_tokens", 4) if has_registers else 0
    return {
        "image": TowerSpec(
            spec,
            PatchSpec(
                spec.hidden,
                patch,
                grid,
                resampled=True,
                registers=registers,
                antialias=has_registers,
            ),
            WEIGHTS,
            class_token,
            prefixes=("", "dinov2.", "dinov2_with_registers."),
            head_table=SCALES,
            layer_scale=True,
        )
    }
