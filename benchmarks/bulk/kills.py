"""Measure a submitted job under kills of all processes, and interactive requests next to it:
`python -m benchmarks.bulk.kills`, or `make bench-bulk-kills`.

A real mesh (two routers, two single-threaded workers, an edge, a durable Redis) encodes short texts
from Parquet, while every `--kill-seconds` the next process is killed with SIGKILL: that of the job,
the edge, the routers, the workers and Redis. At the end each row must be in the output once, and a
sample of the vectors must equal direct answers.

A client sends single texts at random times (a Poisson process) throughout, in four phases: alone;
alone while processes are killed; next to the job; next to the job while processes are killed. The
time of a request counts from the moment at which it was due. Kills make requests wait by
themselves, so the job is judged by the ratio of phases with the same kills.
"""

from __future__ import annotations

import asyncio
import random
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from itertools import cycle
from pathlib import Path
from typing import Annotated, Final

import numpy as np
import shoal
import typer
from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TaskID, TimeRemainingColumn
from rich.table import Table

from benchmarks.common.machine import busy_cores, print_end, print_machine, wide_console
from benchmarks.common.texts import MINILM_ID, minilm_directory, real_texts
from tests.edge.jobs.parts import STOPPED
from tests.support.cluster import Cluster
from tests.support.submitted_job import JOB, VICTIMS, SubmittedJob, mesh_of_jobs

SEED: Final = 7
TARGET_RATIO: Final = 1.25
"""The interactive p99 next to the job, relative to that without it."""
MEMORY_RATIO: Final = 1.2
"""The memory of the job's process in the last fifth of the rows, relative to the first."""
SAMPLE: Final = 1000
TOLERANCE: Final = 1e-5
TIMEOUT_SECONDS: Final = 120.0
POLL_SECONDS: Final = 0.5
ALONE, ALONE_KILLED = "alone", "alone, with kills"
NEXT, NEXT_KILLED = "next to the job", "next to the job, with kills"
WITHOUT_JOB: Final = {NEXT: ALONE, NEXT_KILLED: ALONE_KILLED}


@dataclass(slots=True)
class Phase:
    """The interactive requests of a phase.

    Attributes:
        seconds: The time of each answered request.
        failed: The errors of the others, with their numbers.
    """

    seconds: list[float] = field(default_factory=list)
    failed: dict[str, int] = field(default_factory=dict)

    def quantile(self, share: float) -> float:
        return float(np.quantile(self.seconds, share)) if self.seconds else float("nan")


@dataclass(slots=True)
class KillsResult:
    """The results of a run.

    Attributes:
        seconds: The time of the job.
        memory: Rows that were done, and the memory of the job's process in KiB.
        killed: The number of kills of each process during the job.
        error: The first fault of the output; empty without one.
    """

    rows: int
    seconds: float = 0.0
    phases: dict[str, Phase] = field(default_factory=dict)
    memory: list[tuple[int, int]] = field(default_factory=list)
    killed: dict[str, int] = field(default_factory=dict)
    error: str = ""

    def ratio(self, phase: str) -> float | None:
        """Return the p99 of a phase next to the job, relative to that without it."""
        if phase not in WITHOUT_JOB or WITHOUT_JOB[phase] not in self.phases:
            return None
        return self.phases[phase].quantile(0.99) / self.phases[WITHOUT_JOB[phase]].quantile(0.99)

    @property
    def memory_ratio(self) -> float:
        """The most memory in the last fifth of the rows, relative to the first fifth."""
        fifths = [
            max((kib for rows, kib in self.memory if begin <= rows <= end), default=0)
            for begin, end in ((0, self.rows // 5), (self.rows * 4 // 5, self.rows))
        ]
        return fifths[1] / fifths[0] if all(fifths) else float("nan")


class TextsAsker:
    """Sends single texts at random times, whether or not earlier ones are answered."""

    def __init__(self, client: shoal.AsyncClient, model: str, per_second: float) -> None:
        self._client, self._model, self._per_second = client, model, per_second
        self._texts = real_texts(256, SEED).texts
        self._chance = random.Random(SEED)

    async def run(self, is_over: Callable[[], bool]) -> Phase:
        """Send requests until `is_over`, and wait for their answers."""
        phase, due = Phase(), time.monotonic()
        asked: set[asyncio.Task[None]] = set()
        while not is_over():
            due += self._chance.expovariate(self._per_second)
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            task = asyncio.create_task(self._ask(due, phase))
            asked.add(task)
            task.add_done_callback(asked.discard)
        await asyncio.gather(*asked)
        return phase

    async def _ask(self, due: float, phase: Phase) -> None:
        text = self._chance.choice(self._texts)
        try:
            await self._client.encode(self._model, text, timeout=TIMEOUT_SECONDS)
        except shoal.ShoalError as error:
            phase.failed[error.reason] = phase.failed.get(error.reason, 0) + 1
        else:
            phase.seconds.append(time.monotonic() - due)


class Run:
    """One run of all phases."""

    def __init__(
        self, cluster: Cluster, job: SubmittedJob, asker: TextsAsker, found: KillsResult
    ) -> None:
        self._cluster, self._job, self._asker, self.found = cluster, job, asker, found

    async def phases(
        self, seconds: float, kill_seconds: float, progress: Progress, bar: TaskID
    ) -> None:
        def describe(phase: str) -> None:
            progress.update(bar, description=phase)

        describe(ALONE)
        self.found.phases[ALONE] = await self._asker.run(_after(seconds))
        if kill_seconds:
            describe(ALONE_KILLED)
            victims = [victim for victim in VICTIMS if victim != JOB]
            over = _after(kill_seconds * (len(victims) + 1))
            killing = asyncio.create_task(self._kill(kill_seconds, victims, over, {}))
            self.found.phases[ALONE_KILLED] = await self._asker.run(killing.done)
            await killing
        describe(NEXT)
        began = time.monotonic()
        await asyncio.to_thread(self._job.submit)
        watching = asyncio.create_task(self._watch(progress, bar))
        over = _after(seconds)
        # With few rows the job may end first.
        phase = await self._asker.run(lambda: over() or watching.done())
        self.found.phases[NEXT] = phase
        if kill_seconds:
            describe(NEXT_KILLED)
            killing = asyncio.create_task(
                self._kill(kill_seconds, VICTIMS, watching.done, self.found.killed)
            )
            self.found.phases[NEXT_KILLED] = await self._asker.run(watching.done)
            await killing
        await watching
        self.found.seconds = time.monotonic() - began

    async def _kill(
        self,
        seconds: float,
        victims: Sequence[str],
        is_over: Callable[[], bool],
        killed: dict[str, int],
    ) -> None:
        """Kill one process after another until `is_over`, and count the kills."""
        for victim in cycle(victims):
            end = time.monotonic() + seconds
            while time.monotonic() < end:
                if is_over():
                    return
                await asyncio.sleep(POLL_SECONDS)
            await asyncio.to_thread(self._job.kill, victim)
            killed[victim] = killed.get(victim, 0) + 1

    async def _watch(self, progress: Progress, bar: TaskID) -> None:
        """Follow the job until it has stopped."""
        is_stopped = False
        while not is_stopped:
            await asyncio.sleep(POLL_SECONDS)
            state = await asyncio.to_thread(self._job.state)
            if state is None:
                continue
            is_stopped = state["status"] in STOPPED
            rows = state["counts"]["rows"]
            progress.update(bar, completed=rows)
            resident = max(map(_resident_kib, self._job.processes()), default=0)
            self.found.memory.append((rows, resident))


def _after(seconds: float) -> Callable[[], bool]:
    end = time.monotonic() + seconds
    return lambda: time.monotonic() >= end


def _resident_kib(pid: int) -> int:
    """Return the memory of a process; 0 if it has ended."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in status.splitlines() if "VmRSS" in line), 0)


async def _check(job: SubmittedJob, client: shoal.AsyncClient, texts: list[str]) -> str:
    """Return the first fault of the output of the job; empty without one."""
    count = min(SAMPLE, len(texts))
    sample = np.random.default_rng(SEED).choice(len(texts), count, replace=False).tolist()
    wanted = [texts[row] for row in sample]
    expected = await client.encode(MINILM_ID, wanted, timeout=TIMEOUT_SECONDS)
    try:
        embedding_id = await asyncio.to_thread(job.check)
    except AssertionError as error:
        return str(error)
    if embedding_id != expected.embedding_id:
        return f"the embedding id is {embedding_id}, and directly {expected.embedding_id}"
    vectors = await asyncio.to_thread(job.vectors, sample)
    apart = float(np.abs(vectors - expected.dense).max())
    return f"vectors differ from direct ones by {apart:g}" if apart > TOLERANCE else ""


async def measured(
    rows: int, seconds: float, kill_seconds: float, per_second: float, chunk_rows: int,
    console: Console,
) -> KillsResult:  # fmt: skip
    found = KillsResult(rows)
    texts = [f"{number} small boats in the harbour" for number in range(rows)]
    columns = (*Progress.get_default_columns()[:-1], MofNCompleteColumn(), TimeRemainingColumn())
    with (
        tempfile.TemporaryDirectory(prefix="kills-") as root,
        Progress(*columns, console=console, transient=True) as progress,
    ):
        bar = progress.add_task("starting", total=rows)
        with mesh_of_jobs(Path(root), f"{MINILM_ID}={minilm_directory()}") as cluster:
            job = SubmittedJob(cluster, Path(root) / "data", texts, MINILM_ID, chunk_rows)
            async with shoal.AsyncClient(cluster.address) as client:
                await client.encode(MINILM_ID, texts[:512], timeout=TIMEOUT_SECONDS)
                for _ in cluster.workers:
                    await client.models.load(MINILM_ID)
                run = Run(cluster, job, TextsAsker(client, MINILM_ID, per_second), found)
                await run.phases(seconds, kill_seconds, progress, bar)
                found.error = await _check(job, client, texts)
    return found


def print_found(found: KillsResult, console: Console) -> None:
    table = Table(title="single texts, milliseconds", title_justify="left")
    for heading in ("phase", "answered", "failed", "p50", "p99", "p99 / without the job", ""):
        table.add_column(heading, justify="left" if heading == "phase" else "right")
    for name, phase in found.phases.items():
        ratio = found.ratio(name)
        met = "" if ratio is None else _verdict(ratio <= TARGET_RATIO)
        shown = "" if ratio is None else f"{ratio:.2f}"
        numbers = [f"{1e3 * phase.quantile(share):,.1f}" for share in (0.5, 0.99)]
        failed = ", ".join(f"{count} {reason}" for reason, count in phase.failed.items()) or "0"
        table.add_row(name, f"{len(phase.seconds):,}", failed, *numbers, shown, met)
    console.print(table)
    output = found.error or "each row once, a sample equal to direct answers"
    console.print(f"{found.rows:,} rows: {output} {_verdict(not found.error)}")
    console.print(
        f"{found.seconds / 60:.1f} minutes, {found.rows / found.seconds:,.0f} rows/s; killed: "
        f"{dict(found.killed)}"
    )
    peak = max((kib for _, kib in found.memory), default=0)
    console.print(
        f"memory of the job's process: at most {peak / 1024:,.0f} MiB; last fifth of the rows / "
        f"first {found.memory_ratio:.2f} {_verdict(found.memory_ratio <= MEMORY_RATIO)}"
    )


def _verdict(is_met: bool) -> str:
    return "[green]met[/]" if is_met else "[red]not met[/]"


def main(
    rows: Annotated[int, typer.Option(min=1, help="Rows of the job")] = 1_000_000,
    kill_seconds: Annotated[
        float, typer.Option(min=0, help="Time between two kills; 0: no process is killed")
    ] = 20.0,
    seconds: Annotated[float, typer.Option(min=1, help="Of each phase without kills")] = 60.0,
    per_second: Annotated[
        float, typer.Option(min=0.1, help="Single texts that the client sends in a second")
    ] = 5.0,
    chunk_rows: Annotated[int, typer.Option(min=1, help="Rows of a chunk of the job")] = 256,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON with every request; tables go to stderr")
    ] = False,
) -> None:
    """Measure a submitted job under kills of all processes, and interactive requests next to it."""
    console = wide_console(as_json=as_json)
    busy = asyncio.run(busy_cores())
    found = asyncio.run(measured(rows, seconds, kill_seconds, per_second, chunk_rows, console))
    print_machine(console)
    print_found(found, console)
    print_end(console, busy, asdict(found), as_json=as_json)
    raise typer.Exit(int(bool(found.error)))


if __name__ == "__main__":
    typer.run(main)
