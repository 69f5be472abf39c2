"""Loads a checkpoint directory of a model that reads images and writes text as a model that is served."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from libs.catalog.checkpoint.files import need_config
from libs.catalog.detect import read_card
from libs.catalog.overrides import Overrides
from libs.models.generation.model import WriterModel
from libs.models.generation.settings import read_settings
from libs.models.layers.spec import Config
from libs.models.readers.florence import FlorenceReader, load_florence
from libs.models.text.loading import broken_tokenizer, without_int8
from libs.models.text.tokenising.tokenizer import failing, largest_id
from libs.models.tiers import copying


def load_reader_model(
    directory: Path, model_id: str, device: torch.device, dtype: torch.dtype, overrides: Overrides | None = None
) -> WriterModel:
    """As `libs.models.load_model`, of a model that reads images and writes. int8 is not served, and a warning is logged."""
    card = read_card(directory, model_id, overrides)
    card, dtype = without_int8(card, device, dtype)
    config, settings = Config(need_config(directory, "config.json").values), read_settings(directory)
    with copying(device), failing(broken_tokenizer):
        model = load_florence(directory, config, settings, dtype, device)
        writer = model.writer
        # Ids beyond the tokenizer's have random rows, and no text.
        writer.settings = replace(writer.settings, vocabulary=min(largest_id(model.tokenizer) + 1, writer.vocabulary))
        most = writer.max_positions if writer.encoder is None else writer.encoder.max_positions
        card = replace(card, max_tokens=min(card.max_tokens, most), images=model.size)
        return WriterModel(card, FlorenceReader(card, model))
