"""Converts values of the input that are copied to the output: to JSON, and to Arrow columns.

pyarrow is an argument, because it is optional.
"""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from shoal.bulk.failures import JobError


def json_value(value: object) -> Any:
    """Return a value as JSON: times in ISO format, bytes in base64, decimals as text, and null for
    NaN and infinities.
    """
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, (float, np.floating)):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): json_value(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [json_value(one) for one in value]
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    return value.isoformat() if hasattr(value, "isoformat") else str(value)


def scalar_json(pa: Any, scalar: Any) -> Any:
    """Return an Arrow scalar as JSON, also one that has no Python value."""
    try:
        return json_value(scalar.as_py())
    except (ValueError, OverflowError):  # Not UTF-8, nanoseconds, or a year after 9999.
        kind = scalar.type
    if pa.types.is_dictionary(kind):
        return scalar_json(pa, scalar.value)
    if pa.types.is_struct(kind):
        return {field.name: scalar_json(pa, scalar[field.name]) for field in kind}
    if pa.types.is_nested(kind):
        return [scalar_json(pa, one) for one in scalar.values]
    if pa.types.is_temporal(kind):
        return str(scalar.cast(pa.string()).as_py())
    return scalar.as_buffer().to_pybytes().decode(errors="replace")


def build_column(pa: Any, name: str, values: Sequence[object], kind: Any, first: int) -> Any:
    """Return an array of the JSON values of a field.

    Args:
        kind: The type of the field in earlier parts; None to choose it. A field of values of
            several types, of lists or of objects is a column of texts.
        first: The index of the first value in the input.

    Raises:
        JobError: A value does not have the type.
    """
    kind = _infer_type(pa, values) if kind is None else kind
    if kind == pa.string():
        return pa.array([_text(value) for value in values], kind)
    array = _converted(pa, values, kind)
    if array is None:
        row = next(row for row, one in enumerate(values) if _converted(pa, [one], kind) is None)
        raise JobError(
            f"the field {name!r} of line {first + row + 1:,} of the input is {values[row]!r:.40}, "
            f"which does not fit the type of earlier lines, {kind}: write this field as text in "
            "all lines, and run a new job with another output"
        )
    return array


def _infer_type(pa: Any, values: Sequence[object]) -> Any:
    """Return the type that holds all values unchanged; that of texts if none does."""
    array = _converted(pa, values, None)
    if array is None or pa.types.is_null(array.type) or pa.types.is_nested(array.type):
        return pa.string()
    return array.type


def _converted(pa: Any, values: Sequence[object], kind: Any) -> Any:
    """Return an array of exactly these values; None if the type does not hold one of them."""
    try:
        array = pa.array(values, kind)
    except (pa.ArrowException, TypeError, ValueError, OverflowError):
        return None
    # Arrow makes 2.5 an integer and true a number.
    return array if all(map(_is_same, values, array.to_pylist())) else None


def _is_same(value: Any, found: Any) -> bool:
    if isinstance(value, bool) or isinstance(found, bool):
        return value is found
    return bool(value == found or value != value)  # NaN


def _text(value: object) -> str | None:
    if isinstance(value, str):
        return value.encode(errors="replace").decode()  # Arrow has no lone surrogates.
    return None if value is None else json.dumps(json_value(value))
