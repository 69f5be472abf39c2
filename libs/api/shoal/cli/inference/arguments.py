"""The arguments and options that the inference commands share."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, ClassVar

import typer

from shoal.cli.inference.files import Selection
from shoal.results import Form
from shoal.tasks import LongText, OnInvalid, Priority, Truncation

FILES = "Input and output"
SERVING = "Serving"

ModelId = Annotated[
    str, typer.Argument(metavar="MODEL", help="org/name, or org/name@revision.", show_default=False)
]
Texts = Annotated[
    list[str] | None,
    typer.Argument(metavar="TEXT", help="Texts; - for stdin, one per line.", show_default=False),
]
AsJson = Annotated[
    bool, typer.Option("--json", help="Print JSON, for programs.", rich_help_panel=FILES)
]
Instruction = Annotated[
    str, typer.Option(help="A text to put before each text instead of the model's prompt.")
]
ImageFiles = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="IMAGE", help="Image files; - for their names on stdin.", show_default=False
    ),
]
DrawInto = Annotated[
    Path | None,
    typer.Option(
        help="Draw the regions of one image into this .png.",
        show_default=False,
        rich_help_panel=FILES,
    ),
]
TextFile = Annotated[
    Path | None,
    typer.Option(
        "--input",
        "-i",
        help=".txt (one text per line), .jsonl, .csv, .tsv or .parquet; - for lines of stdin.",
        show_default=False,
        rich_help_panel=FILES,
    ),
]
Labels = Annotated[
    list[str] | None,
    typer.Option("--label", "-l", help="Label to look for; may be repeated.", show_default=False),
]
Threshold = Annotated[
    float | None, typer.Option(help="Keep results with at least this score.", show_default=False)
]


@dataclass(frozen=True, slots=True)
class LineFiles:
    """Sources of texts, and destinations of results as lines of JSON."""

    source: TextFile = None
    field: Annotated[
        str | None,
        typer.Option(
            help='Field of a .jsonl line that holds the text; default "text".',
            show_default=False,
            rich_help_panel=FILES,
        ),
    ] = None
    column: Annotated[
        str | None,
        typer.Option(
            help='Column of a .csv, .tsv or .parquet file that holds the text; default "text".',
            show_default=False,
            rich_help_panel=FILES,
        ),
    ] = None
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            help=".jsonl, or - for stdout.",
            show_default=False,
            rich_help_panel=FILES,
        ),
    ] = None
    image: Annotated[
        bool,
        typer.Option(
            "--image",
            help="The arguments, or lines of --input, are image files.",
            rich_help_panel=FILES,
        ),
    ] = False
    suffixes: ClassVar[tuple[str, ...]] = (".jsonl",)

    @property
    def document(self) -> bool:
        """True if the arguments, or lines of `source`, are files of documents."""
        return False

    @property
    def resume(self) -> bool:
        """True if results are appended to those of an existing .jsonl file."""
        return False

    def selection(self, on_invalid: OnInvalid) -> Selection:
        """Return the selection of texts to read from `source`."""
        return Selection(self.field, self.column, on_invalid == "skip")


@dataclass(frozen=True, slots=True)
class ItemFiles(LineFiles):
    """The same of a command that has a line for each text, which are written as they arrive."""

    resume: Annotated[
        bool,
        typer.Option(
            "--resume", help="Continue a .jsonl file that was interrupted.", rich_help_panel=FILES
        ),
    ] = False


@dataclass(frozen=True, slots=True)
class VectorFiles(ItemFiles):
    """Sources of texts, and destinations of vectors."""

    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            help=".npy, .npz, .parquet, .jsonl, or - for stdout.",
            show_default=False,
            rich_help_panel=FILES,
        ),
    ] = None
    document: Annotated[
        bool,
        typer.Option(
            "--document",
            help="The arguments, or lines of --input, are files of documents: PDF, DOCX, HTML, … "
            "Add --chunk for text models.",
            rich_help_panel=FILES,
        ),
    ] = False
    suffixes: ClassVar[tuple[str, ...]] = (".npy", ".npz", ".parquet", ".jsonl")


@dataclass(frozen=True, slots=True)
class _Serving:
    """Options that every inference verb of the client has."""

    adapter: Annotated[
        str,
        typer.Option(
            help="LoRA adapter of the model, org/name, or one of the model's own tasks.",
            rich_help_panel=SERVING,
        ),
    ] = ""
    pool: Annotated[
        str,
        typer.Option(
            help="Pool of workers, such as l4-spot; default from the catalog.",
            rich_help_panel=SERVING,
        ),
    ] = ""
    priority: Annotated[
        Priority | None,
        typer.Option(
            "--priority",
            help="Bulk requests get a tenth of a busy lane, or all of an idle one.",
            rich_help_panel=SERVING,
        ),
    ] = None
    on_invalid: Annotated[
        OnInvalid,
        typer.Option(
            "--on-invalid",
            help=(
                "If a line is empty or a text too long (--truncation none): fail the command, or "
                "skip and report it."
            ),
            rich_help_panel=FILES,
        ),
    ] = "raise"

    def arguments(self) -> dict[str, Any]:
        """Return the keyword arguments of the client's verbs."""
        return {
            "adapter": self.adapter,
            "pool": self.pool,
            "priority": self.priority,
            "on_invalid": self.on_invalid,
        }


@dataclass(frozen=True, slots=True)
class Serving(_Serving):
    """Options of verbs that truncate long texts."""

    truncation: Annotated[
        Truncation | None,
        typer.Option("--truncation", help="How to truncate texts that are too long; default end."),
    ] = None

    def arguments(self) -> dict[str, Any]:
        """Return the keyword arguments of the client's verbs."""
        return {**_Serving.arguments(self), "truncation": self.truncation}


@dataclass(frozen=True, slots=True)
class WindowedServing(_Serving):
    """Options of verbs that can read long texts in windows."""

    truncation: Annotated[
        LongText | None,
        typer.Option(
            "--truncation",
            help=(
                "How to truncate texts that are too long; default end. windows: read all of them "
                "in overlapping windows, and merge the results."
            ),
        ),
    ] = None
    window_overlap: Annotated[
        int | None,
        typer.Option(
            "--window-overlap",
            min=0,
            help="Tokens that windows share; default 256, or a quarter of a shorter window.",
            show_default=False,
            rich_help_panel=SERVING,
        ),
    ] = None

    def arguments(self) -> dict[str, Any]:
        """Return the keyword arguments of the client's verbs."""
        own = {"truncation": self.truncation, "window_overlap": self.window_overlap}
        return {**_Serving.arguments(self), **own}


class FormName(StrEnum):
    """`Form` as an enumeration: typer does not take a list of literals."""

    DENSE = "dense"
    SPARSE = "sparse"
    MULTI_VECTOR = "multi_vector"


FORMS: dict[FormName, Form] = {
    FormName.DENSE: "dense",
    FormName.SPARSE: "sparse",
    FormName.MULTI_VECTOR: "multi_vector",
}
Forms = Annotated[
    list[FormName] | None,
    typer.Option(
        "--representation",
        "-r",
        help="Vectors to return; may be repeated; default the model's.",
        show_default=False,
    ),
]
