"""SigLIP and SigLIP 2 of a fixed size (arXiv 2303.15343, 2502.14786): images and texts in one
space, compared by a sigmoid.

Texts are always padded to the maximum length and attend to the padding, as in training.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from libs.models.images.families.clip import LAYERS
from libs.models.images.families.family import State, TowerSpec, encoder_spec, square_grid
from libs.models.images.heads import AttentionPooledHead
from libs.models.images.patches import PatchSpec
from libs.models.interface.head import ModelHead
from libs.models.layers.spec import Config, EmbeddingSpec, EncoderSpec
from libs.models.text.heads.linear import HeadLinear, check_shape
from libs.models.text.heads.pooled import PooledHead
from libs.models.weights import SINGLE, HeadRule, Rule

VISION_ONLY = "siglip_vision_model"
MODEL_TYPES = ("siglip", VISION_ONLY)
PROCESSOR = "SiglipImageProcessor"

REST: dict[str, HeadRule] = {"logit_scale": "logit_scale", "logit_bias": "logit_bias"}

IMAGES: dict[str, Rule] = LAYERS | {
    "embeddings.position_ids": None,
    "embeddings.patch_embedding": "embed.project",
    "embeddings.position_embedding.weight": "embed.position",
    "post_layernorm": "norm",
}

TEXTS: dict[str, Rule] = LAYERS | {
    "embeddings.position_ids": None,
    "embeddings.token_embedding": "embed.token",
    "embeddings.position_embedding": "embed.position",
    "final_layer_norm": "norm",
}

IMAGE_HEAD: dict[str, HeadRule] = {
    "head.probe": "probe",
    "head.attention.in_proj_weight": "in_proj.weight",
    "head.attention.in_proj_bias": "in_proj.bias",
    "head.attention.out_proj": "out_proj",
    "head.layernorm": "norm",
    "head.mlp.fc1": "up",
    "head.mlp.fc2": "down",
}


def towers(config: Config) -> dict[str, TowerSpec]:
    """Texts are pooled at their last position, usually padding; images by one query that attends to
    all patches.
    """
    if config.text("model_type") == VISION_ONLY:
        return {"image": image_tower(config, _patches(config), prefixes=("", "vision_model."))}
    images = config.part("vision_config")
    return {
        "dense": text_tower(config.part("text_config")),
        "image": image_tower(images, _patches(images), part="vision_model."),
    }


def text_tower(config: Config) -> TowerSpec:
    spec = encoder_spec(
        config, hidden=768, layers=12, heads=12, ffn=3072, eps=1e-6, activation="gelu_pytorch_tanh"
    )
    positions = config.size("max_position_embeddings", 64)
    size = config.size("projection_size", spec.hidden)
    return TowerSpec(
        spec,
        EmbeddingSpec(config.size("vocab_size", 32000), spec.hidden, positions, norm_eps=None),
        TEXTS,
        partial(text_head, (size, spec.hidden)),
        part="text_model.",
        head_table={"head": "head"},
    )


def image_tower(
    config: Config, patches: PatchSpec, part: str = "", prefixes: Sequence[str] = ("",)
) -> TowerSpec:
    """Build the image tower.

    Args:
        config: The configuration of the image encoder.
        part: As in TowerSpec.
        prefixes: As in TowerSpec.
    """
    config.require("vision_use_head", True)
    spec = encoder_spec(
        config, hidden=768, layers=12, heads=12, ffn=3072, eps=1e-6, activation="gelu_pytorch_tanh"
    )
    head = partial(image_head, spec)
    return TowerSpec(
        spec, patches, IMAGES, head, part=part, prefixes=prefixes, head_table=IMAGE_HEAD
    )


def _patches(config: Config) -> PatchSpec:
    patch, grid = square_grid(config, 224, 16)
    return PatchSpec(config.size("hidden_size", 768), patch, grid, class_token=False)


def text_head(shape: tuple[int, int], state: State) -> ModelHead:
    check_shape(state, "head.weight", shape, SINGLE)
    return PooledHead(("lasttoken",), [HeadLinear(state, "head", "identity")])


def image_head(spec: EncoderSpec, state: State) -> ModelHead:
    return AttentionPooledHead(spec, state, SINGLE)
