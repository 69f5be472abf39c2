"""What a schema asks for: entities, classifications, relations and structures of typed fields, all
found in one forward.

`StructureWork` carries one; names and labels are unique within their list, and no text in it is
empty but descriptions.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SchemaLabel:
    """A label of entities, a relation, or a label of a classification. `threshold` None: the
    schema's.
    """

    name: str
    description: str = ""
    threshold: float | None = None


@dataclass(frozen=True, slots=True)
class SchemaClassification:
    """A question about the whole text. `multi_label`: each label on its own. `threshold` None: all
    labels are returned.
    """

    name: str
    labels: tuple[SchemaLabel, ...]
    multi_label: bool = False
    threshold: float | None = None
    description: str = ""


@dataclass(frozen=True, slots=True)
class SchemaField:
    """A field of a structure. `single`: the best value only. `choices`: its only possible values;
    empty: words of the text.
    """

    name: str
    single: bool = False
    choices: tuple[str, ...] = ()
    description: str = ""
    threshold: float | None = None


@dataclass(frozen=True, slots=True)
class SchemaStructure:
    """A thing with fields, of which a text may describe several."""

    name: str
    fields: tuple[SchemaField, ...]


@dataclass(frozen=True, slots=True)
class Schema:
    """`threshold` None: the model's own, for whatever sets none."""

    entities: tuple[SchemaLabel, ...] = ()
    classifications: tuple[SchemaClassification, ...] = ()
    relations: tuple[SchemaLabel, ...] = ()
    structures: tuple[SchemaStructure, ...] = ()
    threshold: float | None = None

    def texts(self) -> Iterator[str]:
        """All names, labels, choices and descriptions, which the model reads before each text."""
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
