"""The texts of a schema, which a model reads before each text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from shoal.schema import Schema, SchemaLabel


def schema_texts(schema: Schema) -> Iterator[tuple[str, str]]:
    """Yield each name, label, choice and description with its path in a request."""
    for name, labels in (("entities", schema.entities), ("relations", schema.relations)):
        yield from _label_texts(f"structure.{name}", labels)
    for number, question in enumerate(schema.classifications):
        path = f"structure.classifications[{number}]"
        yield f"{path}.name", question.name
        yield f"{path}.description", question.description
        yield from _label_texts(f"{path}.labels", question.labels)
    for number, structure in enumerate(schema.structures):
        path = f"structure.structures[{number}]"
        yield f"{path}.name", structure.name
        for index, one in enumerate(structure.fields):
            yield f"{path}.fields[{index}].name", one.name
            yield f"{path}.fields[{index}].description", one.description
            for place, choice in enumerate(one.choices):
                yield f"{path}.fields[{index}].choices[{place}]", choice


def _label_texts(path: str, labels: Sequence[SchemaLabel]) -> Iterator[tuple[str, str]]:
    for number, one in enumerate(labels):
        yield f"{path}[{number}].label", one.label
        yield f"{path}[{number}].description", one.description
