"""Validate the schemas of structure tasks: number, length and uniqueness of names, thresholds, and
the total of all texts. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Final

from shoal.v1 import inference_pb2 as pb

from libs.errors import InvalidInput
from services.router.admission.validation import limits

_INSTANCES: Final = 19
"""Maximum instances that a model finds of one relation or structure in a text."""


def check(task: pb.StructureTask) -> tuple[int, int]:
    """Validate a schema. Return the bytes of all its texts, and the maximum bytes of its names in
    the answer for one item. Raises InvalidInput.
    """
    empty = not (task.entities or task.classifications or task.relations or task.structures)
    _refuse(
        empty,
        "structure is empty: name entities, classifications, relations or structures",
        "structure",
    )
    _threshold(task, "structure")
    limits.SCHEMA_LABELS.check(len(task.entities), "structure.entities")
    limits.CLASSIFICATIONS.check(len(task.classifications), "structure.classifications")
    limits.RELATIONS.check(len(task.relations), "structure.relations")
    limits.STRUCTURES.check(len(task.structures), "structure.structures")
    once = [*_labels(task.entities, "structure.entities"), *_classifications(task.classifications)]
    often = [*_labels(task.relations, "structure.relations"), *_structures(task.structures)]
    size = sum(map(_utf8, once)) + sum(map(_utf8, often)) + sum(map(_utf8, _descriptions(task)))
    limits.SCHEMA.check(size, "structure")
    return size, _answered(once) + _INSTANCES * _answered(often)


def _labels(labels: Sequence[pb.SchemaLabel], path: str) -> list[str]:
    for index, label in enumerate(labels):
        _threshold(label, f"{path}[{index}]")
        _description(label.description, f"{path}[{index}].description")
    return _names([label.label for label in labels], path, ".label")


def _classifications(questions: Sequence[pb.SchemaClassification]) -> list[str]:
    found = _names([one.name for one in questions], "structure.classifications", ".name")
    for index, one in enumerate(questions):
        path = f"structure.classifications[{index}]"
        _threshold(one, path)
        _description(one.description, f"{path}.description")
        _refuse(
            not one.labels,
            f"{path}.labels is empty: name 1..{limits.SCHEMA_LABELS.most} labels",
            f"{path}.labels",
        )
        limits.SCHEMA_LABELS.check(len(one.labels), f"{path}.labels")
        for place, label in enumerate(one.labels):
            field = f"{path}.labels[{place}].threshold"
            _refuse(
                label.HasField("threshold"),
                f"{field} is set: a classification has one threshold for all of its labels",
                field,
            )
        found += _labels(one.labels, f"{path}.labels")
    return found


def _structures(structures: Sequence[pb.SchemaStructure]) -> list[str]:
    found = _names([one.name for one in structures], "structure.structures", ".name")
    for index, one in enumerate(structures):
        path = f"structure.structures[{index}].fields"
        _refuse(not one.fields, f"{path} is empty: name 1..{limits.FIELDS.most} fields", path)
        limits.FIELDS.check(len(one.fields), path)
        found += _names([field.name for field in one.fields], path, ".name")
        for place, field in enumerate(one.fields):
            own = f"{path}[{place}]"
            _threshold(field, own)
            _description(field.description, f"{own}.description")
            kinds = pb.SchemaField.Kind.values()
            _refuse(
                field.kind not in kinds,
                f"{own}.kind is {field.kind}, which is none of 0..{max(kinds)}",
                f"{own}.kind",
            )
            limits.CHOICES.check(len(field.choices), f"{own}.choices")
            found += _names(field.choices, f"{own}.choices", "")
    return found


def _names(names: Sequence[str], path: str, field: str) -> list[str]:
    """Return the names. Raises InvalidInput for one that is empty, too long or duplicate."""
    seen: dict[str, int] = {}
    for index, name in enumerate(names):
        own = f"{path}[{index}]{field}"
        _refuse(not name, f"{own} is empty", own)
        limits.SCHEMA_NAME.check(len(name), own)
        first = seen.setdefault(name, index)
        _refuse(first != index, f"{own} repeats {path}[{first}]{field}", own)
    return list(names)


def _descriptions(task: pb.StructureTask) -> Iterable[str]:
    for label in (
        *task.entities,
        *task.relations,
        *(one for each in task.classifications for one in each.labels),
    ):
        yield label.description
    yield from (one.description for one in task.classifications)
    yield from (one.description for each in task.structures for one in each.fields)


def _description(text: str, path: str) -> None:
    limits.DESCRIPTION.check(len(text), path)


def _threshold(
    holder: pb.StructureTask | pb.SchemaLabel | pb.SchemaClassification | pb.SchemaField, path: str
) -> None:
    if holder.HasField("threshold"):
        value, field = holder.threshold, f"{path}.threshold"
        _refuse(
            math.isnan(value) or not 0 <= value <= 1,
            f"{field} is {value:g}; it must be in 0..1",
            field,
        )


def _answered(names: Sequence[str]) -> int:
    return sum(limits.SCORE_BYTES + _utf8(name) for name in names)


def _utf8(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode())


def _refuse(wrong: bool, message: str, field: str) -> None:
    if wrong:
        raise InvalidInput(message, field=field)
