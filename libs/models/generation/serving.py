"""Loads a checkpoint directory of a model that writes as a model that is served."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Final

import torch

from libs.catalog.detect import read_card
from libs.catalog.overrides import Overrides
from libs.models.generation.loading import load_writer
from libs.models.generation.model import GenerativeModel
from libs.models.generation.texts import TextReader
from libs.models.loaded.tiers import copying
from libs.models.text.loading import broken_tokenizer, without_int8
from libs.models.text.tokenising.tokenizer import failing, largest_id, load_tokenizer

LONGEST: Final = 8192
"""Tokens of a prompt and its answer together, or of each of them where the model has an encoder.
Memory for the keys and values of one such sequence is always there, so that every request that is
taken can be answered."""


def load_generative_model(
    directory: Path,
    model_id: str,
    device: torch.device,
    dtype: torch.dtype,
    overrides: Overrides | None = None,
    memory_bytes: int = 0,
) -> GenerativeModel:
    """As `libs.models.load_model`, of a model that writes. int8 is not served, and a warning is
    logged.

    `memory_bytes`: the accelerator's, for all models, of which keys and values get a part; 0: all
    that it has.
    """
    card = read_card(directory, model_id, overrides)
    card, dtype = without_int8(card, device, dtype)
    with copying(device), failing(broken_tokenizer):
        tokenizer = load_tokenizer(directory, lowercase=card.lowercase)
        writer = load_writer(directory, device, dtype)
        # Embedding tables are often larger than the vocabulary: their last rows are no tokens, and
        # have no text.
        known = min(largest_id(tokenizer) + 1, writer.vocabulary)
        writer.settings = replace(writer.settings, vocabulary=known)
        writer.max_positions = min(writer.max_positions, LONGEST)
        limit = (
            writer.max_positions
            if writer.encoder is None
            else min(writer.encoder.max_positions, LONGEST)
        )
        card = replace(card, max_tokens=min(card.max_tokens, limit))
        return GenerativeModel(card, TextReader(card, writer, directory, tokenizer), memory_bytes)
