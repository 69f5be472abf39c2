"""`python -m tests.chaos`, or `make chaos`: a run from the command line."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar

from tests.chaos import driver, plan, report


def main(
    seed: Annotated[
        int, typer.Option(help="Of faults and requests; 0: one from the clock, which is printed")
    ] = 0,
    minutes: Annotated[float, typer.Option(min=0.1)] = 1.0,
    target: Annotated[
        driver.Target,
        typer.Option(
            help="The target: `processes` of a whole mesh, or the children of one `shoal up`"
        ),
    ] = "processes",
    redis: Annotated[
        plan.Servers,
        typer.Option(
            help="The queue's Redis: a single one, a master and a replica under three Sentinels, "
            "or a cluster of six nodes"
        ),
    ] = "single",
    faults_per_minute: Annotated[
        float | None, typer.Option(min=0.1, max=120, help="Default: 15, of `shoal up` 8")
    ] = None,
    requests_per_second: Annotated[float, typer.Option(min=1)] = 300.0,
    concurrency: Annotated[int, typer.Option(min=1, help="Requests in flight at most")] = 64,
    requests: Annotated[int, typer.Option(min=0, help="Go on until so many were sent")] = 0,
    only: Annotated[
        str,
        typer.Option(
            help="Only kinds of faults whose names contain this, such as `kill` or `redis`"
        ),
    ] = "",
    away: Annotated[
        float,
        typer.Option(min=1, help="Start a killed worker or router after at most so many seconds"),
    ] = 1.0,
    keep: Annotated[
        bool, typer.Option("--keep", help="Keep the logs even if nothing was wrong")
    ] = False,
    strict: Annotated[
        bool, typer.Option("--strict", help="A recovery above its limit fails the run, too")
    ] = False,
    record: Annotated[
        Path | None,
        typer.Option(help="Append the report as a line of JSON (`python -m tests.chaos.totals`)"),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="The report as JSON on standard output")
    ] = False,
) -> None:
    """Inject faults into a mesh of processes under traffic and print a report. Exit status 1 if a
    request was lost, answered twice or wrongly, or an invariant was broken."""
    if target == "up" and redis != "single":
        raise typer.BadParameter("shoal up has a single Redis", param_hint="--redis")
    settings = driver.Settings(
        seed or int(time.time()),
        minutes * 60,
        faults_per_minute or (8.0 if target == "up" else 15.0),
        concurrency,
        requests_per_second,
        requests,
        target=target,
        servers=redis,
        only=only,
        away=away,
        keep=keep,
    )
    console = Console(stderr=True, width=None if sys.stderr.isatty() else 140)
    with _bar(console) as bar, suppress(asyncio.CancelledError):
        found = asyncio.run(_interruptible(settings, _watcher(bar, settings)))
        bar.stop()
        report.show(found, console)
        if record is not None:
            with record.open("a", encoding="utf-8") as file:
                file.write(json.dumps(found.to_json()) + "\n")
        if as_json:
            json.dump(found.to_json(), sys.stdout)
        sys.exit(0 if found.is_clean and (found.is_in_time or not strict) else 1)
    console.print(f"interrupted; seed {settings.seed}")
    sys.exit(130)


async def _interruptible(settings: driver.Settings, watch: driver.Watcher) -> report.Report:
    """Ctrl-C and SIGTERM end the run: everything that was started is ended first."""
    running = asyncio.current_task()
    assert running is not None
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, running.cancel)
    return await driver.run(settings, watch=watch)


def _bar(console: Console) -> Bar:
    return Bar(
        TextColumn("chaos"),
        BarColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[reported]}"),
        console=console,
        transient=True,
    )


def _watcher(bar: Bar, settings: driver.Settings) -> driver.Watcher:
    task = bar.add_task("", total=settings.seconds, reported="starting")

    def watch(now: driver.Progress) -> None:
        tally = now.tally
        reported = (
            f"{tally.sent:,} requests, {now.in_flight} in flight, {now.begun} of {now.planned} "
            f"faults, {len(tally.lost)} lost, "
            f"{tally.duplicates} duplicate, {len(tally.wrong)} wrong, {now.problems} invariants "
            "broken"
        )
        bar.update(task, completed=now.elapsed, reported=reported)

    return watch


if __name__ == "__main__":
    typer.run(main)
