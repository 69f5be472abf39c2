"""Runs a job in the foreground, with a progress bar, and prints its state."""

from __future__ import annotations

import asyncio
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import datetime, timedelta
from typing import Any, Final

import typer
from rich.progress import BarColumn, Progress, TextColumn

from shoal.bulk.engine import JobRun, create
from shoal.bulk.failures import JobError
from shoal.bulk.manifest import CONTROL, MAX_SILENT_SECONDS, Manifest, load
from shoal.bulk.places import OutputPlace, place
from shoal.bulk.progress import JobProgress
from shoal.bulk.spec import BulkRecipe
from shoal.calls.retry import RetryPolicy
from shoal.cli.bulk.arguments import JobLimitOptions
from shoal.cli.console import SafeConsole, counted, emit, facts, note, show
from shoal.cli.failures import InputError
from shoal.cli.options import ConnectionOptions, reachable

INTERRUPTED: Final = 130
"""The exit status after Ctrl-C, as of shells: 128 and the number of the signal."""
ATTEMPTS: Final = 3
"""Tries of one request. More are up to the engine, which sends less after an overload."""
_LINE_SECONDS: Final = 10.0
"""Seconds between two lines of progress without a terminal."""


@contextmanager
def reported() -> Iterator[None]:
    """Turn the errors of jobs into those that commands report."""
    try:
        yield
    except JobError as error:
        raise InputError("; ".join([str(error), *getattr(error, "__notes__", [])])) from None
    except ImportError as error:
        raise InputError(
            f"bulk jobs need pyarrow: pip install 'shoal[parquet]' ({error})"
        ) from None


def loaded(output: str) -> tuple[OutputPlace, Manifest]:
    """Return an output location and its job. Raises JobError."""
    found = place(output)
    manifest = load(found)
    if manifest is None:
        raise JobError(f"{output} has no job: it has no manifest.json")
    return found, manifest


def continued(
    where: OutputPlace, source: str, made: BulkRecipe, limits: JobLimitOptions
) -> Manifest:
    """Return a new job, or the job of this recipe and input that the location has, which keeps the
    limits that are not given. Raises JobError.
    """
    before = load(where)
    manifest = create(where, source, made, limits.limits())
    if before is not None and before.job == manifest.job:
        manifest.limits = limits.limits(before.limits)
    return manifest


def run(
    where: OutputPlace,
    manifest: Manifest,
    connection: ConnectionOptions,
    *,
    retry: bool = False,
    as_json: bool = False,
) -> None:
    """Run a job until its end, and print its state. Raises JobError, ShoalError."""
    import pyarrow  # Imported here, because it is optional.

    # Arrow's own allocator keeps more memory of a long job than the system's.
    pyarrow.set_memory_pool(pyarrow.system_memory_pool())
    with connection.open() as client:
        reachable(client)
    with _shown(manifest.recipe.verb) as on_progress:
        found = asyncio.run(_run(where, manifest, connection, retry, on_progress))
    print_state(where, found, as_json=as_json)
    if found.state == "paused":
        raise typer.Exit(INTERRUPTED)
    if found.state != "completed":
        raise typer.Exit(1)


async def _run(
    where: OutputPlace,
    manifest: Manifest,
    connection: ConnectionOptions,
    retry: bool,
    on_progress: Callable[[JobProgress], None],
) -> Manifest:
    client = connection.open_async(retry=RetryPolicy(attempts=ATTEMPTS))
    async with client:
        job = JobRun(where, manifest, client, timeout=connection.timeout, on_progress=on_progress)
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            with suppress(NotImplementedError):  # Windows
                loop.add_signal_handler(number, job.pause)
        return await job.run(retry=retry)


@contextmanager
def _shown(description: str) -> Iterator[Callable[[JobProgress], None]]:
    """Show a bar on a terminal, and lines elsewhere."""
    if not sys.stderr.isatty():
        yield _Lines().update
        return
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[state]}"))
    with Progress(*columns, console=SafeConsole(stderr=True), transient=True) as progress:
        task = progress.add_task(description, total=None, state="")

        def update(found: JobProgress) -> None:
            progress.update(
                task, total=found.total, completed=found.rows, state=progress_line(found)
            )

        yield update


class _Lines:
    """Prints a line of progress from time to time."""

    def __init__(self) -> None:
        self._printed_at = time.monotonic()

    def update(self, found: JobProgress) -> None:
        if time.monotonic() - self._printed_at >= _LINE_SECONDS:
            self._printed_at = time.monotonic()
            note(progress_line(found))


def progress_line(found: JobProgress) -> str:
    """Return the progress of a job on one line."""
    total = "" if found.total is None else f" of {found.total:,}"
    parts = [
        f"{found.rows:,}{total} rows",
        f"{found.rows_per_second:,.0f} rows/s",
        f"{found.tokens_per_second:,.0f} tokens/s",
        f"{found.in_flight} in flight",
    ]
    if found.seconds_left is not None:
        parts.append(f"{timedelta(seconds=round(found.seconds_left))} left")
    if found.failed:
        parts.append(f"{found.failed:,} failed")
    if found.cost:
        parts.append(f"cost {cost_line(found.cost, found.whole_cost)}")
    if found.waiting_for:
        parts.append(f"waiting: {found.waiting_for}")
    return ", ".join(parts)


def cost_line(cost: Mapping[str, float], whole: float | None) -> str:
    """Return the cost of a job, by pool if it has several, and the estimate for all rows."""
    text = f"{sum(cost.values()):,.2f}"
    if len(cost) > 1:
        text += f" ({', '.join(f'{pool} {price:,.2f}' for pool, price in cost.items())})"
    return text if whole is None else f"{text} of about {whole:,.2f}"


def job_state(where: OutputPlace, manifest: Manifest) -> str:
    """Return the state of a job; `interrupted` if its process ended without recording one."""
    return "interrupted" if manifest.is_interrupted(where) else manifest.state


def describe_request(where: OutputPlace, manifest: Manifest, consequence: str) -> str:
    """Return the consequence of a request that was left for the process that runs a job.

    Object stores do not show whether that process still runs.
    """
    if where.is_locked() is not None:
        return f"the job {consequence}"
    silent = max(0.0, time.time() - manifest.updated_at)
    return (
        f"the request is in {where.full_path(CONTROL)}: if a process runs the job, the job "
        f"{consequence}. The store does not show whether one does; the manifest was written "
        f"{silent:.0f} s ago. After {MAX_SILENT_SECONDS:.0f} s without a new one, the job counts "
        "as interrupted: then repeat this command"
    )


def summary(where: OutputPlace, manifest: Manifest) -> dict[str, Any]:
    """Return the manifest without its parts, as JSON values."""
    found = manifest.to_json()
    del found["parts"], found["schema"]
    found["input"]["files"] = len(manifest.input.files)
    return {"output": where.uri, **found, "state": job_state(where, manifest)}


def print_state(where: OutputPlace, manifest: Manifest, *, as_json: bool = False) -> None:
    """Print the state of a job to stdout."""
    if as_json:
        emit(summary(where, manifest))
        return
    state = job_state(where, manifest)
    done = rows_of_total(manifest.rows, manifest.total)
    rows = {
        "state": state,
        "reason": manifest.error,
        "model": manifest.recipe.model,
        "verb": manifest.recipe.verb,
        "input": _input(manifest),
        "rows": f"{done} in {counted(len(manifest.parts), 'part')}",
        "failed": f"{manifest.failed:,}" if manifest.failed else "",
        "cut": f"{manifest.truncated:,}" if manifest.truncated else "",
        "tokens": f"{manifest.tokens:,}",
        "cost": cost_line(manifest.cost, _whole_cost(manifest, state)) if manifest.cost else "",
        "embedding id": manifest.embedding_id,
        "revision": manifest.revision,
        "running time": str(timedelta(seconds=round(manifest.active_seconds))),
        "progress": _progress(manifest) if state == "running" else "",
        "updated": format_time(manifest.updated_at),
        "next": _advice(where, manifest, state),
    }
    made = facts(f"job {manifest.job} in {where.uri}")
    for name, value in rows.items():
        if value:
            made.add_row(name, value)
    show(made)


def _whole_cost(manifest: Manifest, state: str) -> float | None:
    return manifest.progress.get("whole_cost") if state == "running" else None


def _input(manifest: Manifest) -> str:
    files = len(manifest.input.files)
    several = f" ({files:,} files)" if files > 1 else ""
    return f"{manifest.input.uri}{several}, column {manifest.recipe.text}"


def _progress(manifest: Manifest) -> str:
    found = manifest.progress
    left = found.get("seconds_left")
    parts = [
        f"{found.get('rows_per_second', 0):,.0f} rows/s",
        f"{found.get('tokens_per_second', 0):,.0f} tokens/s",
        "" if left is None else f"{timedelta(seconds=round(left))} left",
    ]
    return ", ".join(filter(None, parts))


def _advice(where: OutputPlace, manifest: Manifest, state: str) -> str:
    if state in ("paused", "failed", "expired", "interrupted"):
        return f"shoal job resume {where.uri}"
    if state == "completed" and manifest.failed:
        return f"shoal job results {where.uri} --failed; shoal job retry {where.uri}"
    if state == "completed":
        return f"read {where.full_path('part-*' + manifest.recipe.suffix)}"
    return ""


def rows_of_total(rows: int, total: int | None) -> str:
    """Return the finished rows of a job and, if it is known, the number of all rows."""
    return f"{rows:,}" if total is None else f"{rows:,} of {total:,}"


def format_time(seconds: float) -> str:
    """Return a local time in ISO format; empty for 0."""
    return datetime.fromtimestamp(seconds).astimezone().isoformat(" ", "seconds") if seconds else ""
