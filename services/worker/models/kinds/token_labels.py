"""Token classification: logits for each token, merged to entities."""

from __future__ import annotations

from libs.catalog.card import Card
from services.worker.models.heads.linear import HeadLinear, check_shape
from services.worker.models.heads.tokens import TokenHead
from services.worker.models.kinds.kind import Built, Parts
from services.worker.models.processing.tagging import TaggingProcessor
from services.worker.models.weights import HeadRule


def head_table(card: Card) -> dict[str, HeadRule]:
    return {"classifier": "classifier"}


def build(parts: Parts) -> Built:
    check_shape(parts.state, "classifier.weight", (len(parts.card.classes), parts.encoder.hidden_size), parts.file)
    head = TokenHead([HeadLinear(parts.state, "classifier", "identity")])
    return Built({"token_logits": head}, TaggingProcessor(parts.card, parts.text()))
