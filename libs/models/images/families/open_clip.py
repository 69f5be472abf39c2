"""SigLIP in open_clip's layout, published by Marqo and timm: open_clip_config.json with one file of
tensors with timm's names.

Sizes that open_clip derives from timm's name of the image encoder are read from the tensors,
attention heads from the name.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from math import isqrt
from typing import Final

import torch
from PIL import Image

from libs.errors import ModelBroken
from libs.kinds.images.card import OPEN_CLIP, OPEN_CLIP_WEIGHTS
from libs.models.images.families.family import State, TowerSpec
from libs.models.images.families.siglip import image_head, text_head
from libs.models.images.patches import PatchSpec
from libs.models.images.processing import MAX_COLOUR, MIN_SCALE, ImageProcessing
from libs.models.interface.head import ModelHead
from libs.models.layers.spec import Config, EmbeddingSpec, EncoderSpec, LayerSpec
from libs.models.weights import HeadRule, Rule, TensorFile

CONFIG: Final = OPEN_CLIP
WEIGHTS: Final = OPEN_CLIP_WEIGHTS

REST: dict[str, HeadRule] = {"logit_scale": "logit_scale", "logit_bias": "logit_bias"}

IMAGES: dict[str, Rule] = {
    "patch_embed.proj": "embed.project",
    "pos_embed": "embed.position",
    "blocks.{}.norm1": "layers.{}.attn_norm",
    "blocks.{}.attn.qkv": "layers.{}.attn.qkv",
    "blocks.{}.attn.proj": "layers.{}.attn.out",
    "blocks.{}.norm2": "layers.{}.ffn_norm",
    "blocks.{}.mlp.fc1": "layers.{}.ffn.up",
    "blocks.{}.mlp.fc2": "layers.{}.ffn.down",
    "norm": "norm",
}

IMAGE_HEAD: dict[str, HeadRule] = {
    "attn_pool.latent": "probe",
    "attn_pool.q": "q",
    "attn_pool.kv": "kv",
    "attn_pool.proj": "out_proj",
    "attn_pool.norm": "norm",
    "attn_pool.mlp.fc1": "up",
    "attn_pool.mlp.fc2": "down",
}

TEXTS: dict[str, Rule] = {
    "token_embedding": "embed.token",
    "positional_embedding": "embed.position.weight",
    "transformer.resblocks.{}.ln_1": "layers.{}.attn_norm",
    "transformer.resblocks.{}.attn.in_proj": "layers.{}.attn.qkv",
    "transformer.resblocks.{}.attn.out_proj": "layers.{}.attn.out",
    "transformer.resblocks.{}.ln_2": "layers.{}.ffn_norm",
    "transformer.resblocks.{}.mlp.c_fc": "layers.{}.ffn.up",
    "transformer.resblocks.{}.mlp.c_proj": "layers.{}.ffn.down",
    "ln_final": "norm",
}

# By the size in timm's names, such as vit_base_patch16_siglip_224 and
# vit_so400m_patch14_siglip_384.
_HEADS: Final = {"base": 12, "large": 16, "so400m": 16, "giantopt": 16}
_MAX_SIDE: Final = 1 << 14
_FILTERS: Final = {
    "nearest": Image.Resampling.NEAREST,
    "bilinear": Image.Resampling.BILINEAR,
    "bicubic": Image.Resampling.BICUBIC,
    "lanczos": Image.Resampling.LANCZOS,
}


def tensor_name(name: str) -> str:
    """Normalise PyTorch's fused projections, which have other name endings than all other
    tensors.
    """
    return name.replace(".in_proj_weight", ".in_proj.weight").replace(
        ".in_proj_bias", ".in_proj.bias"
    )


def towers(config: Config, tensors: TensorFile) -> dict[str, TowerSpec]:
    """Build the towers of open_clip_config.json. Raises ModelBroken for other models than SigLIP.

    `tensors`: renamed by `tensor_name`.
    """
    model = config.part("model_cfg")
    images, texts = model.part("vision_cfg"), model.part("text_cfg")
    return {"dense": _texts(texts, model.size("embed_dim")), "image": _images(images, tensors)}


def processing(config: Config) -> ImageProcessing:
    """Read the image processing of open_clip_config.json, with open_clip's defaults for SigLIP."""
    part = config.part("preprocess_cfg")
    sides = (
        part.numbers("size", (224.0, 224.0))
        if not part.is_number("size")
        else (part.number("size"),) * 2
    )
    height, width = (int(side) for side in sides)
    if not 1 <= min(height, width) <= max(height, width) <= _MAX_SIDE:
        raise part.unsupported("size", f"1 to {_MAX_SIDE:,} pixels are supported")
    mode = part.text("resize_mode", "squash")
    if mode not in ("squash", "shortest") or (mode == "shortest" and height != width):
        raise part.unsupported("resize_mode", "supported are squash, and shortest for squares")
    name = part.text("interpolation", "bicubic")
    if name not in _FILTERS:
        raise part.unsupported("interpolation", f"supported are {', '.join(_FILTERS)}")
    return ImageProcessing(
        size=(height, width) if mode == "squash" else height,
        resample=_FILTERS[name],
        crop=None if mode == "squash" else (height, width),
        scale=1 / 255,
        mean=part.numbers("mean", (0.5, 0.5, 0.5), least=-MAX_COLOUR, most=MAX_COLOUR),
        std=part.numbers("std", (0.5, 0.5, 0.5), least=MIN_SCALE, most=MAX_COLOUR),
    )


def _spec(hidden: int, heads: int, ffn: int, layers: int) -> EncoderSpec:
    return EncoderSpec(
        hidden=hidden,
        heads=heads,
        head_size=hidden // heads,
        ffn=ffn,
        layers=(LayerSpec(),) * layers,
        norm="pre",
        norm_eps=1e-6,
        activation="gelu_tanh",
    )


def _texts(config: Config, size: int) -> TowerSpec:
    config.require("no_causal_mask", True)
    config.require("pool_type", "last")
    config.require("proj_bias", True)
    config.part("norm_kwargs").require("eps", 1e-6)
    config.part("act_kwargs").require("approximate", "tanh")
    hidden = config.size("width")
    heads = config.head_count("heads", hidden)
    ffn = int(hidden * config.ratio("mlp_ratio", 4.0))
    return TowerSpec(
        _spec(hidden, heads, ffn, config.layers("layers")),
        EmbeddingSpec(
            config.size("vocab_size"), hidden, config.size("context_length", 64), norm_eps=None
        ),
        TEXTS,
        partial(text_head, (size, hidden)),
        part="text.",
        head_table={"text_projection": "head"},
    )


def _images(config: Config, tensors: TensorFile) -> TowerSpec:
    name = config.text("timm_model_name")
    heads = next(
        (count for size, count in _HEADS.items() if name.startswith(f"vit_{size}_patch")), None
    )
    if heads is None or "siglip" not in name:
        raise config.unsupported(
            "timm_model_name", f"supported are SigLIP's of the sizes {', '.join(_HEADS)}"
        )
    config.require("timm_pool", "map")
    config.require("timm_proj", "none")
    own = tensors.split("visual.trunk.")[0]
    hidden, _, side, _ = _shape(own, "patch_embed.proj.weight", 4)
    ffn, _ = _shape(own, "blocks.0.mlp.fc1.weight", 2)
    _, places, _ = _shape(own, "pos_embed", 3)
    layers = len({stored.split(".")[1] for stored in own.names() if stored.startswith("blocks.")})
    count = isqrt(places)
    if hidden % heads or side < 1 or count**2 != places:
        raise config.unsupported("timm_model_name", "the tensors belong to another model")
    spec = _spec(hidden, heads, ffn, layers)
    return TowerSpec(
        spec,
        PatchSpec(hidden, side, (count, count), class_token=False),
        IMAGES,
        partial(_head, spec),
        part="visual.trunk.",
        head_table=IMAGE_HEAD,
    )


def _shape(tensors: TensorFile, name: str, dimensions: int) -> tuple[int, ...]:
    if name not in tensors.names():
        raise ModelBroken(f"{WEIGHTS}: tensor 'visual.backbone.{name}' is missing")
    shape = tensors.shape(name)
    if len(shape) != dimensions:
        raise ModelBroken(
            f"{WEIGHTS}: tensor 'visual.backbone.{name}' has shape {list(shape)}; {dimensions} "
            "dimensions are needed"
        )
    return shape


def _head(spec: EncoderSpec, state: State) -> ModelHead:
    """Join the projections of the query and of keys and values, which timm stores separately."""
    fused: Mapping[str, torch.Tensor] = {
        f"in_proj.{end}": torch.cat([state[f"q.{end}"], state[f"kv.{end}"]])
        for end in ("weight", "bias")
        if f"q.{end}" in state
    }
    return image_head(spec, {**state, **fused})
