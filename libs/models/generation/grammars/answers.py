"""Parse the JSON of a generated answer for the contract's Struct."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Final, Literal

from libs.errors import InvalidInput
from libs.models.generation.grammars.schemas import FIELD

MAX_DEPTH: Final = 30
"""Maximum nesting of objects and lists. Protobuf reads messages of a hundred levels, and an object
takes three.
"""


def parse_answer(text: str, finish: Literal["stop", "length"]) -> Mapping[str, object] | None:
    """Parse an answer as an object. None if it was cut off, or if a Struct cannot hold it: nested
    deeper than `MAX_DEPTH`, or with a number outside float64.

    Raises InvalidInput if the grammar could not be followed to the end of the answer.
    """
    if finish == "length":
        return None
    try:
        value = json.loads(text, parse_int=float)
    except RecursionError:
        return None
    except ValueError:
        reason = "the schema is too complex, or requires text that this model has no tokens for"
        raise InvalidInput(
            f"an answer could not be completed: {reason}. Simplify its patterns",
            field=FIELD,
        ) from None
    return value if isinstance(value, dict) and fits(value) else None


def fits(value: object, depth: int = MAX_DEPTH) -> bool:
    """Return whether a Struct can hold the value."""
    match value:
        case dict():
            return depth > 0 and all(
                fits(key, depth) and fits(each, depth - 1) for key, each in value.items()
            )
        case list():
            return depth > 0 and all(fits(each, depth - 1) for each in value)
        case float():
            return math.isfinite(value)
        case str():
            return not any("\ud800" <= character <= "\udfff" for character in value)
    return True
