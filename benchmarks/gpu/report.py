"""The results of one step, written after each row, so that a killed step keeps its results."""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Final, Literal, cast, get_args

Value = str | int | float | bool | None | list["Value"] | dict[str, "Value"]
Row = dict[str, Value]
Status = Literal["running", "done", "partial", "failed", "killed", "skipped"]

SCHEMA: Final = 1
NO_CUDA: Final = "no CUDA device"
LOG_BYTES: Final = 20_000
ROOT: Final = Path(__file__).resolve().parent.parent.parent


@dataclass(frozen=True, slots=True)
class StepTarget:
    """A bound and the measurement.

    Attributes:
        measured: None if it was not measured.
    """

    target: str
    bound: float
    unit: str
    measured: float | None
    at_most: bool = False

    @property
    def met(self) -> bool | None:
        if self.measured is None:
            return None
        return self.measured <= self.bound if self.at_most else self.measured >= self.bound


@dataclass(slots=True)
class StepReport:
    """The results of one step.

    Attributes:
        tree: A digest of the files that the step covers.
        rows: One for each measurement, by its name `what`; `skipped` or `error` in it give the
            reason for missing numbers.
        reason: The reason of a status other than done.
        is_rehearsal: Small sizes or no GPU, so numbers mean nothing.
    """

    step: str
    status: Status = "running"
    reason: str = ""
    is_rehearsal: bool = False
    machine: dict[str, str] = field(default_factory=dict)
    tree: str = ""
    began: str = ""
    seconds: float = 0.0
    rows: list[Row] = field(default_factory=list)
    targets: list[StepTarget] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    log_tail: str = ""

    def to_json(self) -> str:
        reported = {
            "schema": SCHEMA,
            **asdict(self),
            "targets": [asdict(one) | {"met": one.met} for one in self.targets],
        }
        return json.dumps(_finite(reported), indent=1)

    def write(self, folder: Path) -> None:
        """Replace `<step>.json` there, never half written."""
        folder.mkdir(parents=True, exist_ok=True)
        partial = folder / f".{self.step}.json.{os.getpid()}"
        partial.write_text(self.to_json())
        partial.replace(folder / f"{self.step}.json")

    def row(self, what: str) -> Row | None:
        return next((row for row in self.rows if row["what"] == what), None)

    def number(self, what: str, name: str) -> float | None:
        """A number of a row, if it was measured."""
        value = (self.row(what) or {}).get(name)
        return (
            float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None
        )

    def line(self) -> str:
        """Return the outcome of the step, for a table of all steps."""
        failed = sum("error" in row for row in self.rows)
        skipped = sum("skipped" in row for row in self.rows)
        counts = (
            f"{len(self.rows)} rows"
            + (f", {failed} failed" if failed else "")
            + (f", {skipped} skipped" if skipped else "")
        )
        missed = [
            f"{one.target} {one.measured:.3g} {one.unit}"
            for one in self.targets
            if one.met is False and one.measured is not None
        ]
        met = sum(one.met is True for one in self.targets)
        verdict = f"; {met} of {len(self.targets)} targets met" if self.targets else ""
        verdict += f"; missed: {', '.join(missed)}" if missed else ""
        reason = f" ({self.reason})" if self.reason else ""
        return f"{self.step:9} {self.status}{reason}, {self.seconds:.0f} s, {counts}{verdict}"


def read(path: Path) -> StepReport:
    """Raise ValueError if the file is not a report of this schema."""
    reported = json.loads(path.read_text())
    if wrong := faults(reported):
        raise ValueError(f"{path}: {'; '.join(wrong)}")
    targets = [
        StepTarget(**{name: value for name, value in one.items() if name != "met"})
        for one in reported.pop("targets")
    ]
    reported.pop("schema")
    return StepReport(targets=targets, **reported)


_TYPES: Final[Mapping[str, type | tuple[type, ...]]] = {
    "schema": int, "step": str, "status": str, "reason": str, "is_rehearsal": bool, "machine": dict,
    "tree": str, "began": str,
    "seconds": (int, float), "rows": list, "targets": list, "notes": list, "log_tail": str,
}  # fmt: skip


def faults(reported: object) -> list[str]:
    """List the differences between a value read from JSON and the schema of a report."""
    if not isinstance(reported, dict):
        return ["no object"]
    named = cast("dict[str, object]", reported)
    wrong = [f"{name} is missing" for name in _TYPES if name not in named]
    wrong += [f"{name} is not known" for name in named if name not in _TYPES]
    wrong += [
        f"{name} is {named[name]!r}"
        for name, kind in _TYPES.items()
        if name in named and not isinstance(named[name], kind)
    ]
    if wrong:
        return wrong
    if named["schema"] != SCHEMA:
        wrong.append(f"schema {named['schema']}, not {SCHEMA}")
    if named["status"] not in get_args(Status):
        wrong.append(f"status {named['status']!r}")
    wrong += [
        "a row has no name `what`"
        for row in cast("list[dict[str, object]]", named["rows"])
        if not isinstance(row.get("what"), str)
    ]
    fields = {"target", "bound", "unit", "measured", "at_most", "met"}
    wrong += [
        f"a target has {sorted(one)}"
        for one in cast("list[dict[str, object]]", named["targets"])
        if set(one) != fields
    ]
    return wrong


def _finite(value: object) -> object:
    """JSON has no NaN and no infinity."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {name: _finite(one) for name, one in value.items()}
    return [_finite(one) for one in value] if isinstance(value, list | tuple) else value


def tree_name(covers: tuple[str, ...]) -> str:
    """Return a digest of the Python files that a step covers (files or folders): whether a report
    was made by the code here.
    """
    digest = hashlib.sha256()
    for name in covers:
        for path in [ROOT / name] if name.endswith(".py") else sorted((ROOT / name).rglob("*.py")):
            digest.update(f"{path.relative_to(ROOT)}\n".encode() + path.read_bytes())
    return digest.hexdigest()[:12]
