"""The interface of a family of image models, and its towers as data."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from libs.models.images.patches import PatchSpec
from libs.models.interface.head import ModelHead
from libs.models.layers.spec import Config, EmbeddingSpec, EncoderSpec, LayerSpec
from libs.models.weights import HeadRule, Rule, TensorFile

State = Mapping[str, Tensor]


@dataclass(frozen=True, slots=True)
class TowerSpec:
    """An encoder of a checkpoint and its head, as data.

    Attributes:
        input: Image input, or the input of texts in the same space.
        part: Prefix of its tensors' names in a checkpoint of several encoders, followed by one of
            `prefixes`.
        weights: Rules of the encoder's tensors.
        head_table: Rules of the head's tensors.
        head: Builds the head from the tensors of `head_table` and those outside the encoders.
        layer_scale: `head_table` has "layers.{}.attn" and "layers.{}.ffn", factors on the outputs
            of the layers' blocks.
        stored: Renames the checkpoint's tensors to the names in `weights`; None to keep them.
    """

    encoder: EncoderSpec
    input: PatchSpec | EmbeddingSpec
    weights: Mapping[str, Rule]
    head: Callable[[State], ModelHead]
    part: str = ""
    prefixes: Sequence[str] = ("",)
    head_table: Mapping[str, HeadRule] = field(default_factory=dict)
    layer_scale: bool = False
    stored: Callable[[TensorFile], TensorFile] | None = None


class ImageFamily(Protocol):
    """A module of this folder."""

    @property
    def MODEL_TYPES(self) -> tuple[str, ...]:
        """Values of config.json's model_type."""

    @property
    def PROCESSOR(self) -> str:
        """Default class of transformers' image processor, if no file names one."""

    @property
    def REST(self) -> Mapping[str, HeadRule]:
        """Rules of tensors outside the encoders."""

    def towers(self, config: Config) -> dict[str, TowerSpec]:
        """Return the towers by their heads: "image", and "dense" for texts."""


def encoder_spec(
    config: Config, *, hidden: int, layers: int, heads: int, ffn: int, eps: float, activation: str
) -> EncoderSpec:
    """Return pre-norm layers with biases, with transformers' defaults for missing keys."""
    width = config.size("hidden_size", hidden)
    count = config.head_count("num_attention_heads", width, heads)
    return EncoderSpec(
        hidden=width,
        heads=count,
        head_size=width // count,
        ffn=config.size("intermediate_size", ffn),
        layers=(LayerSpec(),) * config.layers("num_hidden_layers", layers),
        norm="pre",
        norm_eps=config.number("layer_norm_eps", eps),
        activation=config.activation("hidden_act", activation),
    )


def square_grid(config: Config, image: int, patch: int) -> tuple[int, tuple[int, int]]:
    """Return the side of a patch in pixels, and the grid of patches of the training images."""
    config.require("num_channels", 3)
    side = config.size("patch_size", patch)
    count = config.size("image_size", image) // side
    if not count:
        raise config.unsupported("patch_size", "it is larger than image_size")
    return side, (count, count)
