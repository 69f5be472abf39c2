"""The interface of a family of image models, and its towers as data."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from libs.models.head import ModelHead
from libs.models.images.patches import PatchSpec
from libs.models.layers.spec import Config, EmbeddingSpec, EncoderSpec, LayerSpec
from libs.models.weights import HeadRule, Rule, TensorFile

State = Mapping[str, Tensor]


@dataclass(frozen=True, slots=True)
class TowerSpec:
    """An encoder of a checkpoint and its head, as data. `input`: of images, or of the texts that
    share their space.

    `part`: what the names of its tensors begin with, where the checkpoint has several encoders;
    after it comes one of `prefixes`. `weights`, `head_table`: where they go. `head`: made of the
    tensors of `head_table` and of those that belong to no encoder. `layer_scale`: `head_table` has
    "layers.{}.attn" and "layers.{}.ffn", which scale the outputs of the layers' blocks. `stored`:
    makes of the checkpoint's tensors those that `weights` names; None: they are named as they are.
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


class Family(Protocol):
    """A module of this folder."""

    @property
    def MODEL_TYPES(self) -> tuple[str, ...]:
        """Values of config.json's model_type."""

    @property
    def PROCESSOR(self) -> str:
        """transformers' image processor where no file names one."""

    @property
    def REST(self) -> Mapping[str, HeadRule]:
        """Tensors that belong to no encoder."""

    def towers(self, config: Config) -> dict[str, TowerSpec]:
        """By the names of their heads: "image", and "dense" for texts."""


def encoder_spec(
    config: Config, *, hidden: int, layers: int, heads: int, ffn: int, eps: float, activation: str
) -> EncoderSpec:
    """Pre-norm layers with biases, as all these families have. The numbers are transformers'
    defaults for keys that are missing.
    """
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
    """The side of a patch in pixels, and the grid of patches of the images that the model was
    trained on.
    """
    config.require("num_channels", 3)
    side = config.size("patch_size", patch)
    count = config.size("image_size", image) // side
    if not count:
        raise config.unsupported("patch_size", "it is larger than image_size")
    return side, (count, count)
