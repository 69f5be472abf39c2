"""The commands of `shoal job run` and `shoal job submit`, one for each verb."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from functools import wraps
from typing import Annotated, Any

import typer

from shoal.bulk.places import place
from shoal.bulk.spec import BulkRecipe
from shoal.cli.bulk.arguments import JobFiles, JobLimitOptions, JobServing, recipe
from shoal.cli.bulk.running import continued, print_state, reported, run
from shoal.cli.bulk.submitted import EdgeAccess, submit
from shoal.cli.console import note
from shoal.cli.failures import InputError
from shoal.cli.inference.arguments import (
    AggregationOption,
    ChunkOverlap,
    ChunkTokens,
    DataTypeOption,
    Dimensions,
    Flat,
    Hypothesis,
    Instruction,
    Labels,
    MaxTokens,
    MultiLabel,
    Normalize,
    RoleOption,
    ScaleOption,
    SchemaPath,
    Seed,
    Temperature,
    Threshold,
)
from shoal.cli.model_names import ModelId
from shoal.cli.options import ConnectionOptions, Json, grouped, set_parameters

runs = typer.Typer(
    no_args_is_help=True,
    help="Run a job in the foreground. The same command again continues it; Ctrl-C pauses it.",
)
submits = typer.Typer(
    no_args_is_help=True,
    help="Submit a job to an edge, which runs it, and return at once.",
)


def _verb(command: Callable[..., None]) -> Callable[..., None]:
    """Add a command to `run`, and to `submit` with the options of an edge."""
    runs.command()(grouped(command))

    @wraps(command)
    def submitted(**values: Any) -> None:
        command(**values)

    parameters = inspect.signature(command, eval_str=True).parameters.values()
    del submitted.__wrapped__
    set_parameters(
        submitted,
        [
            one.replace(annotation=EdgeAccess) if one.annotation is ConnectionOptions else one
            for one in parameters
        ],
    )
    submits.command()(grouped(submitted))
    return command


@_verb
def encode(
    model: ModelId,
    *,
    files: JobFiles,
    role: RoleOption = None,
    representation: Annotated[
        list[str] | None,
        typer.Option(
            "--representation",
            "-r",
            help="dense, sparse or multi_vector; may be repeated; default the model's.",
            show_default=False,
        ),
    ] = None,
    data_type: DataTypeOption = None,
    dimensions: Dimensions = 0,
    normalize: Normalize = None,
    instruction: Instruction = "",
    chunk: Annotated[
        str, typer.Option(help="Divide texts into chunks: sentences, tokens or markdown.")
    ] = "",
    chunk_tokens: ChunkTokens = 0,
    chunk_overlap: ChunkOverlap = 0,
    expect_embedding_id: Annotated[
        str,
        typer.Option(
            metavar="ID",
            help="Embedding id that all vectors must have; default that of the first answer.",
            show_default=False,
        ),
    ] = "",
    limits: JobLimitOptions,
    serving: JobServing,
    connection: ConnectionOptions,
    as_json: Json = False,
) -> None:
    """Encode a column of texts as vectors."""
    if not chunk and (chunk_tokens or chunk_overlap):
        raise typer.BadParameter("--chunk-tokens and --chunk-overlap need --chunk")
    options: dict[str, Any] = {
        "role": role,
        "representations": representation,
        "data_type": data_type,
        "dimensions": dimensions,
        "normalize": normalize,
        "instruction": instruction,
        "expect_embedding_id": expect_embedding_id,
    }
    if chunk:
        chunking = {"method": chunk, "max_tokens": chunk_tokens, "overlap": chunk_overlap}
        options["chunking"] = chunking
    with reported():
        _start(recipe("encode", model, files, serving, options), files, limits, connection, as_json)


@_verb
def score(
    model: ModelId,
    *,
    files: JobFiles,
    query: Annotated[str, typer.Option(help="The query of all rows.", show_default=False)] = "",
    query_column: Annotated[
        str, typer.Option(help="Column with the query of each row.", show_default=False)
    ] = "",
    scale: ScaleOption = None,
    instruction: Instruction = "",
    limits: JobLimitOptions,
    serving: JobServing,
    connection: ConnectionOptions,
    as_json: Json = False,
) -> None:
    """Score how relevant a column of texts is to a query, or to the query of each row."""
    if bool(query) == bool(query_column):
        raise typer.BadParameter("name the query with --query, or its column with --query-column")
    options = {"scale": scale, "instruction": instruction}
    with reported():
        made = recipe(
            "score", model, files, serving, options, query=query, query_column=query_column
        )
        _start(made, files, limits, connection, as_json)


@_verb
def entities(
    model: ModelId,
    *,
    files: JobFiles,
    labels: Labels = None,
    threshold: Threshold = None,
    flat: Flat = None,
    aggregation: AggregationOption = None,
    limits: JobLimitOptions,
    serving: JobServing,
    connection: ConnectionOptions,
    as_json: Json = False,
) -> None:
    """Find named entities in a column of texts."""
    task: dict[str, Any] = {"kind": "entities", "labels": labels or []}
    task |= {"threshold": threshold, "flat": flat, "aggregation": aggregation}
    _extract(model, task, files, limits, serving, connection, as_json)


@_verb
def classify(
    model: ModelId,
    *,
    files: JobFiles,
    labels: Labels = None,
    threshold: Threshold = None,
    multi_label: MultiLabel = None,
    hypothesis: Hypothesis = "",
    limits: JobLimitOptions,
    serving: JobServing,
    connection: ConnectionOptions,
    as_json: Json = False,
) -> None:
    """Classify a column of texts."""
    task: dict[str, Any] = {"kind": "classify", "labels": labels or [], "threshold": threshold}
    task |= {"multi_label": multi_label, "hypothesis": hypothesis}
    _extract(model, task, files, limits, serving, connection, as_json)


@_verb
def structure(
    model: ModelId,
    *,
    files: JobFiles,
    schema: SchemaPath,
    limits: JobLimitOptions,
    serving: JobServing,
    connection: ConnectionOptions,
    as_json: Json = False,
) -> None:
    """Find the parts of a schema in a column of texts."""
    try:
        parsed = json.loads(schema.read_bytes())
    except ValueError as error:
        raise InputError(f"--schema {schema} is not JSON: {error}") from None
    task: dict[str, Any] = {"kind": "structure", "schema": parsed}
    _extract(model, task, files, limits, serving, connection, as_json)


@_verb
def generate(
    model: ModelId,
    *,
    files: JobFiles,
    instruction: Annotated[
        str, typer.Option(help='What to generate, such as "Summarise this text."')
    ] = "",
    max_tokens: MaxTokens = 0,
    temperature: Temperature = None,
    seed: Seed = None,
    limits: JobLimitOptions,
    serving: JobServing,
    connection: ConnectionOptions,
    as_json: Json = False,
) -> None:
    """Generate a text for each text of a column."""
    task: dict[str, Any] = {
        "kind": "generate",
        "instruction": instruction,
        "max_tokens": max_tokens,
    }
    task |= {"temperature": temperature, "seed": seed}
    _extract(model, task, files, limits, serving, connection, as_json)


def _extract(
    model: str,
    task: dict[str, Any],
    files: JobFiles,
    limits: JobLimitOptions,
    serving: JobServing,
    connection: ConnectionOptions | EdgeAccess,
    as_json: bool,
) -> None:
    given = {name: value for name, value in task.items() if value is not None}
    with reported():
        made = recipe("extract", model, files, serving, {}, task=given)
        _start(made, files, limits, connection, as_json)


def _start(
    made: BulkRecipe,
    files: JobFiles,
    limits: JobLimitOptions,
    connection: ConnectionOptions | EdgeAccess,
    as_json: bool,
) -> None:
    """Create a job, or continue that of the same recipe and input, and run it; or submit it."""
    if isinstance(connection, EdgeAccess):
        submit(made, files, limits, connection, as_json=as_json)
        return
    where = place(files.output)
    manifest = continued(where, files.source, made, limits)
    if manifest.state == "completed":
        note("the job is completed already")
        print_state(where, manifest, as_json=as_json)
        return
    run(where, manifest, connection, as_json=as_json)
