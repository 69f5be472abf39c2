"""Built-in texts, and a job for each task of a model: for self-tests, where a model's own texts are not known."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from libs.catalog.card import Card
from libs.models.work import ClassifyWork, EncodeWork, EntitiesWork, Given, RelationsWork, ScoreWork, Work

TEXTS: Final = (
    "Ada Lovelace wrote the first program in London.",
    "Herring",
    "A shoal of fish turns as one, though each of them follows only its neighbours; no leader says where it should go. " * 3,
    "Ada Lovelace wrote the first program in London.",
)
"""Short and long ones; one twice."""

_LABELS = ("person", "place")


def works(card: Card, texts: list[str]) -> Iterator[Work]:
    """A job for each task of the model."""
    for task in card.tasks:
        match task:
            case "encode":
                yield EncodeWork(texts, role="document", representations=card.representations)
            case "score":
                yield ScoreWork("Who wrote the first program?", texts)
            case "entities":
                yield EntitiesWork(texts, labels=() if card.labels else _LABELS)
            case "classify":
                yield ClassifyWork(texts, labels=() if card.labels else _LABELS)
            case "relations":
                given = tuple(map(_ends, texts)) if card.given_entities else ()
                named = () if card.labels or card.given_entities else _LABELS
                yield RelationsWork(texts, labels=("lived in", "wrote"), entity_labels=named, entities=given)


def _ends(text: str) -> tuple[Given, ...]:
    """A text's first and last three characters, for models that relate given entities."""
    return Given(0, 3), Given(len(text) - 3, len(text))
