"""DINOv3 (arXiv 2508.10104): a ViT with registers that rotates only patches, by their centres'
coordinates in the image.

It has no table of positions. Keys have no bias; in the largest model, queries and values have none
either. Large models have a gated feed-forward.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial

import torch

from libs.models.images.families.family import TowerSpec, encoder_spec, square_grid
from libs.models.images.families.vit import class_token
from libs.models.images.patches import PatchSpec
from libs.models.layers.spec import Config, LayerSpec, Rope
from libs.models.weights import HeadRule, Rule, TensorFile

MODEL_TYPES = ("dinov3_vit",)
PROCESSOR = "DINOv3ViTImageProcessor"
REST: dict[str, HeadRule] = {}

_PROJECTIONS = ("query", "key", "value")

WEIGHTS: dict[str, Rule] = {
    "embeddings.cls_token": "embed.class_token",
    "embeddings.mask_token": None,
    "embeddings.patch_embeddings": "embed.project",
    "embeddings.register_tokens": "embed.registers",
    "layer.{}.attention.q_proj": ("layers.{}.attn.qkv", 0),
    "layer.{}.attention.k_proj": ("layers.{}.attn.qkv", 1),
    "layer.{}.attention.v_proj": ("layers.{}.attn.qkv", 2),
    "layer.{}.attention.o_proj": "layers.{}.attn.out",
    "layer.{}.norm1": "layers.{}.attn_norm",
    "layer.{}.norm2": "layers.{}.ffn_norm",
    "layer.{}.mlp.down_proj": "layers.{}.ffn.down",
    "norm": "norm",
}
PLAIN: dict[str, Rule] = {"layer.{}.mlp.up_proj": "layers.{}.ffn.up"}
GATED: dict[str, Rule] = {
    "layer.{}.mlp.gate_proj": ("layers.{}.ffn.up", 0),
    "layer.{}.mlp.up_proj": ("layers.{}.ffn.up", 1),
}
NO_REGISTERS: dict[str, Rule] = {"embeddings.register_tokens": None}

SCALES: dict[str, HeadRule] = {
    "layer.{}.layer_scale1": "layers.{}.attn",
    "layer.{}.layer_scale2": "layers.{}.ffn",
}


def towers(config: Config) -> dict[str, TowerSpec]:
    gated, mlp_bias = config.flag("use_gated_mlp", False), config.flag("mlp_bias", True)
    biased = {name: config.flag(f"{name}_bias", name != "key") for name in _PROJECTIONS}
    spec = encoder_spec(
        config, hidden=384, layers=12, heads=6, ffn=1536, eps=1e-5, activation="gelu"
    )
    spec = replace(
        spec,
        layers=(LayerSpec(rope=_rope(config, spec.head_size)),) * len(spec.layers),
        gated=gated,
        qkv_bias=any(biased.values()),
        out_bias=config.flag("proj_bias", True),
        up_bias=mlp_bias,
        down_bias=mlp_bias,
    )
    patch, grid = square_grid(config, 224, 16)
    registers = config.integer("num_register_tokens", 0)
    if not 0 <= registers <= _MAX_REGISTERS:
        raise config.unsupported("num_register_tokens", f"0 to {_MAX_REGISTERS} are supported")
    absent = [name for name, present in biased.items() if not present] if spec.qkv_bias else []
    return {
        "image": TowerSpec(
            spec,
            PatchSpec(spec.hidden, patch, grid, table=False, registers=registers),
            WEIGHTS | (GATED if gated else PLAIN) | ({} if registers else NO_REGISTERS),
            class_token,
            head_table=SCALES,
            layer_scale=True,
            stored=partial(_stored, absent, len(spec.layers), spec.hidden),
        )
    }


_MAX_REGISTERS = 1 << 10


def _rope(config: Config, size: int) -> Rope:
    """Return transformers' DINOv3ViTRopePositionEmbedding: half of a head's pairs rotate by the
    row, half by the column.

    The angles are 2 pi times a coordinate of -1 to 1 times a frequency.
    """
    if size % 4:
        raise config.unsupported(
            "num_attention_heads",
            f"heads of {size} numbers cannot be split into pairs for rows and columns",
        )
    base = config.positive("rope_theta", 100.0)
    frequencies = (
        2 * math.pi / base ** torch.arange(0, 1, 4 / size, dtype=torch.float32, device="cpu")
    ).tolist()
    count = len(frequencies)
    return Rope((*frequencies, *frequencies), axes=(0,) * count + (1,) * count)


def _stored(absent: list[str], layers: int, hidden: int, tensors: TensorFile) -> TensorFile:
    """Rename tensors to the names of files on the hub, also from transformers 5's names. Biases in
    `absent` become zeros.
    """
    named = tensors.renamed(lambda name: name.removeprefix("model."))
    return named.with_zeros(
        {
            f"layer.{n}.attention.{name[0]}_proj.bias": (hidden,)
            for n in range(layers)
            for name in absent
        }
    )
