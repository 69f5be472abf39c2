"""From a `Schema` to a message, and how much of it an answer may repeat. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from shoal.requests.arguments import enum_value, message
from shoal.schema import Schema, SchemaClassification, SchemaField, SchemaLabel, SchemaStructure
from shoal.v1 import inference_pb2 as pb

_INSTANCES = 19
_SCORE_BYTES = 16
"""Bytes that routers count for the number of instances for which an answer repeats a relation or a
field, and for a name in addition to its own bytes.
"""
_KINDS = {"list": pb.SchemaField.KIND_LIST, "str": pb.SchemaField.KIND_STRING}


def schema_message(schema: Schema) -> pb.StructureTask:
    """Raise InvalidInput for values that a message cannot hold."""
    return message(
        pb.StructureTask,
        entities=[_label(one) for one in schema.entities],
        classifications=[_classification(one) for one in schema.classifications],
        relations=[_label(one) for one in schema.relations],
        structures=[
            _structure(one, f"structure.structures[{index}]")
            for index, one in enumerate(schema.structures)
        ],
        threshold=schema.threshold,
    )


def schema_bytes(task: pb.StructureTask) -> int:
    """Bytes that an answer may repeat for each item."""
    once = [one.label for one in task.entities]
    once += [
        name
        for one in task.classifications
        for name in (one.name, *(label.label for label in one.labels))
    ]
    often = [one.label for one in task.relations] + [one.name for one in task.structures]
    often += [
        name
        for one in task.structures
        for field in one.fields
        for name in (field.name, *field.choices)
    ]
    return _answered(once) + _INSTANCES * _answered(often)


def _answered(names: Iterable[str]) -> int:
    return sum(_SCORE_BYTES + len(name.encode()) for name in names)


def _label(label: SchemaLabel) -> pb.SchemaLabel:
    return message(
        pb.SchemaLabel, label=label.label, description=label.description, threshold=label.threshold
    )


def _classification(one: SchemaClassification) -> pb.SchemaClassification:
    return message(
        pb.SchemaClassification,
        name=one.name,
        labels=[_label(label) for label in one.labels],
        multi_label=one.multi_label,
        threshold=one.threshold,
        description=one.description,
    )


def _structure(one: SchemaStructure, path: str) -> pb.SchemaStructure:
    fields = [_field(field, f"{path}.fields[{index}]") for index, field in enumerate(one.fields)]
    return message(pb.SchemaStructure, name=one.name, fields=fields)


def _field(field: SchemaField, path: str) -> Any:
    return message(
        pb.SchemaField,
        name=field.name,
        kind=enum_value(f"{path}.dtype", str(field.dtype), _KINDS),
        choices=field.choices,
        description=field.description,
        threshold=field.threshold,
    )
