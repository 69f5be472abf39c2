"""Validate JSON Schemas: only those that compile within a second and take milliseconds a token are
served.

llguidance bounds most of its work itself (`matching.LIMITS`), but not how many expressions it
intersects: 17 KB of `patternProperties` were compiled in 34 s, 48 KB of `multipleOf` in 82 s and
3.8 GB (docs/decisions/0048).
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Final, NoReturn

from libs.errors import InvalidInput

FIELD: Final = "text.json_schema"
MAX_BYTES: Final = 32 << 10
_MAX_COUNTS: Final = {
    "schemas": 256,
    "branches of anyOf, oneOf and allOf": 64,
    "values": 1000,
    "patterns": 16,
}
"""Limits of the whole schema. Properties are schemas; values are those of `enum`."""
MAX_PATTERN: Final = 256
MAX_DEPTH: Final = 16

_ONE: Final = ("items", "additionalProperties")
_NAMED: Final = ("properties", "$defs", "definitions")
_LISTED: Final = ("prefixItems", "anyOf", "oneOf", "allOf")
_BRANCHES: Final = ("anyOf", "oneOf", "allOf")
_KEYS: Final = frozenset({
    *_ONE, *_NAMED, *_LISTED, "type", "enum", "const", "required", "$ref",
    "minItems", "maxItems", "minLength", "maxLength",
    "pattern", "format", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum",
    "title", "description", "default", "examples", "$schema", "$comment", "readOnly", "writeOnly",
})  # fmt: skip
"""Supported keywords. Those of the last line do not constrain an answer."""

Object = Mapping[str, object]


def check_schema(text: str, field: str = FIELD) -> None:
    """Check that a schema is supported. `field`: its path in the request.

    Raises InvalidInput with the place in the schema, as a JSON pointer.
    """
    if len(text) > MAX_BYTES or len(text.encode()) > MAX_BYTES:
        raise InvalidInput(f"the schema has more than {MAX_BYTES:,} bytes", field=field)
    try:
        schema = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidInput(f"the schema is not valid JSON: {error}", field=field) from None
    if not isinstance(schema, dict) or schema.get("type") != "object":
        refuse("#", 'an answer is an object: the schema\'s own "type" must be "object"', field)
    found: Counter[str] = Counter()
    for path, each in _walk(schema, field):
        _check_keys(path, each, field)
        found += _counts(each)
        for name, most in _MAX_COUNTS.items():
            if found[name] > most:
                refuse(path, f"the schema has more than {most:,} {name}", field)


def _counts(schema: Object) -> Counter[str]:
    """Count a single schema by the keys of `_MAX_COUNTS`."""
    branches = sum(len(_list(schema, key)) for key in _BRANCHES)
    return Counter(
        dict(
            zip(
                _MAX_COUNTS,
                (1, branches, len(_list(schema, "enum")), "pattern" in schema),
                strict=True,
            )
        )
    )


def refuse(path: str, reason: str, field: str = FIELD) -> NoReturn:
    """Raise InvalidInput for the place `path`, a JSON pointer."""
    raise InvalidInput(f"the schema, at {path}: {reason}", field=field)


def _walk(schema: Object, field: str) -> Iterator[tuple[str, Object]]:
    """Yield each nested schema and its path, the whole one first. Raises InvalidInput below
    `MAX_DEPTH`.
    """
    waiting: list[tuple[str, object, int]] = [("#", schema, 0)]
    while waiting:
        path, each, depth = waiting.pop()
        if not isinstance(each, dict):
            continue  # true or false; llguidance refuses anything else
        if depth > MAX_DEPTH:
            refuse(path, f"the schema is nested more than {MAX_DEPTH} times", field)
        yield path, each
        waiting += [(f"{path}/{where}", inner, depth + 1) for where, inner in _within(each)]


def _within(schema: Object) -> Iterator[tuple[str, object]]:
    yield from ((key, schema[key]) for key in _ONE if key in schema)
    for key in _NAMED:
        named = schema.get(key)
        if isinstance(named, dict):
            yield from ((f"{key}/{name}", inner) for name, inner in named.items())
    for key in _LISTED:
        yield from ((f"{key}/{place}", inner) for place, inner in enumerate(_list(schema, key)))


def _check_keys(path: str, schema: Object, field: str) -> None:
    unknown = next((key for key in schema if key not in _KEYS), None)
    if unknown is not None:
        refuse(path, f"the keyword {unknown!r} is not supported", field)
    pattern = schema.get("pattern")
    if isinstance(pattern, str) and len(pattern) > MAX_PATTERN:
        refuse(f"{path}/pattern", f"a pattern has at most {MAX_PATTERN} characters", field)
    target = schema.get("$ref")
    if isinstance(target, str) and not target.startswith("#"):
        refuse(
            f"{path}/$ref",
            "only references within the schema are supported, such as #/$defs/name",
            field,
        )


def _list(schema: Object, key: str) -> list[object]:
    found = schema.get(key)
    return found if isinstance(found, list) else []
