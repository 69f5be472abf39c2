"""The commands of `shoal job`, except those that make a job (`making.py`)."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from shoal.bulk.engine import request
from shoal.bulk.export import contents, export, failures
from shoal.cli.bulk.arguments import JobLimitOptions, Output
from shoal.cli.bulk.listing import find_jobs, print_jobs
from shoal.cli.bulk.making import runs, submits
from shoal.cli.bulk.running import (
    describe_request,
    job_state,
    loaded,
    print_state,
    reported,
    run,
)
from shoal.cli.bulk.submitted import (
    ACTIVE,
    EdgeAccess,
    act,
    find,
    is_submitted,
    print_job,
    print_submitted,
)
from shoal.cli.console import counted, emit, note, show, table
from shoal.cli.failures import InputError
from shoal.cli.options import ConnectionOptions, Json, grouped

_WATCH_SECONDS = 1.0
_MAX_FAILED_SHOWN = 20


class _RunFirst(TyperGroup):
    """Lists the commands that make a job before those that need one."""

    def list_commands(self, ctx: Any) -> list[str]:
        first = ("run", "submit")
        return sorted(super().list_commands(ctx), key=lambda name: name not in first)


job = typer.Typer(
    cls=_RunFirst,
    no_args_is_help=True,
    help="Run all rows of a file through a model, each exactly once, and resume after any failure.",
)
job.add_typer(runs, name="run")
job.add_typer(submits, name="submit")


@job.command()
@grouped
def resume(
    output: Output,
    *,
    limits: JobLimitOptions,
    connection: ConnectionOptions,
    edge: EdgeAccess,
    as_json: Json = False,
) -> None:
    """Continue a job that was paused or interrupted, failed, or passed its deadline."""
    if is_submitted(output):
        print_job(act(output, "resume", edge, limits), as_json=as_json)
        return
    with reported():
        where, manifest = loaded(output)
        manifest.limits = limits.limits(manifest.limits)
        run(where, manifest, connection, as_json=as_json)


@job.command()
@grouped
def retry(
    output: Output,
    *,
    limits: JobLimitOptions,
    connection: ConnectionOptions,
    edge: EdgeAccess,
    as_json: Json = False,
) -> None:
    """Send the failed rows of a completed job again, and replace their parts."""
    if is_submitted(output):
        print_job(act(output, "retry", edge, limits), as_json=as_json)
        return
    with reported():
        where, manifest = loaded(output)
        if job_state(where, manifest) != "completed":
            raise InputError(
                f"the job is {job_state(where, manifest)}; complete it first: "
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
def pause(output: Output, *, edge: EdgeAccess) -> None:
    """Ask the process that runs a job to end after the chunks in flight."""
    if is_submitted(output):
        act(output, "pause", edge)
        note("the job pauses when its chunks in flight are committed")
        return
    with reported():
        where, manifest = loaded(output)
        if request(where, manifest, "pause"):
            note(
                describe_request(where, manifest, "pauses when its chunks in flight are committed")
            )
        else:
            note(f"no process runs the job, which is {job_state(where, manifest)}")


@job.command()
@grouped
def cancel(output: Output, *, edge: EdgeAccess) -> None:
    """End a job for good. Its parts stay."""
    if is_submitted(output):
        act(output, "cancel", edge)
        note("the job ends within seconds")
        return
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
def show_job(output: Output, *, edge: EdgeAccess, as_json: Json = False) -> None:
    """Show the state of a job."""
    if is_submitted(output):
        print_job(find(output, edge), as_json=as_json)
        return
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
    submitted: Annotated[
        bool, typer.Option("--submitted", help="List jobs that were submitted to the edge.")
    ] = False,
    edge: EdgeAccess,
    as_json: Json = False,
) -> None:
    """List the jobs below a folder, the last changed first: at most 1,000, of at most 10,000
    folders. Or list the submitted ones.
    """
    if submitted:
        print_submitted(edge, as_json=as_json)
        return
    with reported():
        print_jobs(folder, find_jobs(folder), as_json=as_json)


@job.command()
@grouped
def watch(output: Output, *, edge: EdgeAccess, as_json: Json = False) -> None:
    """Print the state of a job whenever it changes, until the job stops."""
    if is_submitted(output):
        _watch_submitted(output, edge, as_json=as_json)
        return
    printed = 0.0
    while True:
        with reported():
            where, manifest = loaded(output)
            if manifest.updated_at != printed:
                printed = manifest.updated_at
                print_state(where, manifest, as_json=as_json)
            if job_state(where, manifest) != "running":
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
    edge: EdgeAccess,
    as_json: Json = False,
) -> None:
    """List the parts of a job, or its failed rows, or copy its parts to one file."""
    if partial and export_to is None:
        raise typer.BadParameter("--partial needs --export")
    if is_submitted(output):
        output = find(output, edge)["output"]
    with reported():
        where, manifest = loaded(output)
        if failed:
            _print_failed(list(failures(where, manifest)), as_json=as_json)
            return
        if export_to is not None:
            export(where, manifest, export_to, partial=partial)
            rows = counted(manifest.rows, "row")
            if manifest.state != "completed":
                rows += f" of a job that is {job_state(where, manifest)}"
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


def _watch_submitted(identity: str, edge: EdgeAccess, *, as_json: bool) -> None:
    printed: dict[str, Any] = {}
    while True:
        found = find(identity, edge)
        if found != printed:
            printed = found
            print_job(found, as_json=as_json)
        if found["status"] not in ACTIVE:
            return
        time.sleep(_WATCH_SECONDS)


def _print_parts(where: Any, manifest: Any, *, as_json: bool) -> None:
    parts = [part for _, part in sorted(manifest.parts.items())]
    if as_json:
        emit(
            [
                {
                    "path": where.full_path(part.name),
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
            where.full_path(part.name), f"{part.rows:,}", f"{part.failed:,}", part.sha256[:16]
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
