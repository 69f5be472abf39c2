"""The types of the arguments of inference verbs, and the tasks of `extract`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from shoal.results import Entity

# A text, or the bytes of an image file (PNG, JPEG, WebP).
Item = str | bytes
Items = Item | Iterable[Item]
Role = Literal["query", "document"]
Truncation = Literal["none", "end", "start"]
Priority = Literal["interactive", "bulk"]
Scale = Literal["logit", "probability"]
# What happens to an item that is empty, too long (truncation "none") or not a text: the call fails, or the item is skipped.
OnInvalid = Literal["raise", "skip"]
Aggregation = Literal["none", "simple", "first", "average", "max"]
# An entity that the caller knows: start and end (exclusive) in code points, and its label if it has one; or an Entity of a result.
Given = Entity | tuple[int, int] | tuple[int, int, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Entities:
    """Find named entities in text. `labels`: required by zero-shot models, else a subset of the model's own. `threshold` 0..1.
    `flat`: no overlaps. `aggregation`: how the labels of a word's tokens become one, for models that label tokens."""

    labels: Sequence[str] = ()
    threshold: float | None = None
    flat: bool | None = None
    aggregation: Aggregation | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Classify:
    """Score labels. `multi_label`: each on its own (sigmoid) instead of against the others (softmax). `hypothesis`: the sentence
    that a zero-shot or embedding model compares with the text for each label, `{}` standing for the label. `among_labels`:
    probabilities are normalised over `labels`, instead of over all labels of the model."""

    labels: Sequence[str] = ()
    multi_label: bool | None = None
    threshold: float | None = None
    hypothesis: str = ""
    among_labels: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Relations:
    """Find relations between entities. `entity_labels`: the kinds of entities to relate, for models that find the entities.
    `entities`: the entities themselves, a list for each item, for models that are given them. `threshold` 0..1, default the model's
    own."""

    labels: Sequence[str]
    entity_labels: Sequence[str] = ()
    threshold: float | None = None
    entities: Sequence[Sequence[Given]] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Regions:
    """Find objects in images. `threshold` 0..1, default the model's own."""

    labels: Sequence[str]
    threshold: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadText:
    """Caption an image or read the text in it. `max_tokens` 0: the model's own."""

    kind: Literal["caption", "detailed_caption", "ocr"] = "caption"
    max_tokens: int = 0


Task = Entities | Classify | Relations | Regions | ReadText
