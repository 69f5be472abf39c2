"""The commands of `shoal job`."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from shoal.bulk.engine import create, request
from shoal.bulk.export import contents, export, failures
from shoal.bulk.places import place
from shoal.bulk.spec import Recipe
from shoal.cli.bulk.arguments import JobFiles, JobLimits, JobServing, Output, recipe
from shoal.cli.bulk.listing import find_jobs, print_jobs
from shoal.cli.bulk.running import describe_request, loaded, print_state, reported, run, state_of
from shoal.cli.console import counted, emit, note, show, table
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
from shoal.cli.options import Connection, Json, grouped

_WATCH_SECONDS = 1.0
_MAX_FAILED_SHOWN = 20


class _RunFirst(TyperGroup):
    """Lists the command that makes a job before those that need one."""

    def list_commands(self, ctx: Any) -> list[str]:
        return sorted(super().list_commands(ctx), key=lambda name: name != "run")


job = typer.Typer(
    cls=_RunFirst,
    no_args_is_help=True,
    help="Run all rows of a file through a model, each exactly once, and resume after any failure.",
)
runs = typer.Typer(
    no_args_is_help=True,
    help="Run a job in the foreground. The same command again continues it; Ctrl-C pauses it.",
)
job.add_typer(runs, name="run")


@runs.command()
@grouped
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
    limits: JobLimits,
    serving: JobServing,
    connection: Connection,
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


@runs.command()
@grouped
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
    limits: JobLimits,
    serving: JobServing,
    connection: Connection,
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


@runs.command()
@grouped
def entities(
    model: ModelId,
    *,
    files: JobFiles,
    labels: Labels = None,
    threshold: Threshold = None,
    flat: Flat = None,
    aggregation: AggregationOption = None,
    limits: JobLimits,
    serving: JobServing,
    connection: Connection,
    as_json: Json = False,
) -> None:
    """Find named entities in a column of texts."""
    task: dict[str, Any] = {"kind": "entities", "labels": labels or []}
    task |= {"threshold": threshold, "flat": flat, "aggregation": aggregation}
    _extract(model, task, files, limits, serving, connection, as_json)


@runs.command()
@grouped
def classify(
    model: ModelId,
    *,
    files: JobFiles,
    labels: Labels = None,
    threshold: Threshold = None,
    multi_label: MultiLabel = None,
    hypothesis: Hypothesis = "",
    limits: JobLimits,
    serving: JobServing,
    connection: Connection,
    as_json: Json = False,
) -> None:
    """Classify a column of texts."""
    task: dict[str, Any] = {"kind": "classify", "labels": labels or [], "threshold": threshold}
    task |= {"multi_label": multi_label, "hypothesis": hypothesis}
    _extract(model, task, files, limits, serving, connection, as_json)


@runs.command()
@grouped
def structure(
    model: ModelId,
    *,
    files: JobFiles,
    schema: SchemaPath,
    limits: JobLimits,
    serving: JobServing,
    connection: Connection,
    as_json: Json = False,
) -> None:
    """Find the parts of a schema in a column of texts."""
    try:
        parsed = json.loads(schema.read_bytes())
    except ValueError as error:
        raise InputError(f"--schema {schema} is not JSON: {error}") from None
    task: dict[str, Any] = {"kind": "structure", "schema": parsed}
    _extract(model, task, files, limits, serving, connection, as_json)


@runs.command()
@grouped
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
    limits: JobLimits,
    serving: JobServing,
    connection: Connection,
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


@job.command()
@grouped
def resume(
    output: Output, *, limits: JobLimits, connection: Connection, as_json: Json = False
) -> None:
    """Continue a job that was paused or interrupted, failed, or passed its deadline."""
    with reported():
        where, manifest = loaded(output)
        manifest.limits = limits.limits(manifest.limits)
        run(where, manifest, connection, as_json=as_json)


@job.command()
@grouped
def retry(
    output: Output, *, limits: JobLimits, connection: Connection, as_json: Json = False
) -> None:
    """Send the failed rows of a completed job again, and replace their parts."""
    with reported():
        where, manifest = loaded(output)
        if state_of(where, manifest) != "completed":
            raise InputError(
                f"the job is {state_of(where, manifest)}; complete it first: "
                f"shoal job resume {output}"
            )
        if not manifest.failed:
            note("no row failed")
            if as_json:
                print_state(where, manifest, as_json=True)
            return
        manifest.limits = limits.limits(manifest.limits)
        run(where, manifest, connection, retry=True, as_json=as_json)


@job.command()
@grouped
def pause(output: Output) -> None:
    """Ask the process that runs a job to end after the chunks in flight."""
    with reported():
        where, manifest = loaded(output)
        if request(where, manifest, "pause"):
            note(
                describe_request(where, manifest, "pauses when its chunks in flight are committed")
            )
        else:
            note(f"no process runs the job, which is {state_of(where, manifest)}")


@job.command()
@grouped
def cancel(output: Output) -> None:
    """End a job for good. Its parts stay."""
    with reported():
        where, manifest = loaded(output)
        if manifest.state in ("completed", "cancelled"):
            raise InputError(f"the job is {manifest.state} already")
        if request(where, manifest, "cancel"):
            note(describe_request(where, manifest, "ends within seconds"))
        else:
            note("the job is cancelled")


@job.command("show")
@grouped
def show_job(output: Output, *, as_json: Json = False) -> None:
    """Show the state of a job."""
    with reported():
        where, manifest = loaded(output)
        print_state(where, manifest, as_json=as_json)


@job.command("list")
@grouped
def list_jobs(
    folder: Annotated[
        str, typer.Argument(metavar="FOLDER", help="Folder or URL with jobs in it or below it.")
    ] = ".",
    *,
    as_json: Json = False,
) -> None:
    """List the jobs below a folder, the last changed first: at most 1,000, of at most 10,000
    folders.
    """
    with reported():
        print_jobs(folder, find_jobs(folder), as_json=as_json)


@job.command()
@grouped
def watch(output: Output, *, as_json: Json = False) -> None:
    """Print the state of a job whenever it changes, until the job stops."""
    printed = 0.0
    while True:
        with reported():
            where, manifest = loaded(output)
            if manifest.updated_at != printed:
                printed = manifest.updated_at
                print_state(where, manifest, as_json=as_json)
            if state_of(where, manifest) != "running":
                return
        time.sleep(_WATCH_SECONDS)


@job.command()
@grouped
def results(
    output: Output,
    *,
    export_to: Annotated[
        Path | None,
        typer.Option(
            "--export",
            help="Copy all parts of a completed job to one .parquet or .jsonl file.",
            show_default=False,
        ),
    ] = None,
    partial: Annotated[
        bool, typer.Option("--partial", help="Export the parts of a job that is not completed.")
    ] = False,
    failed: Annotated[bool, typer.Option("--failed", help="List the rows that failed.")] = False,
    verify: Annotated[
        bool, typer.Option("--verify", help="Compare each part with its digest.")
    ] = False,
    as_json: Json = False,
) -> None:
    """List the parts of a job, or its failed rows, or copy its parts to one file."""
    if partial and export_to is None:
        raise typer.BadParameter("--partial needs --export")
    with reported():
        where, manifest = loaded(output)
        if failed:
            _print_failed(list(failures(where, manifest)), as_json=as_json)
            return
        if export_to is not None:
            export(where, manifest, export_to, partial=partial)
            rows = counted(manifest.rows, "row")
            if manifest.state != "completed":
                rows += f" of a job that is {state_of(where, manifest)}"
            note(f"{rows} -> {export_to}")
            if as_json:
                emit({"path": str(export_to), "rows": manifest.rows, "state": manifest.state})
            return
        if verify:
            count = sum(1 for _ in contents(where, manifest))
            note(f"{counted(count, 'part')} verified")
            if as_json:
                emit({"output": where.uri, "verified_parts": count})
            return
    _print_parts(where, manifest, as_json=as_json)


def _extract(
    model: str,
    task: dict[str, Any],
    files: JobFiles,
    limits: JobLimits,
    serving: JobServing,
    connection: Connection,
    as_json: bool,
) -> None:
    given = {name: value for name, value in task.items() if value is not None}
    with reported():
        made = recipe("extract", model, files, serving, {}, task=given)
        _start(made, files, limits, connection, as_json)


def _start(
    made: Recipe, files: JobFiles, limits: JobLimits, connection: Connection, as_json: bool
) -> None:
    """Create a job, or continue that of the same recipe and input, and run it."""
    where = place(files.output)
    manifest = create(where, files.source, made, limits.limits())
    if manifest.state == "completed":
        note("the job is completed already")
        print_state(where, manifest, as_json=as_json)
        return
    run(where, manifest, connection, as_json=as_json)


def _print_parts(where: Any, manifest: Any, *, as_json: bool) -> None:
    parts = [part for _, part in sorted(manifest.parts.items())]
    if as_json:
        emit(
            [
                {
                    "path": where.path_of(part.name),
                    "rows": part.rows,
                    "failed": part.failed,
                    "sha256": part.sha256,
                }
                for part in parts
            ]
        )
        return
    made = table("", "part", "rows", "failed", "sha256", right=("rows", "failed"))
    for part in parts:
        made.add_row(
            where.path_of(part.name), f"{part.rows:,}", f"{part.failed:,}", part.sha256[:16]
        )
    show(made)


def _print_failed(rows: list[dict[str, Any]], *, as_json: bool) -> None:
    if as_json:
        emit(rows)
        return
    made = table("", "row", "error", right=("row",))
    for row in rows[:_MAX_FAILED_SHOWN]:
        made.add_row(f"{row['row']:,}", row["error"])
    show(made)
    if len(rows) > _MAX_FAILED_SHOWN:
        note(f"… {len(rows) - _MAX_FAILED_SHOWN:,} more: --json lists all")
