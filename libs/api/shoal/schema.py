"""`Schema`: what to find in texts, for models that answer to schemas (GLiNER2): entities, classes,
relations and structures, all in one forward pass.

Names and labels are unique within their list, and only descriptions may be empty. Models read these
types (`libs/models`), so they need the standard library alone.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Self, TypeAlias

from shoal.errors import InvalidInput

Labels: TypeAlias = "Iterable[str] | Mapping[str, str | Mapping[str, Any] | None]"
"""Labels; or labels with descriptions; or with maps of `description` and `threshold`."""
_FIELD_KEYS = frozenset({"name", "dtype", "choices", "description", "threshold"})


@dataclass(frozen=True, slots=True)
class SchemaLabel:
    """A label of entities or of a classification, or a relation, and its meaning.

    Attributes:
        threshold: Minimum score; None: the schema's.
    """

    label: str
    description: str = ""
    threshold: float | None = None


@dataclass(frozen=True, slots=True)
class SchemaClassification:
    """A classification of the whole text.

    Attributes:
        multi_label: Score each label independently (sigmoid).
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
        dtype: "list" for all values, "str" for the best one.
        choices: The allowed values; empty: words of the text.
        threshold: Minimum score; None: the schema's.
    """

    name: str
    dtype: Literal["str", "list"] = "list"
    choices: tuple[str, ...] = ()
    description: str = ""
    threshold: float | None = None


@dataclass(frozen=True, slots=True)
class SchemaStructure:
    """A kind of object with fields. A text may describe several objects of it."""

    name: str
    fields: tuple[SchemaField, ...]


@dataclass(frozen=True, slots=True)
class Schema:
    """A description of all findings to extract from each text in one forward pass. A task of
    `extract`; each method returns an extended schema:

    ```python
    schema = (
        shoal.Schema()
        .with_entities({"person": "", "company": "an organisation that trades"})
        .with_classification("tone", ["calm", "angry"])
        .with_relations(["works for"])
        .with_structure(
            "product",
            [("name", "str"), {"name": "colour", "choices": ["red", "blue"]}, "features"],
        )
    )
    ```

    Attributes:
        threshold: 0..1: keep findings that score at least this, unless a part has its own; default
            the model's.
    """

    entities: tuple[SchemaLabel, ...] = ()
    classifications: tuple[SchemaClassification, ...] = ()
    relations: tuple[SchemaLabel, ...] = ()
    structures: tuple[SchemaStructure, ...] = ()
    threshold: float | None = None

    def with_entities(self, labels: Labels, *, threshold: float | None = None) -> Self:
        """Add labels of entities to find. `threshold` is for labels that set none."""
        return replace(self, entities=(*self.entities, *_labels(labels, "entities", threshold)))

    def with_classification(
        self,
        name: str,
        labels: Iterable[str] | Mapping[str, str],
        *,
        multi_label: bool = False,
        threshold: float | None = None,
        description: str = "",
    ) -> Self:
        """Add a classification of the whole text. `threshold`: return labels that score at least
        this, and the best one in any case.
        """
        made = SchemaClassification(
            name=name,
            labels=_labels(labels, "classifications", None),
            multi_label=multi_label,
            threshold=threshold,
            description=description,
        )
        return replace(self, classifications=(*self.classifications, made))

    def with_relations(self, labels: Labels, *, threshold: float | None = None) -> Self:
        """Add relations to find. The model finds their heads and tails. `threshold` is for labels
        that set none.
        """
        return replace(self, relations=(*self.relations, *_labels(labels, "relations", threshold)))

    def with_structure(
        self, name: str, fields: Iterable[str | tuple[str, str] | Mapping[str, Any] | SchemaField]
    ) -> Self:
        """Add a kind of object with fields: names (lists), pairs of name and "str" or "list", maps
        with the keys of `SchemaField`, or these.
        """
        return replace(
            self,
            structures=(
                *self.structures,
                SchemaStructure(name=name, fields=tuple(map(_field, fields))),
            ),
        )

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Return a schema from the form of the gliner2 package's `Schema.to_dict()`. Raises
        InvalidInput for unknown keys.

        Args:
            values: The keys `entities` and `relations` are lists, or maps as for `with_entities`;
                `classifications` is [{"task", "labels", "multi_label", "cls_threshold", "prompt"}];
                `structures` is {name: {"fields": [...]}} with fields as for `with_structure`;
                `threshold` is a number.
        """
        try:
            return cls._from_dict(values)
        except (TypeError, AttributeError) as error:
            raise InvalidInput(f"the schema cannot be read: {error}", field="schema") from None

    @classmethod
    def _from_dict(cls, values: Mapping[str, Any]) -> Self:
        made = cls()
        for key, value in _map(values, "schema").items():
            match key:
                case "entities":
                    made = made.with_entities(value)
                case "relations":
                    made = made.with_relations(value)
                case "classifications":
                    for number, one in enumerate(_list(value, key)):
                        made = _with_question(
                            made, _map(one, f"{key}[{number}]"), f"{key}[{number}]"
                        )
                case "structures":
                    for name, one in _map(value, key).items():
                        path = f"{key}.{name}"
                        own = (
                            _known(one, {"fields"}, path)
                            if isinstance(one, Mapping)
                            else {"fields": one}
                        )
                        made = made.with_structure(
                            name, _list(own.get("fields", ()), f"{path}.fields")
                        )
                case "threshold":
                    made = replace(made, threshold=value)
                case _:
                    known = "entities, relations, classifications, structures, threshold"
                    raise InvalidInput(
                        f"the schema has the key {key!r}; known are {known}", field=str(key)
                    )
        return made

    @classmethod
    def from_json(cls, text: str | bytes) -> Self:
        """Parse the JSON form of `from_dict`."""
        try:
            return cls.from_dict(json.loads(text))
        except ValueError as error:
            raise InvalidInput(f"the schema is not valid JSON: {error}", field="schema") from None


def _with_question(made: Schema, one: Mapping[str, Any], path: str) -> Any:
    _known(
        one,
        {
            "task",
            "name",
            "labels",
            "multi_label",
            "cls_threshold",
            "threshold",
            "prompt",
            "description",
        },
        path,
    )
    return made.with_classification(
        one.get("task", one.get("name", "")),
        one.get("labels", ()),
        multi_label=one.get("multi_label", False),
        threshold=one.get("cls_threshold", one.get("threshold")),
        description=one.get("prompt", one.get("description", "")),
    )


def _labels(labels: Any, path: str, threshold: float | None) -> tuple[SchemaLabel, ...]:
    if isinstance(labels, str):
        labels = [labels]
    if not isinstance(labels, Mapping):
        return tuple(SchemaLabel(label=label, threshold=threshold) for label in _list(labels, path))
    found = []
    for name, value in labels.items():
        own = (
            {"description": value or ""}
            if value is None or isinstance(value, str)
            else _map(value, f"{path}.{name}")
        )
        _known(own, {"description", "threshold"}, f"{path}.{name}")
        found.append(SchemaLabel(**{"label": name, "threshold": threshold, **own}))
    return tuple(found)


def _field(value: Any) -> SchemaField:
    if isinstance(value, SchemaField):
        return value
    if isinstance(value, str):
        return SchemaField(name=value)
    if isinstance(value, Mapping):
        own = _known(value, _FIELD_KEYS, f"fields.{value.get('name', '')}")
        given = {key: entry for key, entry in own.items() if entry is not None}
        if "name" not in given:
            raise InvalidInput("a field has no name", field="fields")
        return SchemaField(**given | {"choices": tuple(given.get("choices", ()))})
    try:
        name, dtype = value
    except (TypeError, ValueError):
        raise InvalidInput(
            f"a field is {value!r}; it must be a name, a pair of name and dtype, or a map",
            field="fields",
        ) from None
    return SchemaField(name=name, dtype=dtype)


def _known(values: Mapping[str, Any], keys: Iterable[str], path: str) -> Mapping[str, Any]:
    for key in values:
        if key not in keys:
            raise InvalidInput(
                f"{path} has the key {key!r}; known are {', '.join(sorted(keys))}",
                field=f"{path}.{key}",
            )
    return values


def _map(value: Any, path: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise InvalidInput(f"{path} is {type(value).__name__}; it must be a map", field=path)
    return value


def _list(value: Any, path: str) -> Sequence[Any]:
    if isinstance(value, (str, bytes, Mapping)) or not isinstance(value, Iterable):
        raise InvalidInput(f"{path} is {type(value).__name__}; it must be a list", field=path)
    return list(value)
