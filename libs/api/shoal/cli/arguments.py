"""The arguments and options that the commands of inference share."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from shoal.plans import OnInvalid, Priority, Truncation
from shoal.results import Form

FILES = "Input and output"
SERVING = "How it is served"

ModelId = Annotated[str, typer.Argument(metavar="MODEL", help="org/name, or org/name@revision.", show_default=False)]
Texts = Annotated[list[str] | None, typer.Argument(metavar="TEXT", help="Texts; - for stdin, one a line.", show_default=False)]
Input = Annotated[
    Path | None,
    typer.Option("--input", "-i", help=".txt (a text a line) or .jsonl; - for stdin.", show_default=False, rich_help_panel=FILES),
]
Field = Annotated[
    str | None,
    typer.Option(help='Field of a .jsonl line that holds the text; default "text".', show_default=False, rich_help_panel=FILES),
]
VectorFile = Annotated[
    Path | None,
    typer.Option("--output", "-o", help=".npy, .npz, .jsonl, or - for stdout.", show_default=False, rich_help_panel=FILES),
]
LineFile = Annotated[
    Path | None, typer.Option("--output", "-o", help=".jsonl, or - for stdout.", show_default=False, rich_help_panel=FILES)
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.", rich_help_panel=FILES)]
Invalid = Annotated[
    OnInvalid,
    typer.Option(
        "--on-invalid",
        help="What an empty line, or a text that is too long (--truncation none), does: fail all, or be skipped and reported.",
        rich_help_panel=FILES,
    ),
]
Instruction = Annotated[str, typer.Option(help="Put before each text instead of the model's prompt.")]
Truncate = Annotated[Truncation | None, typer.Option("--truncation", help="What to do with texts that are too long; default end.")]
Adapter = Annotated[str, typer.Option(help="LoRA adapter of the model, org/name.", rich_help_panel=SERVING)]
Pool = Annotated[
    str, typer.Option(help="Workers to serve it, such as l4-spot; default as the catalog says.", rich_help_panel=SERVING)
]
Urgency = Annotated[
    Priority | None, typer.Option("--priority", help="Who goes first; default interactive.", rich_help_panel=SERVING)
]
Labels = Annotated[list[str] | None, typer.Option("--label", "-l", help="Label to look for; repeat for more.", show_default=False)]
Threshold = Annotated[float | None, typer.Option(help="Keep what scores at least this.", show_default=False)]


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
    list[FormName] | None, typer.Option("--representation", "-r", help="Repeat for more; default the model's.", show_default=False)
]
