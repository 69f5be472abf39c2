"""A schema: entities, classifications, relations and structures of typed fields, all extracted in
one forward.

`StructureWork` carries one. Names and labels are unique within their list, and only descriptions
may be empty.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SchemaLabel:
    """A label of entities or of a classification, or a relation. `threshold` None: the schema's."""

    name: str
    description: str = ""
    threshold: float | None = None


@dataclass(frozen=True, slots=True)
class SchemaClassification:
    """A classification of the whole text.

    Attributes:
        multi_label: Whether each label is scored independently.
        threshold: Minimum score; None: all labels are returned.
    """

    name: str
    labels: tuple[SchemaLabel, ...]
    multi_label: bool = False
    threshold: float | None = None
    description: str = ""


@dataclass(frozen=True, slots=True)
class SchemaField:
    """A field of a structure.

    Attributes:
        single: Return the best value only.
        choices: The only possible values; empty for words of the text.
    """

    name: str
    single: bool = False
    choices: tuple[str, ...] = ()
    description: str = ""
    threshold: float | None = None


@dataclass(frozen=True, slots=True)
class SchemaStructure:
    """A structure with fields. A text may describe several instances."""

    name: str
    fields: tuple[SchemaField, ...]


@dataclass(frozen=True, slots=True)
class Schema:
    """The request's schema. `threshold` applies to entries without one; None: the model's
    default.
    """

    entities: tuple[SchemaLabel, ...] = ()
    classifications: tuple[SchemaClassification, ...] = ()
    relations: tuple[SchemaLabel, ...] = ()
    structures: tuple[SchemaStructure, ...] = ()
    threshold: float | None = None

    def texts(self) -> Iterator[str]:
        """Return all names, labels, choices and descriptions, which the model reads before each
        text.
        """
        labels = (
            *self.entities,
            *self.relations,
            *(label for one in self.classifications for label in one.labels),
        )
        fields = [field for structure in self.structures for field in structure.fields]
        yield from (text for label in labels for text in (label.name, label.description))
        yield from (
            text
            for question in self.classifications
            for text in (question.name, question.description)
        )
        yield from (
            text for field in fields for text in (field.name, field.description, *field.choices)
        )
        yield from (structure.name for structure in self.structures)
