"""Load a checkpoint directory of a model that reads images and generates text as a served model."""

from __future__ import annotations

from dataclasses import replace

from tokenizers import Tokenizer

from libs.catalog.card import Card, ImageSize
from libs.catalog.checkpoint.files import need_config
from libs.kinds.image_generative.card import ENCODER_DECODER, FLORENCE
from libs.models.generation.decoding.language_model import LanguageModel
from libs.models.generation.decoding.settings import read_settings
from libs.models.generation.model import GenerativeModel
from libs.models.interface.source import LoadArguments
from libs.models.layers.spec import Config
from libs.models.readers.conversation import ConversationReader, load_conversation
from libs.models.readers.encoder_decoder import EncoderDecoderReader, load_encoder_decoder
from libs.models.readers.florence import FlorenceReader, load_florence
from libs.models.runtime.loaded.tiers import copying
from libs.models.text.loading import broken_tokenizer, without_int8
from libs.models.text.tokenising.tokenizer import failing, largest_id


def load(source: LoadArguments) -> GenerativeModel:
    """Load a generative model that reads images."""
    directory, device, memory_bytes = source.directory, source.device, source.memory_bytes
    card, dtype = without_int8(source.card(), device, source.dtype)
    config, settings = (
        Config(need_config(directory, "config.json").values),
        read_settings(directory),
    )
    with copying(device), failing(broken_tokenizer):
        if card.family == FLORENCE:
            florence = load_florence(directory, config, settings, dtype, device)
            card = _measured(card, florence.language_model, florence.tokenizer, florence.size)
            return GenerativeModel(card, FlorenceReader(card, florence), memory_bytes)
        if card.family != ENCODER_DECODER:
            conversation = load_conversation(directory, card, config, settings, dtype, device)
            card = _measured(
                card, conversation.language_model, conversation.tokenizer, conversation.size
            )
            return GenerativeModel(card, ConversationReader(card, conversation), memory_bytes)
        model = load_encoder_decoder(directory, config, settings, dtype, device)
        card = _measured(card, model.language_model, model.tokenizer, model.size)
        return GenerativeModel(card, EncoderDecoderReader(card, model), memory_bytes)


def _measured(
    card: Card, language_model: LanguageModel, tokenizer: Tokenizer, size: ImageSize
) -> Card:
    """Add the loaded model's measurements to the card.

    Ids beyond the tokenizer's vocabulary, with random rows in the table, are never chosen.
    """
    language_model.settings = replace(
        language_model.settings,
        vocabulary=min(largest_id(tokenizer) + 1, language_model.vocabulary),
    )
    most = (
        language_model.encoder.max_positions
        if language_model.encoder is not None
        else size.max_tokens
        if language_model.has_cross
        else language_model.max_positions
    )
    return replace(card, max_tokens=most, images=size)
