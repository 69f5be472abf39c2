"""Measure growth over time: `python -m benchmarks.stress.soak --minutes 10`, or `make bench-soak
MINUTES=10`.

A real mesh (Redis, two routers, a scheduler, two single-threaded workers) with small random models
answers encode, score and extract requests of mixed lengths. Every minute capacity is measured in a
closed loop for six seconds, because the machine's speed drifts; for the rest of it requests arrive
at 80 % of the minimum of the last three capacities, at random moments (Poisson), whether or not
answers arrive. Every second the resident memory, threads and open files of every process are
recorded.

The first `--warm-up` seconds (60) of it do not count: models are loaded, code runs for the first
time, allocators and caches fill up. Of the rest: memory's slope by least squares through ten batch
means, with its 95 % confidence interval (`benchmarks/common/trend.py`), and the open files of the
first and the last tenth, as medians, because gRPC renews its connections every few minutes and for
some seconds has the old one and the new one open. A process is flat if the interval contains 0 or
reaches no higher than 0.5 % of its memory in ten minutes. This process, which sends the requests,
is shown as `client` and not judged: its tallies grow by design.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median_low

import psutil
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from shoal import AsyncClient

from benchmarks.common.report import percentile
from benchmarks.common.trend import Trend, trend

FLAT_SHARE = 0.005
FLAT_SECONDS = 600.0
ROUND_SECONDS = 60.0
CAPACITY_SECONDS = 6.0
"""Duration of each round."""
LATEST = 3
"""Rounds of which the least capacity counts: a machine that others use may be half as fast a minute
later.
"""
AT_ONCE = 24
"""Requests in flight while capacity is measured."""
WORDS = (2, 40)
POSITIONS = 512
LABELS = ("O", "B-PER", "I-PER", "B-ORG", "I-ORG")
CLIENT = "client"
ENVIRONMENT = {"SHOAL_LOG_LEVEL": "WARNING", "OMP_NUM_THREADS": "1"}


@dataclass(frozen=True, slots=True)
class Sample:
    """A sample of one process; `seconds` since the load began."""

    seconds: float
    rss: int
    threads: int
    files: int


@dataclass(frozen=True, slots=True)
class Grown:
    """The growth of one process over the counted time. Bytes; the slope in bytes per second."""

    name: str
    rss_start: float
    rss_end: float
    slope: Trend
    files: tuple[int, int]
    threads: tuple[int, int]

    @property
    def is_flat(self) -> bool:
        return (
            self.slope.contains_zero
            or self.slope.high * FLAT_SECONDS <= FLAT_SHARE * self.rss_start
        )

    @property
    def opens_no_more(self) -> bool:
        return self.files[1] <= self.files[0]


@dataclass(slots=True)
class Answers:
    """The answers of a run.

    Attributes:
        took: When each answer arrived, and its duration, in seconds.
        errors: The number of each kind.
        examples: The first error of each kind.
    """

    took: list[tuple[float, float]] = field(default_factory=list)
    errors: Counter[str] = field(default_factory=Counter)
    examples: dict[str, str] = field(default_factory=dict)


class MixedLoad:
    """Mixed requests to one mesh."""

    def __init__(self, client: AsyncClient, texts: Sequence[str], seed: int) -> None:
        self._texts = texts
        self._chance = random.Random(seed)
        self._ways: list[Callable[[], Awaitable[object]]] = [
            lambda: client.encode("random/embed", self._some(1, 8)),
            lambda: client.encode("random/embed", self._some(1, 1)),
            lambda: client.score("random/rank", self._some(1, 1)[0], self._some(2, 8)),
            lambda: client.entities("random/entities", self._some(1, 4)),
        ]

    async def ask(self, answers: Answers, began: float) -> None:
        """`began`: when the load began, on the monotonic clock."""
        asked = time.monotonic()
        try:
            await self._chance.choice(self._ways)()
        except Exception as error:  # Whatever it is, it is counted by kind and makes the run fail.
            kind = type(error).__name__
            answers.errors[kind] += 1
            answers.examples.setdefault(kind, str(error)[:200])
        else:
            now = time.monotonic()
            answers.took.append((now - began, now - asked))

    async def closed_loop(self, seconds: float) -> float:
        """Requests per second that were answered; the first quarter, in which batches fill up, does
        not count.
        """
        answers, began = Answers(), time.monotonic()

        async def caller() -> None:
            while time.monotonic() < began + seconds:
                await self.ask(answers, began)

        await asyncio.gather(*(caller() for _ in range(AT_ONCE)))
        if answers.errors:
            raise RuntimeError(
                f"while capacity was measured: {dict(answers.errors)}, {answers.examples}"
            )
        return sum(seconds / 4 <= at <= seconds for at, _ in answers.took) / (seconds * 3 / 4)

    async def open_loop(self, rate: float, seconds: float, answers: Answers, began: float) -> None:
        calls = set[asyncio.Task[None]]()
        at = time.monotonic()
        end = at + seconds
        while (at := at + self._chance.expovariate(rate)) < end:
            await asyncio.sleep(max(0.0, at - time.monotonic()))
            call = asyncio.create_task(self.ask(answers, began))
            calls.add(call)
            call.add_done_callback(calls.discard)
        if calls:
            await asyncio.wait(calls)

    def _some(self, fewest: int, most: int) -> list[str]:
        return self._chance.choices(self._texts, k=self._chance.randint(fewest, most))


async def watch(
    processes: dict[str, psutil.Process],
    seen: dict[str, list[Sample]],
    began: float,
    reported: Callable[[float], None],
) -> None:
    """Look at all of them once a second, until it is cancelled."""
    while True:
        now = time.monotonic() - began
        for name, process in processes.items():
            with process.oneshot():
                seen[name].append(
                    Sample(now, process.memory_info().rss, process.num_threads(), process.num_fds())
                )
        reported(now)
        await asyncio.sleep(1.0 - (time.monotonic() - began) % 1.0)


def grown(name: str, samples: Sequence[Sample]) -> Grown:
    """Return the growth over the counted samples. Start and end are those of the first and the last
    tenth: means; of files, medians; of threads, peaks.
    """
    tenth = max(1, len(samples) // 10)
    first, last = samples[:tenth], samples[-tenth:]
    return Grown(
        name,
        sum(one.rss for one in first) / tenth,
        sum(one.rss for one in last) / tenth,
        trend([one.seconds for one in samples], [one.rss for one in samples]),
        (median_low(one.files for one in first), median_low(one.files for one in last)),
        (max(one.threads for one in first), max(one.threads for one in last)),
    )


@dataclass(frozen=True, slots=True)
class SoakResult:
    """Results of one run; times in seconds.

    Attributes:
        capacities: Requests per second of each round.
        p99: The p99 of each tenth of the counted time.
    """

    minutes: float
    warm_up: float
    share: float
    capacities: list[float]
    answered: int
    errors: dict[str, int]
    examples: dict[str, str]
    p50: float
    p99: list[float]
    processes: list[Grown]
    samples: dict[str, list[Sample]]

    @property
    def is_good(self) -> bool:
        judged = [one for one in self.processes if one.name != CLIENT]
        return not self.errors and all(one.is_flat and one.opens_no_more for one in judged)


async def measure(given: argparse.Namespace, directory: Path, progress: Progress) -> SoakResult:
    # Here, so that --help needs no torch.
    from tests.parity.checkpoints import SentenceFiles, write_checkpoint
    from tests.support.cluster import Cluster
    from tests.support.texts import texts

    task = progress.add_task("models", total=given.minutes * 60)
    models = directory / "models" / "random"
    size = {"hidden": given.hidden, "positions": POSITIONS}
    write_checkpoint(
        "bert", models / "embed", **size, sentence=SentenceFiles(max_seq_length=POSITIONS)
    )
    write_checkpoint("bert", models / "rank", **size, head="sequence_classification")
    write_checkpoint(
        "bert", models / "entities", **size, head="token_classification", labels=LABELS
    )
    (directory / "mesh").mkdir()
    progress.update(task, description="mesh")
    with Cluster(
        directory / "mesh",
        models=str(models.parent),
        routers=2,
        schedulers=1,
        workers=2,
        environment=ENVIRONMENT,
    ) as cluster:
        async with AsyncClient(cluster.address) as client:
            load = MixedLoad(client, texts(400, *WORDS, seed=given.seed), given.seed)
            await load.closed_loop(2.0)
            processes = {
                name: psutil.Process(one.pid) for name, one in cluster.processes.items()
            } | {CLIENT: psutil.Process()}
            samples: dict[str, list[Sample]] = {name: [] for name in processes}
            answers, capacities, began = Answers(), list[float](), time.monotonic()
            watching = asyncio.create_task(
                watch(processes, samples, began, lambda now: progress.update(task, completed=now))
            )
            try:
                while (left := began + given.minutes * 60 - time.monotonic()) > CAPACITY_SECONDS:
                    progress.update(task, description="capacity")
                    capacities.append(await load.closed_loop(CAPACITY_SECONDS))
                    rate = given.share * min(capacities[-LATEST:])
                    progress.update(task, description=f"{rate:.0f} requests/s")
                    await load.open_loop(
                        rate, min(ROUND_SECONDS, left) - CAPACITY_SECONDS, answers, began
                    )
            finally:
                watching.cancel()
    counted = {
        name: [one for one in own if one.seconds >= given.warm_up] for name, own in samples.items()
    }
    took = [(at, seconds) for at, seconds in answers.took if at >= given.warm_up]
    stretch = (given.minutes * 60 - given.warm_up) / 10
    tenths = [
        [seconds for at, seconds in took if 0 <= (at - given.warm_up) - part * stretch < stretch]
        for part in range(10)
    ]
    return SoakResult(
        given.minutes, given.warm_up, given.share, capacities, len(answers.took),
        dict(answers.errors), answers.examples,
        percentile([seconds for _, seconds in took], 0.5),
        [percentile(one, 0.99) if one else 0.0 for one in tenths],
        [grown(name, own) for name, own in counted.items()], samples,
    )  # fmt: skip


def show(result: SoakResult, console: Console) -> None:
    capacities = " ".join(f"{one:.0f}" for one in result.capacities)
    load = (
        f"{result.share:.0%} of the least of {LATEST} minutes' capacities ({capacities} "
        f"requests/s), for {result.minutes:g} minutes"
    )
    counts = f"{result.answered:,} answers, {sum(result.errors.values())} errors"
    console.print(f"{load}, of which the first {result.warm_up:g} s do not count: {counts}")
    for error, count in result.errors.items():
        console.print(
            f"  {count} x {error}, the first: {result.examples[error]}", style="red", markup=False
        )
    console.print(
        f"p50 {result.p50 * 1e3:.1f} ms; p99 of each tenth, ms: "
        + " ".join(f"{one * 1e3:.0f}" for one in result.p99)
    )
    table = Table("process", box=None)
    for heading in (
        "MiB at first",
        "at last",
        "KiB per minute",
        "95 % interval",
        "open files",
        "threads",
        "",
    ):
        table.add_column(heading, justify="right")
    for one in result.processes:
        slope, low, high = (
            value * 60 / 1024 for value in (one.slope.slope, one.slope.low, one.slope.high)
        )
        verdict = "not judged" if one.name == CLIENT else ("flat" if one.is_flat else "GROWS")
        files = f"{one.files[0]} to {one.files[1]}" + (
            "" if one.opens_no_more or one.name == CLIENT else " GROWS"
        )
        table.add_row(
            one.name, f"{one.rss_start / 2**20:.1f}", f"{one.rss_end / 2**20:.1f}", f"{slope:+.1f}",
            f"{low:+.1f} to {high:+.1f}",
            files, f"{one.threads[0]} to {one.threads[1]}", verdict,
        )  # fmt: skip
    console.print(table)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--minutes", type=float, default=10.0, help="how long the load lasts, the warm-up included"
    )
    parser.add_argument(
        "--warm-up", type=float, default=60.0, help="seconds of it that do not count"
    )
    parser.add_argument("--share", type=float, default=0.8, help="of capacity")
    parser.add_argument("--hidden", type=int, default=64, help="width of the models")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--json",
        action="store_true",
        help="one object on stdout with every sample; the table goes to stderr",
    )
    given = parser.parse_args()
    if given.minutes * 60 - given.warm_up < 20:
        parser.error(
            f"--minutes {given.minutes:g} leaves less than 20 s after a warm-up of "
            f"{given.warm_up:g} s"
        )
    console = Console(stderr=given.json, width=None if sys.stdout.isatty() else 140)
    with (
        tempfile.TemporaryDirectory(prefix="soak-") as directory,
        Progress(console=console, transient=True) as progress,
    ):
        result = asyncio.run(measure(given, Path(directory), progress))
    show(result, console)
    if given.json:
        print(json.dumps(asdict(result)))
    return 0 if result.is_good else 1


if __name__ == "__main__":
    sys.exit(main())
