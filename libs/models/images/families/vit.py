"""ViT (arXiv 2010.11929): the normalised class token is an image's vector."""

from __future__ import annotations

from dataclasses import replace

from libs.models.images.families.family import State, TowerSpec, encoder_spec, square_grid
from libs.models.images.patches import PatchSpec
from libs.models.interface.head import ModelHead
from libs.models.layers.spec import Config
from libs.models.text.heads.pooled import PooledHead
from libs.models.weights import HeadRule, Rule

MODEL_TYPES = ("vit",)
PROCESSOR = "ViTImageProcessor"
REST: dict[str, HeadRule] = {}

EMBEDDINGS: dict[str, Rule] = {
    "embeddings.cls_token": "embed.class_token",
    "embeddings.mask_token": None,
    "embeddings.patch_embeddings.projection": "embed.project",
    "embeddings.position_embeddings": "embed.position",
    "encoder.layer.{}.attention.attention.query": ("layers.{}.attn.qkv", 0),
    "encoder.layer.{}.attention.attention.key": ("layers.{}.attn.qkv", 1),
    "encoder.layer.{}.attention.attention.value": ("layers.{}.attn.qkv", 2),
    "encoder.layer.{}.attention.output.dense": "layers.{}.attn.out",
    "layernorm": "norm",
    "classifier": None,
}

WEIGHTS: dict[str, Rule] = EMBEDDINGS | {
    "encoder.layer.{}.layernorm_before": "layers.{}.attn_norm",
    "encoder.layer.{}.layernorm_after": "layers.{}.ffn_norm",
    "encoder.layer.{}.intermediate.dense": "layers.{}.ffn.up",
    "encoder.layer.{}.output.dense": "layers.{}.ffn.down",
    "pooler.dense": None,
}


def towers(config: Config) -> dict[str, TowerSpec]:
    spec = encoder_spec(
        config, hidden=768, layers=12, heads=12, ffn=3072, eps=1e-12, activation="gelu"
    )
    spec = replace(spec, qkv_bias=config.flag("qkv_bias", True))
    patch, grid = square_grid(config, 224, 16)
    return {
        "image": TowerSpec(
            spec, PatchSpec(spec.hidden, patch, grid), WEIGHTS, class_token, prefixes=("", "vit.")
        )
    }


def class_token(state: State) -> ModelHead:
    return PooledHead(("cls",), ())
