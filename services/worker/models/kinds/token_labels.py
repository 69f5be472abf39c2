"""Token classification: logits for each token, merged to entities."""

from __future__ import annotations

from libs.catalog.card import Card
from services.worker.models.heads.labels import Classifier, table_of, token_layout
from services.worker.models.heads.tokens import TokenHead
from services.worker.models.kinds.kind import Built, Parts
from services.worker.models.processing.tagging import TaggingProcessor
from services.worker.models.weights import HeadRule


def head_table(card: Card) -> dict[str, HeadRule]:
    return table_of(token_layout(card.family))


def build(parts: Parts) -> Built:
    card, layout = parts.card, token_layout(parts.card.family)
    classifier = Classifier(layout, parts.config, parts.state, parts.encoder.hidden_size, len(card.classes), parts.file)
    return Built({"token_logits": TokenHead([classifier])}, TaggingProcessor(card, parts.text()))
