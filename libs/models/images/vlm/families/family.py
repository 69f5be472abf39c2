"""The interface of a family of vision-language models, and its parts as data."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from tokenizers import Tokenizer
from torch import Tensor

from libs.models.images.families.clip import LAYERS
from libs.models.images.families.family import encoder_spec, square_grid
from libs.models.images.patches import PatchSpec
from libs.models.images.processing import ImageProcessing
from libs.models.images.vlm.blocks import BlockSpec
from libs.models.images.vlm.connectors import Connector
from libs.models.images.vlm.heads import Use
from libs.models.images.vlm.image_converter import ImageConverter
from libs.models.images.vlm.parts import Prompts
from libs.models.interface.head import ModelHead
from libs.models.layers.encoder import PackedEncoder
from libs.models.layers.spec import Config, EncoderSpec, Rope
from libs.models.text.processing.static import TokenWeights
from libs.models.text.tokenising.text import run_of_ones
from libs.models.weights import HeadRule, Rule

State = Mapping[str, Tensor]


@dataclass(frozen=True, slots=True)
class VlmFiles:
    """A checkpoint's directory and configurations.

    Attributes:
        config: config.json.
        processor: processor_config.json; empty if missing.
        images: preprocessor_config.json, or the same part of processor_config.json.
        use: Intended use of the model.
    """

    directory: Path
    config: Config
    processor: Config
    images: Config
    tokenizer: Tokenizer
    use: Use = ""


@dataclass(frozen=True, slots=True)
class VisionLanguageSpec:
    """The components of a vision-language model, as its checkpoint describes them.

    Attributes:
        text: The config.json of the text encoder.
        encoder: The layers of the image tower.
        patches: How the image tower divides an image into patches.
        processing: How images are resized and normalised for the image tower.
        connector: Builds the connector (image tower to text encoder) from the tensors of
            `VlmFamily.CONNECTOR`.
        heads: Builds the heads, by name, from the tensors of `VlmFamily.HEADS` and the text
        encoder.
        image_converter: Converts images to tower inputs, and counts their tokens.
        prompts: The texts before and after the parts of an item.
        mark: The image token, such as "<image>".
        adds_special_tokens: Whether the tokenizer's special tokens are added around `prompts`.
        spare_layers: Number of layers in the checkpoint beyond config.json's count. They predict
            further tokens (multi-token prediction) and are not loaded.
        unused: Name prefixes of tensors that the text encoder does not read.
        weights: Builds the weights of tokens from the tensors of `VlmFamily.HEADS`, for models that
            encode texts without a forward pass; None for other models.
    """

    text: Mapping[str, object]
    encoder: EncoderSpec
    patches: PatchSpec | BlockSpec
    processing: ImageProcessing
    connector: Callable[[State, torch.dtype], Connector]
    heads: Callable[[State, PackedEncoder], Mapping[str, ModelHead]]
    image_converter: ImageConverter
    prompts: Prompts
    mark: str
    adds_special_tokens: bool = False
    spare_layers: int = 0
    unused: tuple[str, ...] = ()
    weights: Callable[[State], TokenWeights] | None = None


class VlmFamily(Protocol):
    """A module of this folder. `NAMES` maps tensor names to the prefixes `text.`, `tower.`,
    `connector.` or `head.`
    """

    @property
    def MODEL_TYPES(self) -> tuple[str, ...]:
        """Values of config.json's model_type."""

    @property
    def NAMES(self) -> Mapping[str, str]:
        """Prefixes of names, without `vlm.` and `model.`, and their replacements. The first match
        applies.
        """

    @property
    def TOWER(self) -> Mapping[str, Rule]: ...

    @property
    def CONNECTOR(self) -> Mapping[str, HeadRule]: ...

    @property
    def HEADS(self) -> Mapping[str, HeadRule]: ...

    def spec(self, files: VlmFiles) -> VisionLanguageSpec:
        """Describe a checkpoint. Raises ModelBroken for an unsupported key."""


SIGLIP: dict[str, Rule] = LAYERS | {
    "embeddings.position_ids": None,
    "embeddings.patch_embedding": "embed.project",
    "embeddings.position_embedding.weight": "embed.position",
    "post_layernorm": "norm",
    "head.probe": None,
    "head.attention.in_proj_weight": None,
    "head.attention.in_proj_bias": None,
    "head.attention.out_proj": None,
    "head.layernorm": None,
    "head.mlp.fc1": None,
    "head.mlp.fc2": None,
}
"""Tensor names of SigLIP's image encoder without its pooling, which these models omit."""


def siglip(
    config: Config, *, hidden: int, layers: int, heads: int, ffn: int, image: int, patch: int
) -> tuple[EncoderSpec, PatchSpec]:
    """Describe SigLIP's image encoder, with transformers' defaults for missing keys."""
    spec = encoder_spec(
        config,
        hidden=hidden,
        layers=layers,
        heads=heads,
        ffn=ffn,
        eps=1e-6,
        activation="gelu_pytorch_tanh",
    )
    side, grid = square_grid(config, image, patch)
    return spec, PatchSpec(spec.hidden, side, grid, class_token=False)


def special_around(tokenizer: Tokenizer) -> tuple[str, str]:
    """Return the special tokens that a tokenizer puts before and after a text."""
    encoding = tokenizer.encode("a")
    before, after = (
        run_of_ones(encoding.special_tokens_mask),
        run_of_ones(reversed(encoding.special_tokens_mask)),
    )
    return "".join(encoding.tokens[:before]), "".join(
        encoding.tokens[len(encoding.tokens) - after :]
    )


def plane_rope(config: Config, key: str, size: int, base: float = 10_000.0) -> Rope:
    """Return the rotary positions of patches: half of a head's pairs turn with the row of the
    patch, half with its column.

    Args:
        key: Key of config.json that decides the size of a head.
        size: Numbers in a head. Raises ModelBroken unless it is a multiple of four.
    """
    if size % 4:
        raise config.unsupported(
            key, f"heads of {size} numbers cannot be rotated in two dimensions"
        )
    half = size // 2
    turned = 1.0 / (base ** (torch.arange(0, half, 2, dtype=torch.float32, device="cpu") / half))
    pairs = tuple(turned.tolist())
    return Rope(pairs * 2, axes=(0,) * len(pairs) + (1,) * len(pairs))
