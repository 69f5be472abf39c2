"""PaddleOCR-VL (arXiv 2510.14528, `paddleocr_vl`) reads texts, tables, formulas and charts of a
page.

SigLIP with positions in two dimensions and merged squares of patches is followed by a Llama-like
ERNIE with positions in three (M-RoPE).
"""

from __future__ import annotations

from functools import partial
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from libs.models.images.patches import PatchSpec
from libs.models.images.vlm.blocks import BlockSpec
from libs.models.images.vlm.connectors import Merger, Mergers, read_linear
from libs.models.images.vlm.families.family import (
    SIGLIP,
    State,
    VisionLanguageSpec,
    VlmFiles,
    plane_rope,
)
from libs.models.images.vlm.heads import vectors_of_tokens
from libs.models.images.vlm.parts import Prompts, TextFrame
from libs.models.images.vlm.smart import SmartResize
from libs.models.layers.spec import Config, EncoderSpec, LayerSpec
from libs.models.text.heads.linear import check_shape
from libs.models.weights import SINGLE, HeadRule, Rule

MODEL_TYPES = ("paddleocr_vl",)
MARK: Final = "<|IMAGE_PLACEHOLDER|>"
TEXT: Final = f"<|IMAGE_START|>{MARK}<|IMAGE_END|>"
"""Text for an image in a prompt."""

NAMES = {
    "visual.vision_model.": "tower.",
    "projector.": "connector.",
    "mlp_AR.": "connector.",  # in PaddlePaddle's layout
    "language_model.": "text.",
    "embed_tokens.": "text.embed_tokens.",
    "layers.": "text.layers.",
    "norm.": "text.norm.",
    "lm_head.": "head.words.",
}
TOWER: dict[str, Rule] = SIGLIP | {"embeddings.packing_position_embedding": None}
CONNECTOR: dict[str, HeadRule] = {"pre_norm": "norm", "linear_1": "up", "linear_2": "down"}
HEADS: dict[str, HeadRule] = {"words": None}

_SECTIONS: Final = [16, 24, 24]
_EPS: Final = 1e-5  # of the norm before the merging layers
_LEAST, _MOST = 384 * 384, 1536 * 1536


def spec(files: VlmFiles) -> VisionLanguageSpec:
    """Describe a checkpoint. Raises ModelBroken for an unsupported key."""
    config = files.config
    # Older configurations mix the text encoder's keys with the others.
    texts, images = (
        config.part("text_config") if config.has("text_config") else config,
        config.part("vision_config"),
    )
    side = images.size("spatial_merge_size", 2)
    encoder, patches = _tower(images)
    table = images.size("image_size", 384) // patches.patch
    image_converter = SmartResize.from_config(
        files.images, patches, side, plain=False, mark=TEXT, pixels=(_LEAST, _MOST), enlarges="each"
    )
    return VisionLanguageSpec(
        text=_text(texts),
        encoder=encoder,
        patches=BlockSpec(patches, side, frames=0, table=table, corners=False),
        processing=image_converter.processing,
        connector=partial(_merger, encoder.hidden, side**2, texts.size("hidden_size")),
        heads=vectors_of_tokens,
        image_converter=image_converter,
        prompts=Prompts(TextFrame(), TextFrame(), TextFrame()),
        mark=MARK,
    )


def _text(texts: Config) -> dict[str, object]:
    """Convert to Llama's config.json."""
    texts.require("use_bias", False)
    key = "rope_scaling" if texts.has("rope_scaling") else "rope_parameters"
    rope = {
        "rope_theta": texts.number("rope_theta", 500_000.0),
        "mrope_section": _SECTIONS,
        **texts.part(key).values,
    }
    values = {
        name: value
        for name, value in texts.values.items()
        if name not in ("rope_scaling", "rope_parameters", "rope_theta")
    }
    values = {"num_key_value_heads": 2, "head_dim": 128, "rms_norm_eps": 1e-5} | values
    return values | {
        "model_type": "llama",
        "rope_parameters": rope,
        "attention_bias": False,
        "mlp_bias": False,
    }


def _tower(config: Config) -> tuple[EncoderSpec, PatchSpec]:
    config.require("num_channels", 3)
    hidden = config.size("hidden_size", 1152)
    heads = config.head_count("num_attention_heads", hidden, 16)
    size = hidden // heads
    base = (
        config.part("rope_parameters").number("rope_theta", 10_000.0)
        if config.has("rope_parameters")
        else 10_000.0
    )
    rope = plane_rope(config, "num_attention_heads", size, base)
    spec = EncoderSpec(
        hidden=hidden,
        heads=heads,
        head_size=size,
        ffn=config.size("intermediate_size", 4304),
        layers=(LayerSpec(rope=rope),) * config.layers("num_hidden_layers", 27),
        norm="pre",
        norm_eps=config.number("layer_norm_eps", 1e-6),
        activation=config.activation("hidden_act", "gelu_pytorch_tanh"),
    )
    return spec, PatchSpec(
        hidden, config.size("patch_size", 14), (0, 0), class_token=False, resampled=True
    )


class _PatchNorm(nn.Module):
    """LayerNorm of each patch's states within the states of a square."""

    def __init__(self, weight: Tensor, bias: Tensor) -> None:
        super().__init__()
        self.weight, self.bias = (
            nn.Parameter(each, requires_grad=False) for each in (weight, bias)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Map [squares, patches * hidden] to the same shape."""
        return F.layer_norm(
            x.view(len(x), -1, len(self.weight)), self.weight.shape, self.weight, self.bias, _EPS
        ).flatten(1)


def _merger(hidden: int, square: int, outputs: int, state: State, dtype: torch.dtype) -> Mergers:
    for ending in ("weight", "bias"):
        check_shape(state, f"norm.{ending}", (hidden,), SINGLE)
    up = read_linear(
        state, "up", hidden * square, hidden * square, dtype, SINGLE, bias=True, gelu=True
    )
    down = read_linear(state, "down", hidden * square, outputs, dtype, SINGLE, bias=True)
    return Mergers(
        Merger(up, down, _PatchNorm(state["norm.weight"].to(dtype), state["norm.bias"].to(dtype)))
    )
