"""CLIP (arXiv 2103.00020): images and texts in one space, each with an encoder and a projection."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from libs.catalog.card import PoolingMode
from libs.models.images.families.family import State, TowerSpec, encoder_spec, square_grid
from libs.models.images.patches import PatchSpec
from libs.models.interface.head import ModelHead
from libs.models.layers.spec import Config, EmbeddingSpec
from libs.models.text.heads.linear import HeadLinear, check_shape
from libs.models.text.heads.pooled import PooledHead
from libs.models.weights import SINGLE, HeadRule, Maybe, Rule

VISION_ONLY = "clip_vision_model"
MODEL_TYPES = ("clip", VISION_ONLY)
PROCESSOR = "CLIPImageProcessor"

REST: dict[str, HeadRule] = {
    "visual_projection": "visual_projection",
    "text_projection": "text_projection",
    "logit_scale": "logit_scale",
}

LAYERS: dict[str, Rule] = {
    "encoder.layers.{}.self_attn.q_proj": ("layers.{}.attn.qkv", 0),
    "encoder.layers.{}.self_attn.k_proj": ("layers.{}.attn.qkv", 1),
    "encoder.layers.{}.self_attn.v_proj": ("layers.{}.attn.qkv", 2),
    "encoder.layers.{}.self_attn.out_proj": "layers.{}.attn.out",
    "encoder.layers.{}.layer_norm1": "layers.{}.attn_norm",
    "encoder.layers.{}.layer_norm2": "layers.{}.ffn_norm",
    "encoder.layers.{}.mlp.fc1": "layers.{}.ffn.up",
    "encoder.layers.{}.mlp.fc2": "layers.{}.ffn.down",
}

IMAGES: dict[str, Rule] = LAYERS | {
    "embeddings.position_ids": None,
    "embeddings.class_embedding": "embed.class_token",
    "embeddings.patch_embedding": "embed.project",
    "embeddings.position_embedding.weight": "embed.position",
    "pre_layrnorm": "embed.norm",  # the checkpoint's spelling
    "post_layernorm": "norm",
}

TEXTS: dict[str, Rule] = LAYERS | {
    "embeddings.position_ids": None,
    "embeddings.token_embedding": "embed.token",
    "embeddings.position_embedding": "embed.position",
    "final_layer_norm": "norm",
}


def towers(config: Config) -> dict[str, TowerSpec]:
    """Texts are causal and pooled at their last token, the end of text; images at their class
    token.
    """
    if config.text("model_type") == VISION_ONLY:
        # with or without a projection
        head = partial(_maybe_projected, config.size("projection_dim", 512))
        tower = _images(config, head, "", ("", "vision_model."))
        return {
            "image": replace(tower, head_table={"visual_projection": Maybe("visual_projection")})
        }
    size = config.size("projection_dim", 512)
    texts, images = _part(config, "text_config"), _part(config, "vision_config")
    text = encoder_spec(
        texts, hidden=512, layers=12, heads=8, ffn=2048, eps=1e-5, activation="quick_gelu"
    )
    positions = texts.size("max_position_embeddings", 77)
    return {
        "dense": TowerSpec(
            replace(text, causal=True),
            EmbeddingSpec(texts.size("vocab_size", 49408), text.hidden, positions, norm_eps=None),
            TEXTS,
            partial(_projected, "lasttoken", "text_projection", size, text.hidden),
            part="text_model.",
        ),
        "image": _images(
            images, partial(_projected, "cls", "visual_projection", size), "vision_model.", ("",)
        ),
    }


def _images(
    config: Config, head: Callable[[int, State], ModelHead], part: str, prefixes: Sequence[str]
) -> TowerSpec:
    """Build the image tower. `head`: makes the head from the encoder's hidden size and a state."""
    spec = encoder_spec(
        config, hidden=768, layers=12, heads=12, ffn=3072, eps=1e-5, activation="quick_gelu"
    )
    patch, grid = square_grid(config, 224, 32)
    patches = PatchSpec(spec.hidden, patch, grid, bias=False, norm_eps=spec.norm_eps)
    return TowerSpec(
        spec, patches, IMAGES, partial(head, spec.hidden), part=part, prefixes=prefixes
    )


def _part(config: Config, key: str) -> Config:
    """Read a tower's configuration. Old files have two of them; transformers uses the one with the
    longer name.
    """
    return config.part(f"{key}_dict" if config.has(f"{key}_dict") else key)


def _projected(pooling: PoolingMode, stem: str, size: int, hidden: int, state: State) -> ModelHead:
    check_shape(state, f"{stem}.weight", (size, hidden), SINGLE)
    return PooledHead((pooling,), [HeadLinear(state, stem, "identity")])


def _maybe_projected(size: int, hidden: int, state: State) -> ModelHead:
    stem = "visual_projection"
    return (
        _projected("cls", stem, size, hidden, state)
        if f"{stem}.weight" in state
        else PooledHead(("cls",), ())
    )
