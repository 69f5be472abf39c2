"""Sequence classification: logits of a whole text or pair, for cross-encoders and classifiers."""

from __future__ import annotations

from libs.catalog.card import Card
from libs.kinds.sequence_labels.head import (
    LANGUAGE_MODEL,
    Classifier,
    LabelsHead,
    select_pooling,
    tensor_table,
    text_layout,
)
from libs.kinds.sequence_labels.nli import NliProcessor
from libs.kinds.sequence_labels.processor import LabelsProcessor, PaddingTrimmer
from libs.models.interface.processor import Processor
from libs.models.text.loading import text_loader
from libs.models.text.parts import Built, EncoderParts
from libs.models.text.tokenising.chat import ChatPairs
from libs.models.weights import HeadRule

_DEFAULT_PADDING = {"gemma": 0, "gemma2": 0, "gemma3_text": 0, "phi3": 32_000}
"""transformers' padding token, the default if config.json has no key for it."""


def head_table(card: Card) -> dict[str, HeadRule]:
    return tensor_table(text_layout(card.family))


def build(parts: EncoderParts) -> Built:
    card, layout, config = parts.card, text_layout(parts.card.family), parts.config
    classifier = Classifier(
        layout, config, parts.state, parts.encoder.hidden_size, len(card.classes), parts.file
    )
    text = parts.text()
    chat = ChatPairs.where_it_fits(card, parts.root, text, shares=parts.encoder.shares_prefixes)
    own = LabelsProcessor(card, text, chat)
    processor: Processor = (
        own if card.contradiction is None else NliProcessor(card, card.contradiction, text, own)
    )
    padding = config.values.get("pad_token_id", _DEFAULT_PADDING.get(card.family))
    if layout is LANGUAGE_MODEL and parts.encoder.causal and padding is not None:
        processor = PaddingTrimmer(
            processor, config.integer("pad_token_id", _DEFAULT_PADDING.get(card.family))
        )
    return Built(
        {"logits": LabelsHead(classifier, select_pooling(layout, config))},
        processor,
        text.tokenizer,
    )


load = text_loader(build, head_table)
