"""Load a checkpoint directory as a served generative model."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from libs.models.generation.loading import load_language_model
from libs.models.generation.model import GenerativeModel
from libs.models.generation.texts import TextReader
from libs.models.interface.source import LoadArguments
from libs.models.runtime.loaded.tiers import copying
from libs.models.text.loading import broken_tokenizer, without_int8
from libs.models.text.tokenising.tokenizer import failing, largest_id, load_tokenizer

MAX_SEQUENCE_TOKENS: Final = 8192
"""Maximum tokens of a prompt and its answer together, or of each of them if the model has an
encoder. Memory for the keys and values of one such sequence is always reserved, so every accepted
request can be answered.
"""


def load(source: LoadArguments) -> GenerativeModel:
    """Load a generative model. int8 is not served: a warning is logged."""
    directory, device = source.directory, source.device
    card, dtype = without_int8(source.card(), device, source.dtype)
    with copying(device), failing(broken_tokenizer):
        tokenizer = load_tokenizer(directory, lowercase=card.lowercase)
        language_model = load_language_model(directory, device, dtype)
        # Embedding tables are often larger than the vocabulary: their last rows are not tokens.
        known = min(largest_id(tokenizer) + 1, language_model.vocabulary)
        language_model.settings = replace(language_model.settings, vocabulary=known)
        language_model.max_positions = min(language_model.max_positions, MAX_SEQUENCE_TOKENS)
        limit = (
            language_model.max_positions
            if language_model.encoder is None
            else min(language_model.encoder.max_positions, MAX_SEQUENCE_TOKENS)
        )
        card = replace(card, max_tokens=min(card.max_tokens, limit))
        return GenerativeModel(
            card, TextReader(card, language_model, directory, tokenizer), source.memory_bytes
        )
