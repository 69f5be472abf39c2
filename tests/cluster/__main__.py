"""`python -m tests.cluster`, or `make cluster-check`: k8s/ against a real API server, or in a
cluster of kind.
"""

from __future__ import annotations

import json
import shutil
import signal
import sys
import tempfile
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from tests.cluster import envtest, found, kind
from tests.cluster.plan import HOW_TO_GET, Found, Way, left_out, steps, ways
from tests.cluster.progress import Done, Progress, report, show
from tests.k8s.manifests import OVERLAYS


def main(
    only: Annotated[
        Way | None, typer.Option(help="One way alone; without it, each for which all is there")
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="The report as JSON on standard output")
    ] = False,
    keep: Annotated[
        bool, typer.Option("--keep", help="Leave kind's cluster, and the folder with logs")
    ] = False,
) -> None:
    """Applies every overlay and the chart with strict validation, runs kind-cpu, and drives its
    workers 0 → 1 → N → 0. Exit status 1 if anything failed, 2 if nothing can be run here."""
    signal.signal(
        signal.SIGTERM, lambda *_: sys.exit(143)
    )  # processes that were started are ended, a cluster is deleted
    console = Console(stderr=True, width=None if sys.stderr.isatty() else 160)
    try:
        there = found.find()
    except FileNotFoundError as error:
        console.print(str(error), markup=False)
        sys.exit(2)
    show(there, console)
    chosen = ways(there, only)
    done = _run(there, chosen, console, keep) if chosen else []
    missed = left_out(there, chosen)
    for line in missed:
        console.print(f"not shown: {line}", markup=False)
    if not chosen:
        console.print(HOW_TO_GET, markup=False)
    status = 2 if not chosen else int(not all(one.ok for one in done))
    if as_json:
        json.dump(report(there, done, missed, status), sys.stdout)
    sys.exit(status)


def _run(there: Found, chosen: list[Way], console: Console, keep: bool) -> list[Done]:
    planned = steps(there, OVERLAYS, chosen)
    progress = Progress(console, len(planned))
    folder = Path(tempfile.mkdtemp(prefix="shoal-check-"))
    try:
        if "envtest" in chosen:
            envtest.check(there, planned, folder, progress)
        if "kind" in chosen:
            kind.check(there, planned, folder, progress, keep=keep)
    finally:
        if keep:
            console.print(f"logs: {folder}", markup=False)
        else:
            shutil.rmtree(folder, ignore_errors=True)
    return progress.done


if __name__ == "__main__":
    typer.run(main)
