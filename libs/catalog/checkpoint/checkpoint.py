"""The parsed files of a checkpoint directory, which every reader of a kind of model looks at."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from libs.catalog.checkpoint.files import Config
from libs.catalog.checkpoint.modules import Modules


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The parsed files of a checkpoint."""

    directory: Path
    config: Config  # config.json beside the encoder
    top: Config  # config_sentence_transformers.json
    modules: Modules
    sentence: Config  # sentence_bert_config.json
    tensors: list[str]  # the encoder's

    @property
    def architecture(self) -> str:
        return next(iter(self.config.texts("architectures")), "")
