"""Validators of YAML values: one definition parses a value, with errors that name file and line,
and gives its JSON schema.

Not on the request path: `cards.py`, `pools.py` and other configuration files are defined by
composing shapes; `schema.py` prints the schemas for editors.

Shapes read YAML nodes, not the Python values that validation libraries read. Values have lost the
lines that errors name, the spelling in the file, and duplicate keys. msgspec would load a pool that
the file has twice, and pydantic would add 0.1 s to the start of each router and scheduler.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Generic, Protocol, TypeVar

import yaml

from libs.errors import InvalidInput

Value = TypeVar("Value", covariant=True)
Schema = dict[str, object]
_TAG = "tag:yaml.org,2002:"
_TYPE_NAMES = {
    "str": "a text",
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "map": "keys with values",
    "seq": "a list",
}
_UNITS = {
    "": 1,
    "k": 10**3,
    "M": 10**6,
    "G": 10**9,
    "T": 10**12,
    "Ki": 2**10,
    "Mi": 2**20,
    "Gi": 2**30,
    "Ti": 2**40,
}
_SIZE = r"(\d+(\.\d+)?) ?(k|[KMGT]i|[MGT])?B?"


@dataclass(frozen=True, slots=True)
class At:
    """A position in a file, for error messages: its path, the path of keys to the value, and the
    name of the top-level value.
    """

    file: str
    keys: str = ""
    whole: str = "the card"

    def key(self, name: str) -> At:
        return At(self.file, f"{self.keys}.{name}" if self.keys else name, self.whole)

    def entry(self, number: int) -> At:
        return At(self.file, f"{self.keys}[{number}]", self.whole)

    def wrong(self, node: yaml.Node, problem: str) -> InvalidInput:
        """Return an error for the caller to raise: "file:line: `keys` problem", with lines counted
        from 1.
        """
        keys = f"`{self.keys}` " if self.keys else f"{self.whole} "
        return InvalidInput(f"{self.file}:{node.start_mark.line + 1}: {keys}{problem}")


class Shape(Protocol[Value]):
    """A validator of one type of value."""

    def read(self, node: yaml.Node, at: At) -> Value:
        """Parse a value. Raises InvalidInput naming file, line and key."""

    def schema(self) -> Schema:
        """Return the JSON schema (draft 7) of such values."""


@dataclass(frozen=True, slots=True)
class Text:
    """A text; if `pattern` is given, it must match the whole text.

    Attributes:
        words: The pattern in words, for error messages.
    """

    pattern: str = ""
    words: str = ""

    def read(self, node: yaml.Node, at: At) -> str:
        text = _scalar(node, at, "str")
        if self.pattern and not re.fullmatch(self.pattern, text):
            raise at.wrong(node, f"is {text!r}, which is not {self.words}")
        return text

    def schema(self) -> Schema:
        return {"type": "string", **({"pattern": f"^{self.pattern}$"} if self.pattern else {})}


@dataclass(frozen=True, slots=True)
class Choice:
    """One of the texts in `choices`."""

    choices: tuple[str, ...]

    def read(self, node: yaml.Node, at: At) -> str:
        word = _scalar(node, at, "str")
        if word not in self.choices:
            raise at.wrong(
                node,
                (
                    f"is {word!r}, which is not one of "
                    f"{', '.join(self.choices)}{_suggestion(word, self.choices)}"
                ),
            )
        return word

    def schema(self) -> Schema:
        return {"enum": list(self.choices)}


@dataclass(frozen=True, slots=True)
class Count:
    """A whole number of at least `least`."""

    least: int = 1

    def read(self, node: yaml.Node, at: At) -> int:
        text = _scalar(node, at, "int")
        if not re.fullmatch(r"\d{1,18}", text) or int(text) < self.least:
            raise at.wrong(
                node, f"is {text[:40]}, which is not a whole number of at least {self.least}"
            )
        return int(text)

    def schema(self) -> Schema:
        return {"type": "integer", "minimum": self.least}


@dataclass(frozen=True, slots=True)
class Number:
    """A number, at least `least`, at most `most`."""

    least: float = 0.0
    most: float = math.inf

    def read(self, node: yaml.Node, at: At) -> float:
        text = _scalar(node, at, "int", "float")
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not (math.isfinite(value) and self.least <= value <= self.most):
            words = (
                f"in {self.least:g}..{self.most:g}"
                if math.isfinite(self.most)
                else f"of at least {self.least:g}"
            )
            raise at.wrong(node, f"is {text}, which is not a number {words}")
        return value

    def schema(self) -> Schema:
        return {
            "type": "number",
            "minimum": self.least,
            **({"maximum": self.most} if math.isfinite(self.most) else {}),
        }


@dataclass(frozen=True, slots=True)
class ByteCount:
    """A number of bytes: a whole number, or a text with a unit such as `24GB` or `22.5GiB`."""

    def read(self, node: yaml.Node, at: At) -> int:
        text = _scalar(node, at, "str", "int")
        found = re.fullmatch(_SIZE, text)
        if found is None or len(found[1]) > 18:
            raise at.wrong(
                node,
                (
                    f"is {text[:40]!r}, which is not a number of bytes, such as 24000000000, 24GB "
                    "or 22.5GiB"
                ),
            )
        return int(float(found[1]) * _UNITS[found[3] or ""])

    def schema(self) -> Schema:
        return {"anyOf": [Count(0).schema(), {"type": "string", "pattern": f"^{_SIZE}$"}]}


@dataclass(frozen=True, slots=True)
class Flag:
    """True or false."""

    def read(self, node: yaml.Node, at: At) -> bool:
        text = _scalar(node, at, "bool").lower()
        if text not in ("true", "false"):
            raise at.wrong(node, f"is {text}: write true or false")
        return text == "true"

    def schema(self) -> Schema:
        return {"type": "boolean"}


@dataclass(frozen=True, slots=True)
class List(Generic[Value]):
    """A list of at least one value, without duplicates."""

    element: Shape[Value]

    def read(self, node: yaml.Node, at: At) -> tuple[Value, ...]:
        if not isinstance(node, yaml.SequenceNode):
            raise _mistyped(node, at, "seq")
        found = tuple(
            self.element.read(entry, at.entry(number)) for number, entry in enumerate(node.value)
        )
        if not found:
            raise at.wrong(node, "is an empty list: leave the key out")
        for number, value in enumerate(found):
            if value in found[:number]:
                raise at.entry(number).wrong(
                    node.value[number], f"is {value!r}, which is listed twice: keep one"
                )
        return found

    def schema(self) -> Schema:
        return {"type": "array", "items": self.element.schema(), "minItems": 1, "uniqueItems": True}


@dataclass(frozen=True, slots=True)
class OneOrMore:
    """A text, or a list of texts; both are read as a tuple."""

    element: Text

    def read(self, node: yaml.Node, at: At) -> tuple[str, ...]:
        return (
            List(self.element).read(node, at)
            if isinstance(node, yaml.SequenceNode)
            else (self.element.read(node, at),)
        )

    def schema(self) -> Schema:
        return {"anyOf": [self.element.schema(), List(self.element).schema()]}


@dataclass(frozen=True, slots=True)
class Texts:
    """A mapping of any names to texts."""

    def read(self, node: yaml.Node, at: At) -> dict[str, str]:
        return {
            name.value: Text().read(value, at.key(name.value)) for name, value in pairs(node, at)
        }

    def schema(self) -> Schema:
        return {"type": "object", "additionalProperties": {"type": "string"}}


@dataclass(frozen=True, slots=True)
class Named(Generic[Value]):
    """A mapping of names that match `names` to values: at least one, in the order of the file."""

    names: Text
    element: Shape[Value]

    def read(self, node: yaml.Node, at: At) -> dict[str, Value]:
        found = {
            self.names.read(name, at): self.element.read(value, at.key(name.value))
            for name, value in pairs(node, at)
        }
        if not found:
            raise at.wrong(node, "is empty")
        return found

    def schema(self) -> Schema:
        names = {"pattern": f"^{self.names.pattern}$"} if self.names.pattern else {}
        return {
            "type": "object",
            "propertyNames": names,
            "additionalProperties": self.element.schema(),
            "minProperties": 1,
        }


@dataclass(frozen=True, slots=True)
class Key:
    """A key of a Record: the shape of its value, and its description in the JSON schema."""

    shape: Shape[object]
    description: str
    needed: bool = False


@dataclass(frozen=True, slots=True)
class Record(Generic[Value]):
    """A mapping with fixed keys. `make` is called with the values of those that are present, by
    name.

    Attributes:
        with_source: `make` also gets `source`, the mapping's `file:line`.
    """

    make: Callable[..., Value]
    keys: Mapping[str, Key]
    with_source: bool = False

    def read(self, node: yaml.Node, at: At) -> Value:
        values: dict[str, object] = {}
        for name, value in pairs(node, at):
            key = self.keys.get(name.value)
            if key is None:
                advice = (
                    _suggestion(name.value, self.keys) or f": it may have {', '.join(self.keys)}"
                )
                raise at.wrong(name, f"has no key {name.value!r}{advice}")
            values[name.value] = key.shape.read(value, at.key(name.value))
        for required, key in self.keys.items():
            if key.needed and required not in values:
                raise at.wrong(node, f"has no key {required!r}, which it needs: {key.description}")
        return self.make(
            **values,
            **({"source": f"{at.file}:{node.start_mark.line + 1}"} if self.with_source else {}),
        )

    def schema(self) -> Schema:
        return {
            "type": "object",
            "properties": {
                name: key.shape.schema() | {"description": key.description}
                for name, key in self.keys.items()
            },
            "required": [name for name, key in self.keys.items() if key.needed],
            "additionalProperties": False,
        }


def pairs(node: yaml.Node, at: At) -> list[tuple[yaml.ScalarNode, yaml.Node]]:
    """Return the keys and values of a mapping. Raises InvalidInput for keys that are not texts, and
    for a key that is there twice.
    """
    if not isinstance(node, yaml.MappingNode):
        raise _mistyped(node, at, "map")
    seen: dict[str, int] = {}
    for name, _ in node.value:
        if not isinstance(name, yaml.ScalarNode) or name.tag != f"{_TAG}str":
            raise at.wrong(name, "has a key that is not a text: put it in quotes")
        _refuse_surrogates(name, at)
        if name.value in seen:
            raise at.wrong(
                name, f"has the key {name.value!r} twice, first in line {seen[name.value]}"
            )
        seen[name.value] = name.start_mark.line + 1
    return list(node.value)


def _scalar(node: yaml.Node, at: At, *kinds: str) -> str:
    if not isinstance(node, yaml.ScalarNode) or node.tag not in [f"{_TAG}{kind}" for kind in kinds]:
        raise _mistyped(node, at, kinds[-1])
    _refuse_surrogates(node, at)
    value: str = node.value
    return value


def _refuse_surrogates(node: yaml.ScalarNode, at: At) -> None:
    """YAML can express half of a surrogate pair (`"\\ud800"`), which UTF-8, and so a protobuf
    message, cannot encode.
    """
    try:
        node.value.encode("utf-8")
    except UnicodeEncodeError:
        raise at.wrong(node, "holds half of a surrogate pair, which is not a character") from None


def _mistyped(node: yaml.Node, at: At, kind: str) -> InvalidInput:
    found = node.tag.removeprefix(_TAG)
    if isinstance(node, yaml.ScalarNode):
        advice = ": put it in quotes" if kind == "str" and node.value else ""
        return at.wrong(node, f"must be {_TYPE_NAMES[kind]}, not {node.value or 'nothing'}{advice}")
    return at.wrong(node, f"must be {_TYPE_NAMES[kind]}, not {_TYPE_NAMES.get(found, found)}")


def _suggestion(word: str, known: Mapping[str, object] | tuple[str, ...]) -> str:
    near = get_close_matches(word, known, n=1)
    return f": did you mean {near[0]!r}?" if near else ""
