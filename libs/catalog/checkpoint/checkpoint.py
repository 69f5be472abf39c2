"""The parsed files of a checkpoint in the layout of transformers and sentence-transformers, input
of the readers of most kinds (`libs/kinds`).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from libs.catalog.checkpoint.files import CheckpointConfig
from libs.catalog.checkpoint.modules import Modules


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The parsed files of a checkpoint; those that do not exist are empty."""

    directory: Path
    config: CheckpointConfig  # config.json in the encoder's folder
    top: CheckpointConfig  # config_sentence_transformers.json
    modules: Modules
    sentence: CheckpointConfig  # sentence_bert_config.json
    tensors: list[str]  # the encoder's safetensors files, from the checkpoint's root

    @property
    def architecture(self) -> str:
        """The first of config.json's `architectures`; empty if there is none."""
        return next(iter(self.config.texts("architectures")), "")
