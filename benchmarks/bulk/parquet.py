"""Measure a bulk job from Parquet to Parquet next to steady bulk requests by gRPC:
`python -m benchmarks.bulk.parquet`, or `make bench-bulk`. About two minutes.

The same texts go to the same mesh (as `shoal up` lays it out, with MiniLM) in turns: as requests of
priority bulk from a closed loop of callers, of which the vectors are dropped, and as a job that
reads and writes Parquet. Both are clients in this process. A job is as long as the requests before
it, by their rate. Both rates are steady ones: neither the first answer or part counts, nor the last
ones. The rate of a whole job, which begins with one chunk in flight, is reported, too. The ratio
compares a job with the requests just before and just after it.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from itertools import cycle, islice
from pathlib import Path
from statistics import median
from typing import Annotated, Final

import pyarrow
import shoal
import typer
from pyarrow import parquet
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from shoal.bulk.engine import JobRun, create
from shoal.bulk.places import place
from shoal.bulk.spec import BulkLimits, BulkRecipe

from benchmarks.common.machine import busy_cores, print_end, print_machine, wide_console
from benchmarks.common.report import spread
from benchmarks.common.texts import MINILM_ID, real_texts
from benchmarks.mesh.throughput import seconds_once, steadily
from services.local.devices import layout
from services.local.mesh import running
from services.local.settings import Settings, known_models

SEED: Final = 7
TEXTS: Final = 512
CHUNK_ROWS: Final = 128
"""Each request of the callers has as many texts."""
MIN_CHUNKS: Final = 12
TARGET: Final = 0.95
SHORT, MIXED = "short texts", "mixed texts"


@dataclass(slots=True)
class ParquetResult:
    """Texts per second by gRPC, one more than rounds, by jobs, and by whole jobs."""

    requests: list[float] = field(default_factory=list)
    jobs: list[float] = field(default_factory=list)
    whole: list[float] = field(default_factory=list)

    @property
    def ratios(self) -> list[float]:
        pairs = zip(self.requests, self.requests[1:], strict=False)
        return [
            job / ((before + after) / 2)
            for job, (before, after) in zip(self.jobs, pairs, strict=True)
        ]

    @property
    def is_met(self) -> bool:
        return median(self.ratios) >= TARGET


async def run_requests(client: shoal.AsyncClient, texts: list[str], seconds: float) -> float:
    async def encode(part: list[str]) -> object:
        return await client.encode(MINILM_ID, part, priority="bulk")

    return len(texts) / await steadily(encode, texts, seconds)  # type: ignore[arg-type]


async def run_job(
    client: shoal.AsyncClient, texts: Sequence[str], rows: int
) -> tuple[float, float]:
    """Return the texts per second of a job, and with its beginning and end."""
    with tempfile.TemporaryDirectory(prefix="bulk-") as name:
        folder = Path(name)
        repeated = list(islice(cycle(texts), rows))
        parquet.write_table(pyarrow.table({"text": repeated}), folder / "in.parquet")
        recipe = BulkRecipe("encode", MINILM_ID, chunk_rows=CHUNK_ROWS)
        began = time.perf_counter()
        where = place(str(folder / "out"))
        manifest = create(where, str(folder / "in.parquet"), recipe, BulkLimits())
        done = await JobRun(where, manifest, client).run()
        seconds = time.perf_counter() - began
        assert (done.state, done.rows, done.failed) == ("completed", rows, 0), done.error
        parts = sorted(one.stat().st_mtime for one in (folder / "out").glob("part-*"))
        steady = seconds_once([(at, CHUNK_ROWS) for at in parts], rows)
    return rows / steady, rows / seconds


async def measured(rounds: int, seconds: float, console: Console) -> dict[str, ParquetResult]:
    found = {SHORT: ParquetResult(), MIXED: ParquetResult()}
    texts = {
        SHORT: [f"{number} small boats in the harbour" for number in range(TEXTS)],
        MIXED: real_texts(TEXTS, SEED).texts,
    }
    workers, threads = layout(None, None)
    settings = Settings(
        port=0, workers=workers, threads=threads, models=known_models([], {}), dtype="bfloat16"
    )
    async with running(settings) as mesh, shoal.AsyncClient(mesh.address) as client:
        for _ in range(workers):
            await client.models.load(MINILM_ID)
        with Progress(console=console, transient=True, auto_refresh=False) as progress:
            bar = progress.add_task("measuring", total=len(found) * (2 * rounds + 1))
            for name, one in found.items():
                await run_requests(client, texts[name], 2.0)
                one.requests.append(await run_requests(client, texts[name], seconds))
                progress.update(bar, advance=1, refresh=True)
                for _ in range(rounds):
                    chunks = int(one.requests[-1] * seconds / CHUNK_ROWS)
                    rows = CHUNK_ROWS * max(MIN_CHUNKS, chunks)
                    steady, whole = await run_job(client, texts[name], rows)
                    one.jobs.append(steady)
                    one.whole.append(whole)
                    progress.update(bar, advance=1, refresh=True)
                    one.requests.append(await run_requests(client, texts[name], seconds))
                    progress.update(bar, advance=1, refresh=True)
    return found


def print_found(found: dict[str, ParquetResult], console: Console) -> None:
    table = Table(title="texts per second: median (lowest-highest)", title_justify="left")
    for heading in ("texts", "gRPC", "job", "whole job", "job / gRPC", ""):
        table.add_column(heading, justify="left" if heading == "texts" else "right")
    for name, one in found.items():
        verdict = "[green]met[/]" if one.is_met else "[red]not met[/]"
        rates = (spread(values) for values in (one.requests, one.jobs, one.whole))
        table.add_row(name, *rates, spread(one.ratios, 3), verdict)
    console.print(table)
    console.print(f"target: a median ratio of at least {TARGET}", style="dim")


def main(
    rounds: Annotated[int, typer.Option(min=1, help="Jobs of each kind of texts")] = 2,
    seconds: Annotated[float, typer.Option(min=2, help="Of each measurement")] = 12.0,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON with every round; the table goes to stderr")
    ] = False,
) -> None:
    """Measure a bulk job from Parquet to Parquet next to steady bulk requests by gRPC."""
    console = wide_console(as_json=as_json)
    busy = asyncio.run(busy_cores())
    found = asyncio.run(measured(rounds, seconds, console))
    print_machine(console)
    print_found(found, console)
    results = {name: asdict(one) | {"ratios": one.ratios} for name, one in found.items()}
    print_end(console, busy, {"texts": results}, as_json=as_json)
    raise typer.Exit(int(not all(one.is_met for one in found.values())))


if __name__ == "__main__":
    typer.run(main)
