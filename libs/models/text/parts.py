"""The interface between the loader of text models and a kind: heads and a processor."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor

from libs.catalog.card import Card
from libs.catalog.checkpoint.files import need_config
from libs.models.interface.head import ModelHead
from libs.models.interface.processor import Processor
from libs.models.layers.encoder import PackedEncoder
from libs.models.layers.spec import Config
from libs.models.runtime.backbone import Backbone
from libs.models.text.tokenising.settings import has_segments
from libs.models.text.tokenising.text import TextProcessor, special_token
from libs.models.text.tokenising.tokenizer import load_tokenizer
from libs.models.weights import TensorFile


@dataclass(frozen=True, slots=True)
class Built:
    """The heads and the processor of a model."""

    heads: Mapping[str, ModelHead]
    """Heads of the checkpoint's main encoder, by the values of `Prepared.head`."""
    processor: Processor
    tokenizer: Tokenizer
    """The tokenizer of the main encoder."""
    backbones: tuple[Backbone, ...] = ()
    """Further encoders."""


@dataclass(frozen=True, slots=True)
class EncoderParts:
    """A loaded encoder and the rest of its checkpoint."""

    card: Card
    """The card, with its final `max_tokens`."""
    directory: Path
    encoder: PackedEncoder
    state: Mapping[str, Tensor]
    """The tensors that the kind's `head_table` names, float32 on the device."""
    rest: TensorFile
    """Tensors without the prefix `card.encoder_prefix`. The kind must account for all."""
    device: torch.device
    int8: bool = False
    """Further encoders are also quantised to int8."""

    @property
    def root(self) -> Path:
        """The directory of config.json and the tokenizer."""
        return self.directory / self.card.encoder_folder

    @property
    def config(self) -> Config:
        """The encoder's config.json."""
        return Config(need_config(self.root, self.card.encoder_file).values)

    @property
    def file(self) -> str:
        """The encoder's tensor file, for error messages."""
        return str(Path(self.card.encoder_folder) / "model.safetensors")

    def text(self) -> TextProcessor:
        return TextProcessor(
            load_tokenizer(self.root, lowercase=self.card.lowercase),
            limit=self.card.max_tokens,
            segments=self.encoder.embed.segments > 1 and has_segments(self.root),
            unknown=special_token(self.root, "unk_token"),
        )
