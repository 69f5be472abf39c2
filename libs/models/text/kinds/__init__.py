"""The registry of kinds: a card's kind selects the heads and processor after the encoder. A new
kind is one file and one line.
"""

from __future__ import annotations

from libs.catalog.card import Card, Kind
from libs.errors import ModelBroken
from libs.models.text.kinds import (
    embedding,
    gliclass,
    hybrid,
    laya,
    sequence_labels,
    sparse,
    token_labels,
    yes_no,
)
from libs.models.text.kinds.extraction import gliner, gliner2, glirel
from libs.models.text.kinds.kind import ModelKind

_KINDS: dict[Kind, ModelKind] = {
    "dense": embedding,
    "sparse": sparse,
    "hybrid": hybrid,
    "multi_vector": embedding,
    "sequence_labels": sequence_labels,
    "token_labels": token_labels,
    "yes_no": yes_no,
    "gliner": gliner,
    "gliner2": gliner2,
    "glirel": glirel,
    "gliclass": gliclass,
    "laya": laya,
}


def kind_of(card: Card) -> ModelKind:
    """Return the module that builds the card's heads and processor.

    Raises ModelBroken for a model without any.
    """
    if card.kind not in _KINDS:
        raise ModelBroken(
            f"models of the kind {card.kind!r}, such as {card.model}, have no vectors, scores or "
            "labels"
        )
    return _KINDS[card.kind]
