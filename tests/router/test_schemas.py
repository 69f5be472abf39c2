"""Validation of the schemas of structure tasks."""

from __future__ import annotations

import math
from typing import Any

import pytest
from shoal.v1 import inference_pb2 as pb

from libs.errors import InvalidInput
from services.router.admission.validation import limits, schemas


def label(name: str, description: str = "") -> pb.SchemaLabel:
    return pb.SchemaLabel(label=name, description=description)


def structure(*fields: pb.SchemaField, name: str = "order") -> pb.SchemaStructure:
    return pb.SchemaStructure(name=name, fields=fields)


def test_texts_and_repeated_names_are_counted() -> None:
    task = pb.StructureTask(
        entities=[label("né", "a name")],
        structures=[structure(pb.SchemaField(name="id", choices=["a"]))],
    )
    size, answered = schemas.check(task)
    assert size == len("né".encode()) + len("a name") + len("order") + len("id") + len("a")
    often = 3 * limits.SCORE_BYTES + len("order") + len("id") + len("a")
    assert answered == limits.SCORE_BYTES + 3 + 19 * often


def too_many() -> list[pb.SchemaLabel]:
    return [label(str(number)) for number in range(limits.SCHEMA_LABELS.most + 1)]


@pytest.mark.parametrize(
    ("schema", "field"),
    [
        ({}, "structure"),
        ({"entities": [label("")]}, "structure.entities[0].label"),
        ({"entities": [label("a"), label("a")]}, "structure.entities[1].label"),
        ({"entities": too_many()}, "structure.entities"),
        (
            {"entities": [label("a", "d" * (limits.DESCRIPTION.most + 1))]},
            "structure.entities[0].description",
        ),
        ({"entities": [label("a")], "threshold": 1.5}, "structure.threshold"),
        ({"entities": [label("a")], "threshold": math.nan}, "structure.threshold"),
        (
            {"classifications": [pb.SchemaClassification(name="tone")]},
            "structure.classifications[0].labels",
        ),
        (
            {
                "classifications": [
                    pb.SchemaClassification(
                        name="tone", labels=[pb.SchemaLabel(label="good", threshold=0.5)]
                    )
                ]
            },
            "structure.classifications[0].labels[0].threshold",
        ),
        ({"structures": [structure()]}, "structure.structures[0].fields"),
        (
            {"structures": [structure(pb.SchemaField(name="id", kind=99))]},  # type: ignore[arg-type]
            "structure.structures[0].fields[0].kind",
        ),
        (
            {"structures": [structure(pb.SchemaField(name="id", choices=["a", "a"]))]},
            "structure.structures[0].fields[0].choices[1]",
        ),
    ],
)
def test_error_names_the_invalid_field(schema: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        schemas.check(pb.StructureTask(**schema))
    assert caught.value.field == field
