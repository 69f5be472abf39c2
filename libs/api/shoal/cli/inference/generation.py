"""`shoal extract generate` and `shoal extract ocr`: texts that a model generates from texts, and
from images.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Annotated, Final

import typer

from shoal.cli.inference import drawings, outputs
from shoal.cli.inference.arguments import (
    AsJson,
    DrawInto,
    ImageFiles,
    ItemFiles,
    MaxTokens,
    Seed,
    Temperature,
    Texts,
)
from shoal.cli.inference.invocation import Invocation
from shoal.cli.inference.report import report_extractions
from shoal.cli.model_names import ModelId
from shoal.cli.options import OpenClient, connected
from shoal.cli.text import printable
from shoal.client import Client
from shoal.extractions import Delta
from shoal.options import EncodeOptions, StreamOptions
from shoal.results import ExtractResult
from shoal.tasks import ReadText

GENERATION_PART_ITEMS: Final = 16
"""Items of one call of the client while a .jsonl file is written: each takes seconds, and an
interrupted call is lost.
"""


class ReadingKind(StrEnum):
    CAPTION = "caption"
    DETAILED_CAPTION = "detailed_caption"
    OCR = "ocr"
    OCR_REGIONS = "ocr_regions"


SchemaFile = Annotated[
    Path | None,
    typer.Option(
        help="A file with a JSON Schema that each answer follows (structured output).",
        show_default=False,
    ),
]
TemplateValues = Annotated[
    list[str] | None,
    typer.Option(
        "--template-value",
        help="A value for the chat template: enable_thinking=false. May be repeated.",
        show_default=False,
    ),
]
TopP = Annotated[
    float | None,
    typer.Option(
        min=0,
        max=1,
        help="Sample from the most likely tokens that together have this probability.",
        show_default=False,
    ),
]
TopK = Annotated[
    int | None,
    typer.Option(min=0, help="Sample from this number of most likely tokens.", show_default=False),
]
Stop = Annotated[
    list[str] | None,
    typer.Option(
        "--stop", help="A text before which an answer ends. May be repeated.", show_default=False
    ),
]
Stream = Annotated[
    bool, typer.Option("--stream", help="Print the text of one item while it is generated.")
]


@connected
def generate(
    open_client: OpenClient,
    model: ModelId,
    texts: Texts = None,
    *,
    files: ItemFiles,
    instruction: Annotated[
        str, typer.Option("--instruction", help='What to generate, such as "Summarise this text."')
    ] = "",
    max_tokens: MaxTokens = 0,
    schema: SchemaFile = None,
    template_value: TemplateValues = None,
    temperature: Temperature = None,
    top_p: TopP = None,
    top_k: TopK = None,
    seed: Seed = None,
    stop: Stop = None,
    stream: Stream = False,
    serving: EncodeOptions,
    as_json: AsJson = False,
) -> None:
    """Generate a text for each text: summaries, translations, answers."""
    run = Invocation(model, texts, files, serving, as_json)
    values = _template_values(template_value)
    task = ReadText(
        max_tokens=max_tokens,
        instruction=instruction,
        schema=_schema(schema),
        template_values=values,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        seed=seed,
        stop=stop or (),
    )
    if stream:
        _stream(open_client(), run, task, serving)
        return
    ask = partial(open_client().extract, model, task=task, **serving)
    _generate(run, "generating", ask, "generated_text")


def _generate(
    run: Invocation, description: str, ask: Callable[..., ExtractResult], kind: str
) -> None:
    rows = partial(outputs.extracted_rows, kind=kind)
    result = run.ask("items", description, ask, rows, max_part=GENERATION_PART_ITEMS)
    if result is not None:
        report_extractions(run, result, kind)


def _stream(client: Client, run: Invocation, task: ReadText, serving: EncodeOptions) -> None:
    """Print one text while it is generated. If stdout is redirected, stderr reports that the text
    restarts or was cut off.

    Raises BadParameter for more than one item, or with a file or JSON output.
    """
    if len(run.records) != 1 or run.as_json or run.output is not None:
        raise typer.BadParameter(
            "--stream prints the text of one item, without --json and --output"
        )
    shown = 0
    options: StreamOptions = {
        "truncation": serving.get("truncation"),
        "pool": serving.get("pool", ""),
        "priority": serving.get("priority"),
    }
    for part in client.extract_stream(run.model, run.items, task, **options):
        if isinstance(part, Delta):
            if part.restarted and shown:
                sys.stdout.write("\n")
                sys.stdout.flush()
                sys.stderr.write("the worker was lost; the text starts again:\n")
            shown += len(part.text)
            sys.stdout.write(printable(part.text))
            sys.stdout.flush()
        else:
            sys.stdout.write(f"{'' if shown else printable(part[0].text)}\n")
            if part[0].finish_reason == "length":
                sys.stdout.flush()
                sys.stderr.write("the text was cut off at its longest (--max-tokens)\n")


@connected
def ocr(
    open_client: OpenClient,
    model: ModelId,
    images: ImageFiles = None,
    *,
    files: ItemFiles,
    kind: Annotated[
        ReadingKind, typer.Option(help="The task, for models with several tasks.")
    ] = ReadingKind.OCR,
    instruction: Annotated[
        str,
        typer.Option(
            "--instruction", help="A question, or one of the model's tasks, such as '<OD>'."
        ),
    ] = "",
    region: Annotated[
        str,
        typer.Option(
            help="The part of the image to read, in pixels: left,top,right,bottom.",
            show_default=False,
        ),
    ] = "",
    max_tokens: MaxTokens = 0,
    schema: SchemaFile = None,
    template_value: TemplateValues = None,
    draw: DrawInto = None,
    serving: EncodeOptions,
    as_json: AsJson = False,
) -> None:
    """Read the text in images (OCR); also forms, captions and answers to questions."""
    run = Invocation(model, images, replace(files, image=True), serving, as_json, argument="IMAGE")
    drawings.check(draw, run.records)
    task = ReadText(
        kind=kind.value,
        max_tokens=max_tokens,
        instruction=instruction,
        region=_region(region),
        schema=_schema(schema),
        template_values=_template_values(template_value),
    )
    ask = drawings.drawing(
        draw, run.records, partial(open_client().extract, model, task=task, **serving)
    )
    _generate(run, "reading", ask, "ocr_text")


def _schema(path: Path | None) -> str | None:
    """Return the JSON Schema in a file, None without a file. Raises BadParameter."""
    if path is None:
        return None
    try:
        return path.read_text("utf-8")
    except (OSError, ValueError) as error:
        raise typer.BadParameter(f"--schema {path}: {error}") from None


def _template_values(asked: Sequence[str] | None) -> dict[str, str | float | bool | None] | None:
    """Parse NAME=VALUE arguments; a value is JSON or a text. Raises BadParameter."""
    found: dict[str, str | float | bool | None] = {}
    for each in asked or ():
        name, is_given, value = each.partition("=")
        if not name or not is_given:
            raise typer.BadParameter(
                f"--template-value {each} must be NAME=VALUE, such as enable_thinking=false"
            )
        try:
            found[name] = json.loads(value)
        except ValueError:
            found[name] = value
    return found or None


def _region(asked: str) -> tuple[float, float, float, float] | None:
    """Return the four numbers of a region, None for an empty text. Raises BadParameter."""
    if not asked:
        return None
    try:
        left, top, right, bottom = (float(number) for number in asked.split(","))
    except ValueError:
        raise typer.BadParameter(
            f"--region {asked} must be four numbers: left,top,right,bottom"
        ) from None
    return left, top, right, bottom
