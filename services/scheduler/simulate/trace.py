"""The input of a simulation and its CSV files: requests with their times, and the costs of their
models.

A trace has the columns time_seconds, model, tokens and, optionally, adapter. The costs of models
are in a separate file with the columns model, bytes, load_seconds and, if known, warm_seconds and
tokens_per_second, or in these columns of the trace.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeVar

from libs.errors import InvalidInput

TOKENS_PER_SECOND: Final = 50_000.0
"""Rate of a model without a measured one."""
_REQUEST_COLUMNS: Final = ("time_seconds", "model", "tokens", "adapter")
_COST_COLUMNS: Final = ("bytes", "load_seconds", "warm_seconds", "tokens_per_second")
_Number = TypeVar("_Number", int, float)


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request. Requests of a model's adapters share its batches."""

    at: float
    """Seconds since the trace began."""
    model: str
    tokens: int
    """Number of tokens, at least 1."""
    adapter: str = ""


@dataclass(frozen=True, slots=True)
class ModelCost:
    """The costs and the speed of one model."""

    model: str
    bytes: int
    """Bytes on the device."""
    load_seconds: float
    """Duration of a load from disk."""
    warm_seconds: float | None = None
    """Duration of a load from host memory; None: by the fleet's bandwidth."""
    tokens_per_second: float = TOKENS_PER_SECOND
    """Throughput of a forward pass."""


@dataclass(frozen=True, slots=True)
class Trace:
    """Requests by rising time, and the cost of every model in them."""

    name: str
    requests: Sequence[TraceRequest]
    models: Mapping[str, ModelCost]


def read_trace(path: Path, models: Path | None = None) -> Trace:
    """Read a trace and its models' costs: from `models`, from the trace's columns, or from both
    (`models` has precedence).

    Raises InvalidInput with file, line and problem; OSError if a file cannot be read.
    """
    costs = {} if models is None else read_models(models)
    requests: list[TraceRequest] = []
    with path.open(newline="", encoding="utf-8") as file:
        for row in _rows(path, file, _REQUEST_COLUMNS[:3], (*_REQUEST_COLUMNS, *_COST_COLUMNS)):
            at = row.number("time_seconds", float, minimum=0.0)
            model = row.text("model")
            requests.append(
                TraceRequest(
                    at, model, row.number("tokens", int, minimum=1), row.values.get("adapter", "")
                )
            )
            if model not in costs:
                if not row.values.get("bytes"):
                    raise row.wrong(
                        "bytes",
                        f"the costs of {model} are missing: give bytes and load_seconds here or"
                        " in a models file",
                    )
                costs[model] = _cost(row)
    if not requests:
        raise InvalidInput(f"{path}: the file has no requests")
    requests.sort(key=lambda request: request.at)
    used = {request.model for request in requests}
    return Trace(
        path.stem, requests, {model: cost for model, cost in costs.items() if model in used}
    )


def read_models(path: Path) -> dict[str, ModelCost]:
    """Read the costs of models. Raises InvalidInput with file and line; OSError if the file cannot
    be read.
    """
    costs: dict[str, ModelCost] = {}
    with path.open(newline="", encoding="utf-8") as file:
        for row in _rows(path, file, ("model", "bytes", "load_seconds"), ("model", *_COST_COLUMNS)):
            cost = _cost(row)
            if cost.model in costs:
                raise row.wrong("model", f"{cost.model} is listed twice")
            costs[cost.model] = cost
    return costs


def write_trace(path: Path, requests: Sequence[TraceRequest]) -> None:
    """Write a file for `read_trace`, without costs."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(_REQUEST_COLUMNS)
        writer.writerows((f"{one.at:.6f}", one.model, one.tokens, one.adapter) for one in requests)


def write_models(path: Path, costs: Sequence[ModelCost]) -> None:
    """Write a file for `read_models`."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(("model", *_COST_COLUMNS))
        for one in costs:
            warm = "" if one.warm_seconds is None else f"{one.warm_seconds:.6f}"
            writer.writerow(
                (
                    one.model,
                    one.bytes,
                    f"{one.load_seconds:.6f}",
                    warm,
                    f"{one.tokens_per_second:.1f}",
                )
            )


def models_path(trace: Path) -> Path:
    """Return the default path of a trace's models file, in the same folder."""
    return trace.with_name(f"{trace.stem}.models.csv")


@dataclass(frozen=True, slots=True)
class _Row:
    path: Path
    line: int
    values: Mapping[str, str]

    def wrong(self, column: str, problem: str) -> InvalidInput:
        return InvalidInput(f"{self.path}:{self.line}: {column}: {problem}", field=column)

    def text(self, column: str) -> str:
        value = self.values.get(column, "")
        if not value:
            raise self.wrong(column, "is missing")
        return value

    def number(self, column: str, kind: Callable[[str], _Number], *, minimum: _Number) -> _Number:
        text = self.text(column)
        try:
            value = kind(text)
            is_fit = math.isfinite(value) and value >= minimum
        except (OverflowError, ValueError):
            is_fit = False
        if not is_fit:
            what = "a whole number" if kind is int else "a number"
            raise self.wrong(column, f"must be {what} of at least {minimum:g}, not {text!r}")
        return value


def _rows(
    path: Path, lines: Iterator[str], required: Sequence[str], known: Sequence[str]
) -> Iterator[_Row]:
    reader = csv.DictReader(lines, skipinitialspace=True)
    try:
        columns = list(reader.fieldnames or ())
        unknown = [column for column in columns if column not in known]
        missing = [column for column in required if column not in columns]
        if unknown or missing:
            problem = f"has no column {missing[0]!r}" if missing else f"has a column {unknown[0]!r}"
            raise InvalidInput(f"{path}:1: {problem}; the columns may be {', '.join(known)}")
        for values in reader:
            row = _Row(
                path,
                reader.line_num,
                {name: (value or "").strip() for name, value in values.items() if name is not None},
            )
            if None in values:
                raise row.wrong(columns[-1], f"the line has more than {len(columns)} values")
            yield row
    except (csv.Error, UnicodeDecodeError) as error:
        raise InvalidInput(f"{path}:{reader.line_num + 1}: is not CSV: {error}") from None


def _cost(row: _Row) -> ModelCost:
    given = row.values
    return ModelCost(
        row.text("model"),
        row.number("bytes", int, minimum=1),
        row.number("load_seconds", float, minimum=0.0),
        row.number("warm_seconds", float, minimum=0.0) if given.get("warm_seconds") else None,
        row.number("tokens_per_second", float, minimum=1.0)
        if given.get("tokens_per_second")
        else TOKENS_PER_SECOND,
    )
