"""LightOnOCR (`lighton_ocr`) reads pages: Pixtral's tower with merged squares of patches, followed
by Qwen3.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Final

import numpy as np
import torch
from PIL import Image

from libs.errors import InvalidInput
from libs.models.images.decoding import Pixels
from libs.models.images.patches import PatchSpec
from libs.models.images.processing import ImageProcessing
from libs.models.images.resizing import height_and_width, resized
from libs.models.images.vlm.blocks import BlockSpec
from libs.models.images.vlm.connectors import Merger, Mergers, read_linear
from libs.models.images.vlm.families.family import State, VisionLanguageSpec, VlmFiles
from libs.models.images.vlm.heads import vectors_of_tokens
from libs.models.images.vlm.image_converter import ImageTokens
from libs.models.images.vlm.parts import Prompts, TextFrame
from libs.models.layers.spec import Config, EncoderSpec, LayerSpec, Rope
from libs.models.text.heads.linear import check_shape
from libs.models.weights import SINGLE, HeadRule, Rule

MODEL_TYPES = ("lighton_ocr",)
MARK: Final = "<|image_pad|>"

NAMES = {
    "vision_encoder.": "tower.",
    "vision_projection.norm.": "tower.norm.",
    "vision_projection.": "connector.",
    "language_model.": "text.",
    "lm_head.": "head.words.",
}

_LAYER = "transformer.layers.{}"
TOWER: dict[str, Rule] = {
    "patch_conv": "embed.project",
    "ln_pre": "embed.norm",
    f"{_LAYER}.attention_norm": "layers.{}.attn_norm",
    f"{_LAYER}.ffn_norm": "layers.{}.ffn_norm",
    f"{_LAYER}.attention.q_proj": ("layers.{}.attn.qkv", 0),
    f"{_LAYER}.attention.k_proj": ("layers.{}.attn.qkv", 1),
    f"{_LAYER}.attention.v_proj": ("layers.{}.attn.qkv", 2),
    f"{_LAYER}.attention.o_proj": "layers.{}.attn.out",
    f"{_LAYER}.feed_forward.gate_proj": ("layers.{}.ffn.up", 0),
    f"{_LAYER}.feed_forward.up_proj": ("layers.{}.ffn.up", 1),
    f"{_LAYER}.feed_forward.down_proj": "layers.{}.ffn.down",
    "norm": "norm",
}
CONNECTOR: dict[str, HeadRule] = {
    "patch_merger.merging_layer": "merge",
    "linear_1": "up",
    "linear_2": "down",
}
HEADS: dict[str, HeadRule] = {"words": None}

_EPS: Final = 1e-5
_THINNEST: Final = 200


@dataclass(frozen=True, slots=True)
class LongestSide:
    """Scales an image down to a longer side of `longest` pixels, then rounds sides up to multiples
    of `multiple`.

    Equals transformers' PixtralImageProcessorPil: proportions are kept, scaled sides rounded down.
    Pixels beyond the last whole `square` have patches, but no row.
    """

    processing: ImageProcessing
    patches: PatchSpec
    longest: int
    square: int
    multiple: int

    def tokens_of_size(self, height: int, width: int, field: str) -> ImageTokens:
        across, down = width, height
        height, width = self._size(height, width, field)
        if min(height, width) < self.square:
            raise InvalidInput(f"the image is too small: {across:,} x {down:,} pixels", field=field)
        rows = (height // self.square) * (width // self.square)
        return ImageTokens(MARK, (rows,), self.patches.count_tokens(height, width))

    def apply(self, image: Image.Image | Pixels, field: str) -> tuple[Pixels, ...]:
        pixels = resized(
            image, self._size(*height_and_width(image), field), self.processing.resample
        )
        return (np.ascontiguousarray(pixels),)

    def _size(self, height: int, width: int, field: str) -> tuple[int, int]:
        if max(height, width) / min(height, width) > _THINNEST:
            raise InvalidInput(f"the image is too thin: {width:,} x {height:,} pixels", field=field)
        ratio = max(height / self.longest, width / self.longest)
        if ratio > 1:
            height, width = max(1, int(height / ratio)), max(1, int(width / ratio))
        return -(-height // self.multiple) * self.multiple, -(
            -width // self.multiple
        ) * self.multiple


def spec(files: VlmFiles) -> VisionLanguageSpec:
    """Describe a checkpoint. Raises ModelBroken for an unsupported key."""
    texts, images = files.config.part("text_config"), files.config.part("vision_config")
    side = files.config.size("spatial_merge_size", 2)
    encoder, patches = _tower(images, texts.number("rms_norm_eps", 1e-6))
    image_converter = LongestSide(
        processing=ImageProcessing.unsized(
            files.images, "CLIPImageProcessor", Image.Resampling.BICUBIC
        ),
        patches=patches,
        longest=files.images.part("size").size("longest_edge", 1540),
        square=patches.patch * side,
        multiple=_multiple(files.images, patches.patch),
    )
    width = texts.size("hidden_size")
    return VisionLanguageSpec(
        text={**texts.values, "model_type": "qwen3"},
        encoder=encoder,
        patches=BlockSpec(patches, side, frames=0, norm_eps=_EPS),
        processing=image_converter.processing,
        connector=partial(_merger, encoder.hidden, side**2, width),
        heads=vectors_of_tokens,
        image_converter=image_converter,
        prompts=Prompts(TextFrame(), TextFrame(), TextFrame()),
        mark=MARK,
    )


def _multiple(config: Config, patch: int) -> int:
    """Return the processor's patch_size: a number, or height and width. Published models have the
    tower's there, not a square's.
    """
    if not config.has("patch_size"):
        return patch
    value = config.values["patch_size"]
    side = (
        config.part("patch_size").size("height")
        if isinstance(value, dict)
        else config.size("patch_size")
    )
    if side % patch or (
        isinstance(value, dict) and config.part("patch_size").size("width") != side
    ):
        raise config.unsupported(
            "patch_size",
            f"it must be a patch's side, {patch} pixels",
        )
    return side


def _tower(config: Config, final_eps: float) -> tuple[EncoderSpec, PatchSpec]:
    config.require("model_type", "pixtral")
    config.require("num_channels", 3)
    hidden = config.size("hidden_size", 1024)
    heads = config.head_count("num_attention_heads", hidden, 16)
    size = config.size("head_dim", hidden // heads)
    if size % 4:
        raise config.unsupported(
            "head_dim", f"heads of {size} numbers cannot be rotated in two dimensions"
        )
    base = (
        config.part("rope_parameters").positive("rope_theta", 10_000.0)
        if config.has("rope_parameters")
        else config.positive("rope_theta", 10_000.0)
    )
    turned = (
        1.0 / (base ** (torch.arange(0, size, 2, dtype=torch.float32, device="cpu") / size))
    ).tolist()
    rope = Rope((*turned[0::2], *turned[1::2]), axes=(0,) * (size // 4) + (1,) * (size // 4))
    spec = EncoderSpec(
        hidden=hidden,
        heads=heads,
        head_size=size,
        ffn=config.size("intermediate_size", 4096),
        layers=(LayerSpec(rope=rope),) * config.layers("num_hidden_layers", 24),
        norm="pre",
        norm_eps=_EPS,
        final_eps=final_eps,
        norm_kind="rms",
        gated=True,
        activation=config.activation("hidden_act", "silu"),
        qkv_bias=False,
        out_bias=False,
        up_bias=False,
        down_bias=False,
    )
    return spec, PatchSpec(
        hidden, config.size("patch_size", 14), (0, 0), class_token=False, bias=False, resampled=True
    )


def _merger(hidden: int, square: int, outputs: int, state: State, dtype: torch.dtype) -> Mergers:
    """Build the merger. The merging layer and the next have nothing between them and become one
    product.

    The stored layer orders a square's patches within each channel; ours orders channels within each
    patch.
    """
    check_shape(state, "merge.weight", (hidden, hidden * square), SINGLE)
    check_shape(state, "up.weight", (outputs, hidden), SINGLE)
    merge = (
        state["merge.weight"]
        .float()
        .view(hidden, hidden, square)
        .transpose(1, 2)
        .reshape(hidden, -1)
    )
    both: Mapping[str, torch.Tensor] = {
        "up.weight": state["up.weight"].float() @ merge,
        "down.weight": state["down.weight"],
    }
    up = read_linear(both, "up", hidden * square, outputs, dtype, SINGLE, bias=False, gelu=True)
    return Mergers(
        Merger(up, read_linear(both, "down", outputs, outputs, dtype, SINGLE, bias=False))
    )
