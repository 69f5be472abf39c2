"""Token classification: logits for each token, merged to entities."""

from __future__ import annotations

from libs.catalog.card import Card
from libs.kinds.sequence_labels.head import Classifier, tensor_table, token_layout
from libs.kinds.token_labels.processor import TaggingProcessor
from libs.models.text.heads.tokens import TokenHead
from libs.models.text.loading import text_loader
from libs.models.text.parts import Built, EncoderParts
from libs.models.weights import HeadRule


def head_table(card: Card) -> dict[str, HeadRule]:
    return tensor_table(token_layout(card.family))


def build(parts: EncoderParts) -> Built:
    card, layout = parts.card, token_layout(parts.card.family)
    classifier = Classifier(
        layout, parts.config, parts.state, parts.encoder.hidden_size, len(card.classes), parts.file
    )
    text = parts.text()
    return Built(
        {"token_logits": TokenHead([classifier])}, TaggingProcessor(card, text), text.tokenizer
    )


load = text_loader(build, head_table)
