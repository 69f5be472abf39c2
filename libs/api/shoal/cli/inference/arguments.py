"""The arguments and options that the inference commands share."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated, ClassVar

import typer

from shoal.cli.inference.files import Selection
from shoal.cli.options import FILES
from shoal.results import DataType, Form
from shoal.tasks import Aggregation, OnInvalid, Role, Scale

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
    typer.Option("--label", "-l", help="Label to find; may be repeated.", show_default=False),
]
Threshold = Annotated[
    float | None, typer.Option(help="Keep results with at least this score.", show_default=False)
]


RoleOption = Annotated[Role | None, typer.Option("--role", help="Selects the model's prompt.")]
DataTypeOption = Annotated[
    DataType | None,
    typer.Option("--data-type", help="How numbers are stored; default float32."),
]
Dimensions = Annotated[
    int,
    typer.Option(min=0, help="Number of leading dimensions to keep (Matryoshka); 0 keeps all."),
]
Normalize = Annotated[
    bool | None, typer.Option(help="Scale to length 1; default as configured for the model.")
]
ChunkTokens = Annotated[
    int,
    typer.Option(
        min=0, help="Maximum tokens of a chunk; 0: 512, or the model's limit if that is less."
    ),
]
ChunkOverlap = Annotated[
    int, typer.Option(min=0, help="Number of tokens that a chunk repeats from the previous one.")
]
ScaleOption = Annotated[
    Scale | None,
    typer.Option("--scale", help="The scale of the scores; default the model's."),
]
Flat = Annotated[bool | None, typer.Option(help="Remove overlapping entities; default yes.")]
AggregationOption = Annotated[
    Aggregation | None,
    typer.Option(
        "--aggregation", help="Rule by which labels of a word's tokens become one; default simple."
    ),
]
MultiLabel = Annotated[
    bool | None,
    typer.Option(help="Score each label independently (sigmoid); default as the model does."),
]
Hypothesis = Annotated[
    str, typer.Option(help="Sentence to test for each label; {} stands for the label.")
]
SchemaPath = Annotated[
    Path,
    typer.Option(
        "--schema",
        "-s",
        help="JSON file: entities, classifications, relations, structures.",
        show_default=False,
    ),
]
MaxTokens = Annotated[
    int,
    typer.Option(
        "--max-tokens", min=0, max=4096, help="Maximum generated tokens; 0: the model's default."
    ),
]
Temperature = Annotated[
    float | None,
    typer.Option(min=0, max=10, help="Sampling temperature; 0: no sampling.", show_default=False),
]
Seed = Annotated[
    int | None,
    typer.Option(
        min=0, help="Seed for sampling: the same seed gives the same text.", show_default=False
    ),
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
    def pages(self) -> str:
        """The pages of documents to read; empty for all."""
        return ""

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
    pages: Annotated[
        str,
        typer.Option(
            help="Pages of each document to read, such as 3 or 1-5; default all.",
            show_default=False,
            rich_help_panel=FILES,
        ),
    ] = ""
    suffixes: ClassVar[tuple[str, ...]] = (".npy", ".npz", ".parquet", ".jsonl")


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
