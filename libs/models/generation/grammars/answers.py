"""The JSON of an answer that was written by a grammar, as the contract's Struct can hold it."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Final, Literal

from libs.errors import InvalidInput
from libs.models.generation.grammars.schemas import FIELD

DEEPEST: Final = 30
"""Objects and lists within each other. Protobuf reads messages of a hundred levels, of which an
object takes three.
"""


def form_of(text: str, finish: Literal["stop", "length"]) -> Mapping[str, object] | None:
    """The object that a whole answer is. None: the answer was cut off, or is one that a Struct
    cannot hold: nested deeper than `DEEPEST`, or with a number that no float64 is.

    Raises InvalidInput for an answer that ended where its grammar could not be followed any more.
    """
    if finish == "length":
        return None
    try:
        value = json.loads(text, parse_int=float)
    except RecursionError:
        return None
    except ValueError:
        reason = (
            "the schema is too complex to follow, or asks for what this model has no tokens for"
        )
        raise InvalidInput(
            f"an answer could not be written to its end: {reason}. Simplify its patterns",
            field=FIELD,
        ) from None
    return value if isinstance(value, dict) and fits(value) else None


def fits(value: object, depth: int = DEEPEST) -> bool:
    """Whether a Struct can hold it."""
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
