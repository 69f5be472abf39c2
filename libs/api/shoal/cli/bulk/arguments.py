"""Options of `shoal job`."""

from __future__ import annotations

import math
import re
import time
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import Annotated, Any, Final

import typer

from shoal.bulk.spec import DEFAULT_CHUNK_ROWS, MAX_CHUNK_ROWS, BulkLimits, BulkRecipe, Verb
from shoal.cli.options import FILES
from shoal.options import AdapterOption, PoolOption, TruncationOption

LIMITS: Final = "Limits"
_UNITS: Final = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
_DURATION: Final = re.compile(r"(\d+(?:\.\d+)?)([smhd])")

Output = Annotated[
    str,
    typer.Argument(
        metavar="OUTPUT",
        help="Folder or URL of the job's parts, or the id of a submitted job.",
        show_default=False,
    ),
]
InFlight = Annotated[
    int | None,
    typer.Option(
        "--in-flight",
        min=1,
        help="Maximum chunks in flight, adapted to the mesh; default 8.",
        show_default=False,
        rich_help_panel=LIMITS,
    ),
]
MaxFailed = Annotated[
    float | None,
    typer.Option(
        "--max-failed",
        min=0,
        max=1,
        help="Stop the job if more than this share of its rows fails; default 0.1.",
        show_default=False,
        rich_help_panel=LIMITS,
    ),
]
Deadline = Annotated[
    str,
    typer.Option(
        help="Stop after this time (90m, 8h, 2d), or at 2027-01-31T06:00.",
        show_default=False,
        rich_help_panel=LIMITS,
    ),
]
Patience = Annotated[
    float | None,
    typer.Option(
        min=1,
        help="Stop the job after this many seconds without an answer; default 900.",
        show_default=False,
        rich_help_panel=LIMITS,
    ),
]


Prices = Annotated[
    list[str] | None,
    typer.Option(
        metavar="POOL=PRICE",
        help="Price of a worker for an hour, to report the cost; may be repeated.",
        show_default=False,
        rich_help_panel=LIMITS,
    ),
]
Source = Annotated[
    str,
    typer.Option(
        "--input",
        "-i",
        help=".parquet, .jsonl, .csv or .tsv: a path, URL (s3://bucket/a.csv), pattern or folder.",
        show_default=False,
        rich_help_panel=FILES,
    ),
]
Folder = Annotated[
    str,
    typer.Option(
        "--output",
        "-o",
        help="Folder of the parts and of manifest.json: a path, or a URL.",
        show_default=False,
        rich_help_panel=FILES,
    ),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class JobFiles:
    """The input and output of a job."""

    source: Source
    output: Folder
    column: Annotated[
        str,
        typer.Option(help="Column, or field of lines, with the texts.", rich_help_panel=FILES),
    ] = "text"
    keep: Annotated[
        list[str] | None,
        typer.Option(
            help="Column to copy to the output, such as an id; may be repeated.",
            show_default=False,
            rich_help_panel=FILES,
        ),
    ] = None
    chunk_rows: Annotated[
        int,
        typer.Option(
            min=1,
            max=MAX_CHUNK_ROWS,
            help="Rows of a chunk, which is one part of the output.",
            rich_help_panel=FILES,
        ),
    ] = DEFAULT_CHUNK_ROWS


@dataclass(frozen=True, slots=True, kw_only=True)
class OptionalFiles(JobFiles):
    """The same where a command may run without a job."""

    source: Source = ""
    output: Folder = ""


@dataclass(frozen=True, slots=True)
class JobLimitOptions:
    """The limits of a job. Those that are not given stay as they are."""

    in_flight: InFlight = None
    max_failed: MaxFailed = None
    deadline: Deadline = ""
    patience: Patience = None
    price: Prices = None

    def limits(self, before: BulkLimits | None = None) -> BulkLimits:
        """Return the limits of the options. Raises BadParameter."""
        old = before or BulkLimits()
        return BulkLimits(
            old.in_flight if self.in_flight is None else self.in_flight,
            old.failed_share if self.max_failed is None else self.max_failed,
            _deadline(self.deadline) if self.deadline else old.deadline,
            old.patience if self.patience is None else self.patience,
            old.prices if self.price is None else _prices(self.price),
        )

    def given(self) -> dict[str, float | int]:
        """Return the limits that are given, by their names in a manifest. Raises BadParameter."""
        values = {
            "in_flight": self.in_flight,
            "failed_share": self.max_failed,
            "deadline": _deadline(self.deadline) if self.deadline else None,
            "patience": self.patience,
        }
        return {name: value for name, value in values.items() if value is not None}


@dataclass(frozen=True, slots=True)
class JobServing:
    """Options of every verb."""

    truncation: TruncationOption = None
    adapter: AdapterOption = ""
    pool: PoolOption = ""


def recipe(
    model: str,
    files: JobFiles,
    serving: JobServing,
    *,
    verb: Verb,
    options: dict[str, Any],
    **others: Any,
) -> BulkRecipe:
    """Return the recipe of the options of a command; options with empty values are left out."""
    given = {**asdict(serving), **options}
    return BulkRecipe(
        verb,
        model,
        {name: value for name, value in given.items() if value or value is False},
        text=files.column,
        keep=tuple(files.keep or ()),
        chunk_rows=files.chunk_rows,
        **others,
    )


def _prices(texts: list[str]) -> dict[str, float]:
    """Return the prices of options such as `l4=0.7`. Raises BadParameter."""
    found = {}
    for text in texts:
        pool, _, number = text.partition("=")
        try:
            price = float(number)
        except ValueError:
            price = -1.0
        if not pool or not 0 <= price < math.inf:
            raise typer.BadParameter(
                f"{text!r} is not a pool and its price for an hour, such as l4=0.7",
                param_hint="--price",
            )
        found[pool] = price
    return found


def _deadline(text: str) -> float:
    """Return the seconds since the epoch of a duration or local time. Raises BadParameter."""
    match = _DURATION.fullmatch(text)
    if match is not None:
        return time.time() + float(match[1]) * _UNITS[match[2]]
    try:
        return datetime.fromisoformat(text).timestamp()
    except ValueError:
        raise typer.BadParameter(
            f"--deadline {text} is neither a duration such as 8h nor a time such as "
            "2027-01-31T06:00"
        ) from None
