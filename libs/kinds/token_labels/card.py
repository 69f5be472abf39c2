"""Token classifiers: entities of the labels in config.json."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from libs.catalog.card import Card
from libs.catalog.checkpoint.checkpoint import Checkpoint
from libs.kinds.kind import in_layout
from libs.kinds.sequence_labels.card import read_classes


def token_labels(files: Checkpoint, card: Card) -> Card:
    """Return the card of a token classifier; its labels are the kinds of entities."""
    classes = read_classes(files.config)
    kinds = dict.fromkeys(entity_kind(name) for name in classes if name != "O")
    return replace(card, tasks=("entities",), labels=tuple(kinds), classes=classes)


def entity_kind(name: str) -> str:
    """Return the kind of entity of a token's class, by the rule of transformers: `B-PER` and
    `I-PER` are PER.
    """
    return name.split("-", 1)[-1]


KIND: Final = in_layout(
    "token_labels",
    lambda files: files.architecture.endswith("ForTokenClassification"),
    token_labels,
)
