"""SigLIP and SigLIP 2 of a fixed size (arXiv 2303.15343, 2502.14786): images and texts in one space, compared by a sigmoid.

Texts are always padded to the longest there is, and attend to the padding: the models were trained so.
"""

from __future__ import annotations

from functools import partial

from libs.models.head import ModelHead
from libs.models.images.families.clip import LAYERS
from libs.models.images.families.family import State, TowerSpec, encoder_spec, square_grid
from libs.models.images.heads import AttentionPooledHead
from libs.models.images.patches import PatchSpec
from libs.models.layers.spec import Config, EmbeddingSpec, EncoderSpec
from libs.models.text.heads.linear import HeadLinear, check_shape
from libs.models.text.heads.pooled import PooledHead
from libs.models.weights import SINGLE, HeadRule, Rule

MODEL_TYPES = ("siglip",)
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
    """Texts are pooled at their last position, which is mostly padding; images by one query that attends to all patches."""
    texts, images = config.part("text_config"), config.part("vision_config")
    images.require("vision_use_head", True)
    text = encoder_spec(texts, hidden=768, layers=12, heads=12, ffn=3072, eps=1e-6, activation="gelu_pytorch_tanh")
    image = encoder_spec(images, hidden=768, layers=12, heads=12, ffn=3072, eps=1e-6, activation="gelu_pytorch_tanh")
    patch, grid = square_grid(images, 224, 16)
    positions = texts.size("max_position_embeddings", 64)
    size = texts.size("projection_size", text.hidden)
    return {
        "dense": TowerSpec(
            text,
            EmbeddingSpec(texts.size("vocab_size", 32000), text.hidden, positions, norm_eps=None),
            TEXTS,
            partial(_text_head, (size, text.hidden)),
            part="text_model.",
            head_table={"head": "head"},
        ),
        "image": TowerSpec(
            image,
            PatchSpec(image.hidden, patch, grid, class_token=False),
            IMAGES,
            partial(_image_head, image),
            part="vision_model.",
            head_table=IMAGE_HEAD,
        ),
    }


def _text_head(shape: tuple[int, int], state: State) -> ModelHead:
    check_shape(state, "head.weight", shape, SINGLE)
    return PooledHead(("lasttoken",), [HeadLinear(state, "head", "identity")])


def _image_head(spec: EncoderSpec, state: State) -> ModelHead:
    return AttentionPooledHead(spec, state, SINGLE)
