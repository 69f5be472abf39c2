"""GLM-OCR (`glm_ocr`) reads pages: a ViT with RMSNorm and a convolution that merges squares of
patches, followed by a GLM with M-RoPE.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from libs.kernels.linear.packed import PackedLinear
from libs.models.images.patches import PatchSpec
from libs.models.images.vlm.blocks import BlockSpec
from libs.models.images.vlm.connectors import Merger, Mergers, read_linear
from libs.models.images.vlm.families.family import State, VisionLanguageSpec, VlmFiles, plane_rope
from libs.models.images.vlm.heads import vectors_of_tokens
from libs.models.images.vlm.parts import Prompts, TextFrame
from libs.models.images.vlm.smart import SmartResize
from libs.models.layers.spec import Config, EncoderSpec, LayerSpec
from libs.models.text.heads.linear import check_shape
from libs.models.weights import SINGLE, HeadRule, Rule

MODEL_TYPES = ("glm_ocr",)
MARK: Final = "<|image|>"
TEXT: Final = f"<|begin_of_image|>{MARK}<|end_of_image|>"
"""Text for an image in a prompt."""

NAMES = {
    "visual.post_layernorm.": "tower.norm.",
    "visual.merger.": "connector.",
    "visual.downsample.": "connector.downsample.",
    "visual.": "tower.",
    "language_model.": "text.",
    "lm_head.": "head.words.",
}
TOWER: dict[str, Rule] = {
    "patch_embed.proj": "embed.project",
    "blocks.{}.norm1": "layers.{}.attn_norm",
    "blocks.{}.norm2": "layers.{}.ffn_norm",
    "blocks.{}.attn.qkv": "layers.{}.attn.qkv",
    "blocks.{}.attn.q_norm": "layers.{}.attn.q_norm",
    "blocks.{}.attn.k_norm": "layers.{}.attn.k_norm",
    "blocks.{}.attn.proj": "layers.{}.attn.out",
    "blocks.{}.mlp.gate_proj": ("layers.{}.ffn.up", 0),
    "blocks.{}.mlp.up_proj": ("layers.{}.ffn.up", 1),
    "blocks.{}.mlp.down_proj": "layers.{}.ffn.down",
    "norm": "norm",
}
CONNECTOR: dict[str, HeadRule] = {
    "downsample": "merge",
    "proj": "proj",
    "post_projection_norm": "norm",
    "gate_proj": "gate",
    "up_proj": "up",
    "down_proj": "down",
}
HEADS: dict[str, HeadRule] = {"words": None}

_SECTIONS: Final = [8, 12, 12]
_NORM_EPS: Final = 1e-5
_FRAMES: Final = 2  # a still image counts twice in the limits of its pixels
_LEAST, _MOST = 112 * 112, 28 * 28 * 15_000


def spec(files: VlmFiles) -> VisionLanguageSpec:
    """Describe a checkpoint. Raises ModelBroken for an unsupported key."""
    texts, images = files.config.part("text_config"), files.config.part("vision_config")
    side = images.size("spatial_merge_size", 2)
    encoder, patches = _tower(images)
    image_converter = SmartResize.from_config(
        files.images, patches, side, plain=False, mark=TEXT, pixels=(_LEAST, _MOST), enlarges="both"
    )
    image_converter = replace(
        image_converter,
        least=-(-image_converter.least // _FRAMES),
        most=image_converter.most // _FRAMES,
    )
    return VisionLanguageSpec(
        text=_text(texts),
        encoder=encoder,
        patches=BlockSpec(patches, side, frames=images.size("temporal_patch_size", 2)),
        processing=image_converter.processing,
        connector=partial(_merger, encoder.hidden, side, images.size("out_hidden_size", 1536)),
        heads=vectors_of_tokens,
        image_converter=image_converter,
        prompts=Prompts(TextFrame(), TextFrame(), TextFrame()),
        mark=MARK,
        spare_layers=1,
    )


def _text(texts: Config) -> dict[str, object]:
    rope: dict[str, object] = {
        "rope_theta": texts.number("rope_theta", 10_000.0),
        "mrope_section": _SECTIONS,
        **texts.part("rope_parameters").values,
    }
    return {
        "rms_norm_eps": 1e-5,
        **texts.values,
        "model_type": "glm_ocr_text",
        "rope_parameters": rope,
    }


def _tower(config: Config) -> tuple[EncoderSpec, PatchSpec]:
    config.require("in_channels", 3)
    hidden = config.size("hidden_size", 1024)
    heads = config.head_count("num_heads", hidden, 16)
    size = hidden // heads
    base = (
        config.part("rope_parameters").number("rope_theta", 10_000.0)
        if config.has("rope_parameters")
        else 10_000.0
    )
    bias = config.flag("attention_bias", True)
    spec = EncoderSpec(
        hidden=hidden,
        heads=heads,
        head_size=size,
        ffn=config.size("intermediate_size", 4096),
        layers=(LayerSpec(rope=plane_rope(config, "num_heads", size, base)),)
        * config.layers("depth", 24),
        norm="pre",
        norm_eps=config.number("rms_norm_eps", 1e-5),
        norm_kind="rms",
        qk_norm=True,
        gated=True,
        activation=config.activation("hidden_act", "silu"),
        qkv_bias=bias,
        out_bias=bias,
        up_bias=bias,
        down_bias=bias,
    )
    return spec, PatchSpec(
        hidden, config.size("patch_size", 14), (0, 0), class_token=False, resampled=True
    )


class _GatedMerger(Merger):
    """Maps the states of a square through a convolution and a product (merged here), a norm with
    GELU, and a gated feed-forward.
    """

    def __init__(
        self,
        merge: PackedLinear,
        norm: nn.LayerNorm,
        gate: PackedLinear,
        up: PackedLinear,
        down: PackedLinear,
    ) -> None:
        super().__init__(up, down, norm)
        self.merge, self.gate = merge, gate

    def forward(self, hidden: Tensor) -> Tensor:
        """Map [patches, hidden] to [squares, hidden of the text encoder]."""
        x = self.merge.forward(hidden.reshape(-1, self.merge.inputs))
        x = F.gelu(x if self.norm is None else self.norm(x))
        return self.down.forward(F.silu(self.gate.forward(x)) * self.up.forward(x))


def _merger(hidden: int, side: int, outputs: int, state: State, dtype: torch.dtype) -> Mergers:
    check_shape(state, "merge.weight", (outputs, hidden, side, side), SINGLE)
    check_shape(state, "merge.bias", (outputs,), SINGLE)
    check_shape(state, "proj.weight", (outputs, outputs), SINGLE)
    for ending in ("weight", "bias"):
        check_shape(state, f"norm.{ending}", (outputs,), SINGLE)
    project = state["proj.weight"].float()
    patches = state["merge.weight"].float().permute(0, 2, 3, 1).reshape(outputs, -1)
    both = {"merge.weight": project @ patches, "merge.bias": project @ state["merge.bias"].float()}
    merge = read_linear(both, "merge", hidden * side**2, outputs, dtype, SINGLE, bias=True)
    inner = len(state["gate.weight"])
    gate, up = (
        read_linear(state, name, outputs, inner, dtype, SINGLE, bias=False)
        for name in ("gate", "up")
    )
    norm = nn.LayerNorm(outputs, eps=_NORM_EPS, device="meta")
    norm.load_state_dict(
        {ending: state[f"norm.{ending}"].to(dtype) for ending in ("weight", "bias")}, assign=True
    )
    down = read_linear(state, "down", inner, outputs, dtype, SINGLE, bias=False)
    return Mergers(_GatedMerger(merge, norm.requires_grad_(False), gate, up, down))
