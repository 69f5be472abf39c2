"""Models with logits for a whole text or pair: cross-encoders and classifiers."""

from __future__ import annotations

from libs.catalog.card import Card
from services.worker.models.heads.labels import labels_head, layout_of
from services.worker.models.kinds.kind import Built, Parts
from services.worker.models.processing.labels import LabelsProcessor
from services.worker.models.weights import HeadRule


def head_table(card: Card) -> dict[str, HeadRule]:
    layout = layout_of(card.family)
    return {layout.first: "first", layout.second: "second"}


def build(parts: Parts) -> Built:
    card = parts.card
    head = labels_head(card.family, parts.state, parts.encoder.hidden_size, len(card.classes), parts.file)
    return Built({"logits": head}, LabelsProcessor(card, parts.text()))
