"""The interface of the modules in this folder: heads and processor, after the encoder, for one kind of model (`Card.kind`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from libs.catalog.card import Card
from libs.catalog.checkpoint.files import need_config
from libs.models.layers.encoder import TextEncoder
from libs.models.layers.spec import Config
from libs.models.results import Result
from libs.models.text.heads.head import TextHead
from libs.models.text.processing.text import TextProcessor, special_token
from libs.models.text.processing.tokenizer import load_tokenizer
from libs.models.weights import HeadRule, TensorFile
from libs.models.work import GoOn, Output, Prepared, Work


class Processor(Protocol):
    """A model's pre- and post-processing on the CPU, around the forward; thread-safe."""

    def prepare(self, work: Work, go_on: GoOn) -> Prepared:
        """Raises TaskNotSupported, InputTooLong or InvalidInput with the field's path in the job, and what `go_on` raises.

        `go_on` is called before each `cutting.SLICE` characters.
        """

    def finish(self, prepared: Prepared, outputs: Sequence[Output]) -> Result:
        """`outputs`: one for each of `prepared.sequences`."""


@dataclass(frozen=True, slots=True)
class Built:
    """`heads`: by the names that `Prepared.head` may have."""

    heads: Mapping[str, TextHead]
    processor: Processor


@dataclass(frozen=True, slots=True)
class Parts:
    """A loaded encoder and the rest of its checkpoint. `card.max_tokens` is final.

    `state`: the tensors that `head_table` names, float32 on the device. `rest`: tensors that do not begin with
    `card.encoder_prefix`, every one of which the kind must account for.
    """

    card: Card
    directory: Path
    encoder: TextEncoder
    state: Mapping[str, Tensor]
    rest: TensorFile
    device: torch.device

    @property
    def root(self) -> Path:
        """Where config.json and the tokenizer lie."""
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
            segments=self.encoder.segments > 1,
            unknown=special_token(self.root, "unk_token"),
        )


class ModelKind(Protocol):
    """A module of this folder."""

    def head_table(self, card: Card) -> dict[str, HeadRule]:
        """Stems of the head's tensors among the encoder's."""

    def build(self, parts: Parts) -> Built:
        """Raises ModelBroken for tensors that are missing or have another shape."""
