"""Token classification: logits for each token, merged to entities."""

from __future__ import annotations

from libs.catalog.card import Card
from libs.models.text.heads.labels import Classifier, table_of, token_layout
from libs.models.text.heads.tokens import TokenHead
from libs.models.text.kinds.kind import Built, Parts
from libs.models.text.processing.tagging import TaggingProcessor
from libs.models.weights import HeadRule


def head_table(card: Card) -> dict[str, HeadRule]:
    return table_of(token_layout(card.family))


def build(parts: Parts) -> Built:
    card, layout = parts.card, token_layout(parts.card.family)
    classifier = Classifier(
        layout, parts.config, parts.state, parts.encoder.hidden_size, len(card.classes), parts.file
    )
    text = parts.text()
    return Built(
        {"token_logits": TokenHead([classifier])}, TaggingProcessor(card, text), text.tokenizer
    )
