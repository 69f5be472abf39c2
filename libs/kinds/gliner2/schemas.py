"""A schema as the beginning of a sequence (GLiNER2), and the positions of the tokens with states
that answer it.

Each task is `( [P] name ( marker field marker field … ) )`, with descriptions as part of the name.
Choices of fields follow the tasks as words of the text, because they are scored like spans.
"""

from __future__ import annotations

import re
import sys
import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Final

from shoal.schema import Schema, SchemaLabel, SchemaStructure

from libs.errors import InvalidInput
from libs.kinds.gliner2.spans.head import FieldQuery, SpanTask
from libs.models.interface.schema import schema_texts

NAME: Final = "[P]"
ENTITY, RELATION, FIELD, CLASS = "[E]", "[R]", "[C]", "[L]"
BETWEEN, BEFORE_TEXT, DESCRIPTION = "[SEP_STRUCT]", "[SEP_TEXT]", "[DESCRIPTION]"
MARKERS: Final = (
    NAME,
    ENTITY,
    RELATION,
    FIELD,
    CLASS,
    BETWEEN,
    BEFORE_TEXT,
    DESCRIPTION,
    "[EXAMPLE]",
    "[OUTPUT]",
)
THRESHOLD: Final = 0.5
"""The gliner2 package's default."""


@dataclass(slots=True)
class SchemaPrompt:
    """A schema's words, and the indices of its relevant tokens among them: see `SchemaPlaces`.

    `tasks` are those of the structures, then that of the entities, then those of the relations.
    """

    tasks: list[SpanTask] = field(default_factory=list)
    words: list[str] = field(default_factory=list)
    names: list[int] = field(default_factory=list)
    fields: list[int] = field(default_factory=list)
    classes: list[int] = field(default_factory=list)
    choices: list[int] = field(default_factory=list)


def build_prompt(schema: Schema) -> SchemaPrompt:
    """Build the prompt. Raises InvalidInput with the path of a text that contains a marker."""
    for path, text in schema_texts(schema):
        if marker := next((marker for marker in MARKERS if marker in text), None):
            raise InvalidInput(
                f"{path} contains {marker}, which separates the parts of a schema", field=path
            )
    made = SchemaPrompt()
    default = THRESHOLD if schema.threshold is None else schema.threshold
    words, places = _choices(schema.structures)
    for structure in schema.structures:
        described = [SchemaLabel(one.name, one.description) for one in structure.fields]
        made.fields += _add(
            made,
            _described(structure.name, described),
            FIELD,
            [one.name for one in structure.fields],
        )
        fields = [
            FieldQuery(
                default if one.threshold is None else one.threshold,
                best=one.dtype == "str" and not one.choices,
                choices=tuple(places[choice.lower()] for choice in one.choices) or None,
            )
            for one in structure.fields
        ]
        made.tasks.append(SpanTask(tuple(fields)))
    if schema.entities:
        made.fields += _add(
            made,
            _described("entities", schema.entities),
            ENTITY,
            [one.label for one in schema.entities],
        )
        made.tasks.append(
            SpanTask(
                tuple(FieldQuery(_threshold(one, default)) for one in schema.entities),
                is_single=True,
            )
        )
    for relation in schema.relations:
        name = (
            f"{relation.label}: {relation.description}" if relation.description else relation.label
        )
        made.fields += _add(made, name, RELATION, ["head", "tail"])
        made.tasks.append(SpanTask((FieldQuery(_threshold(relation, default), best=True),) * 2))
    names = made.names[:]
    for question in schema.classifications:
        name = f"{question.name}: {question.description}" if question.description else question.name
        made.classes += _add(
            made, _described(name, question.labels), CLASS, [one.label for one in question.labels]
        )
    made.names = names  # classifications have no number of instances
    made.words[-1] = BEFORE_TEXT
    begin = len(made.words)
    made.words += words
    made.choices = [begin + number for number in _firsts(words, schema.structures)]
    return made


def _add(made: SchemaPrompt, name: str, marker: str, fields: Sequence[str]) -> list[int]:
    """Add a task and return the indices of its fields' markers."""
    begin = len(made.words)
    made.words += [
        "(",
        NAME,
        name,
        "(",
        *(word for one in fields for word in (marker, one)),
        ")",
        ")",
        BETWEEN,
    ]
    made.names.append(begin + 1)
    return [begin + 4 + 2 * number for number in range(len(fields))]


def _described(name: str, labels: Iterable[SchemaLabel]) -> str:
    return name + "".join(
        f" {DESCRIPTION} {one.label}: {one.description}" for one in labels if one.description
    )


def _threshold(label: SchemaLabel, default: float) -> float:
    return default if label.threshold is None else label.threshold


def _choices(structures: Sequence[SchemaStructure]) -> tuple[list[str], dict[str, int]]:
    """Return the words before the text that contain all choices, and the number of each distinct
    choice in lower case.
    """
    words: list[str] = []
    for structure in structures:
        bound = [one for one in structure.fields if one.choices]
        if bound:
            inner = [
                word for one in bound for word in (one.name, "(", *_joined(one.choices), ")", ",")
            ][:-1]
            words += ["(", f"{structure.name}:", *inner, ")"]
    names = (
        choice.lower()
        for structure in structures
        for one in structure.fields
        for choice in one.choices
    )
    return words, {name: number for number, name in enumerate(dict.fromkeys(names))}


def _joined(choices: Sequence[str]) -> list[str]:
    return [word for choice in choices for word in ("|", choice)][1:]


def _firsts(words: Sequence[str], structures: Sequence[SchemaStructure]) -> list[int]:
    """Return the position of each distinct choice: the first equal word, as in the package."""
    places: dict[str, int] = {}
    for number, word in enumerate(words):
        places.setdefault(word.lower(), number)
    return [places[name] for name in _choices(structures)[1]]


@cache
def word_pattern() -> re.Pattern[str]:
    """Return the gliner2 package's pattern of a word: an address, a handle, letters with their
    marks, or any other single character.

    The parts of a mail address are bounded, unlike the package's, so that a long text without
    addresses does not take quadratic time.
    """
    marks = "".join(
        chr(code)
        for code in range(sys.maxunicode + 1)
        if unicodedata.category(chr(code)).startswith("M")
    )
    letter = rf"[\w{marks}\u200c\u200d]"
    address, mail = r"(?:https?://|www\.)\S+", r"[a-z0-9._%+-]{1,256}@[a-z0-9.-]{1,256}\.[a-z]{2,}"
    return re.compile(
        rf"{address}|{mail}|@[a-z0-9_]+|{letter}+(?:[-_]{letter}+)*|\S", re.IGNORECASE
    )
