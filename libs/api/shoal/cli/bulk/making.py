"""The commands of `shoal job run` and `shoal job submit`, one for each verb."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
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


Build = Callable[..., dict[str, Any]]
"""Returns the arguments of `recipe` for the options of a verb. Raises BadParameter, InputError."""


def _verb(build: Build) -> Build:
    """Add a command for a verb to `run`, and to `submit` with the options of an edge. It has the
    options of `build`, between those that all commands have.
    """
    own = list(inspect.signature(build, eval_str=True).parameters.values())
    for group, connection in ((runs, ConnectionOptions), (submits, EdgeAccess)):
        first = [_parameter("model", ModelId), _parameter("files", JobFiles)]
        last = [
            _parameter("limits", JobLimitOptions),
            _parameter("serving", JobServing),
            _parameter("connection", connection),
            _parameter("as_json", Json, False),
        ]
        group.command()(grouped(_command(build, [*first, *own, *last])))
    return build


def _command(build: Build, parameters: list[inspect.Parameter]) -> Callable[..., None]:
    def command(
        *,
        model: str,
        files: JobFiles,
        limits: JobLimitOptions,
        serving: JobServing,
        connection: ConnectionOptions | EdgeAccess,
        as_json: bool,
        **values: Any,
    ) -> None:
        built = build(**values)
        with reported():
            _start(recipe(model, files, serving, **built), files, limits, connection, as_json)

    command.__name__, command.__doc__ = build.__name__, build.__doc__
    set_parameters(command, parameters)
    return command


def _parameter(name: str, kind: Any, default: Any = inspect.Parameter.empty) -> inspect.Parameter:
    keyword = inspect.Parameter.KEYWORD_ONLY
    return inspect.Parameter(name, keyword, annotation=kind, default=default)


@_verb
def encode(
    *,
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
) -> dict[str, Any]:
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
    return {"verb": "encode", "options": options}


@_verb
def score(
    *,
    query: Annotated[str, typer.Option(help="The query of all rows.", show_default=False)] = "",
    query_column: Annotated[
        str, typer.Option(help="Column with the query of each row.", show_default=False)
    ] = "",
    scale: ScaleOption = None,
    instruction: Instruction = "",
) -> dict[str, Any]:
    """Score how relevant a column of texts is to a query, or to the query of each row."""
    if bool(query) == bool(query_column):
        raise typer.BadParameter("name the query with --query, or its column with --query-column")
    options = {"scale": scale, "instruction": instruction}
    return {"verb": "score", "options": options, "query": query, "query_column": query_column}


@_verb
def entities(
    *,
    labels: Labels = None,
    threshold: Threshold = None,
    flat: Flat = None,
    aggregation: AggregationOption = None,
) -> dict[str, Any]:
    """Find named entities in a column of texts."""
    return _extract(
        "entities",
        labels=labels or [],
        threshold=threshold,
        flat=flat,
        aggregation=aggregation,
    )


@_verb
def classify(
    *,
    labels: Labels = None,
    threshold: Threshold = None,
    multi_label: MultiLabel = None,
    hypothesis: Hypothesis = "",
) -> dict[str, Any]:
    """Classify a column of texts."""
    return _extract(
        "classify",
        labels=labels or [],
        threshold=threshold,
        multi_label=multi_label,
        hypothesis=hypothesis,
    )


@_verb
def structure(
    *,
    schema: SchemaPath,
) -> dict[str, Any]:
    """Find the parts of a schema in a column of texts."""
    try:
        parsed = json.loads(schema.read_bytes())
    except ValueError as error:
        raise InputError(f"--schema {schema} is not JSON: {error}") from None
    return _extract("structure", schema=parsed)


@_verb
def generate(
    *,
    instruction: Annotated[
        str, typer.Option(help='What to generate, such as "Summarise this text."')
    ] = "",
    max_tokens: MaxTokens = 0,
    temperature: Temperature = None,
    seed: Seed = None,
) -> dict[str, Any]:
    """Generate a text for each text of a column."""
    return _extract(
        "generate",
        instruction=instruction,
        max_tokens=max_tokens,
        temperature=temperature,
        seed=seed,
    )


def _extract(kind: str, **task: Any) -> dict[str, Any]:
    """Return the arguments of `recipe` for a task, without the options that are not given."""
    given = {name: value for name, value in task.items() if value is not None}
    return {"verb": "extract", "options": {}, "task": {"kind": kind, **given}}


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
