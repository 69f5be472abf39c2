"""Measure if a heavy neighbour starves a light one: `python -m benchmarks.stress.fairness`, or
`make bench-fairness`.

A mesh of one router and one worker of one thread, each a process. A light client B sends single
texts at random (Poisson, open loop), first alone and then while A sends more than the worker can
do: (model) A and B are two models, ten texts of A for one of B; (tenant) two tenants of one model,
likewise; (slow) A is a model that takes many times as long; (pages) A sends large pages, each of
which its image tower reads for about a second. The bound is on B's p99: 1.5 times its p99 alone,
and one batch of A, which may have begun when B's text arrives.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass, field
from io import BytesIO
from pathlib import Path
from typing import Annotated

import grpc.aio
import numpy as np
import typer
from PIL import Image
from rich.console import Console
from rich.progress import Progress, TaskID
from rich.table import Table
from shoal.v1 import inference_pb2, inference_pb2_grpc

from benchmarks.common.machine import busy_cores, machine
from benchmarks.common.report import percentile
from benchmarks.common.texts import minilm_directory, real_texts
from services.local.mesh import LocalMesh, running
from services.local.settings import Settings

SEED = 7
LIGHT, HOT, SLOW, PAGES = "fair/light", "fair/hot", "fair/slow", "fair/pages"
SLOW_SIZE = {
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "intermediate_size": 3072,
}
RATIO = 10
"""Texts of A for one of B."""
OVERLOAD = 1.2
"""A's request rate relative to its capacity alone."""
BACKLOG_SECONDS = 2.0
"""Seconds of A's load that it sends at the beginning."""
SHARE = 0.1
"""B's request rate relative to its capacity alone, with a slow model as neighbour."""
IDLE_FACTOR = 1.5
MIN_REQUESTS = 200
"""Minimum number of B's requests."""
MAX_FACTOR = 5
"""Factor by which a scenario may exceed its duration on a machine where B sends few requests."""
TIMEOUT_SECONDS = 600.0


@dataclass(frozen=True, slots=True)
class FairnessClient:
    """Who asks for what, and how many texts at once, or pages."""

    model: str
    tenant: str
    texts: int
    is_of_pages: bool = False


@dataclass(frozen=True, slots=True)
class Scenario:
    name: str
    heavy: FairnessClient
    light: FairnessClient


SCENARIOS = (
    Scenario("model", FairnessClient(HOT, "a", 16), FairnessClient(LIGHT, "b", 1)),
    Scenario("tenant", FairnessClient(HOT, "a", 16), FairnessClient(HOT, "b", 1)),
    Scenario("slow", FairnessClient(SLOW, "a", 4), FairnessClient(LIGHT, "b", 1)),
    Scenario(
        "pages", FairnessClient(PAGES, "a", 4, is_of_pages=True), FairnessClient(LIGHT, "b", 1)
    ),
)


@dataclass(slots=True)
class ScenarioResult:
    """Results of one scenario. Times in milliseconds, rates in texts/s.

    Attributes:
        idle, loaded: The times of each of B's requests.
    """

    name: str
    capacity: float
    """A's rate when it was alone."""
    heavy_rate: float
    """A's request rate."""
    light_rate: float
    idle: list[float]
    loaded: list[float] = field(default_factory=list)
    batches: list[float] = field(default_factory=list)
    """Durations of A's batches while B sent requests."""
    backlog: int = 0
    """The fewest of A's requests that were waiting when B asked."""
    refused: int = 0
    """Number of A's requests that were refused with an error."""

    @property
    def batch(self) -> float:
        return percentile(self.batches, 0.99)

    @property
    def bound(self) -> float:
        return IDLE_FACTOR * percentile(self.idle, 0.99) + self.batch

    @property
    def is_met(self) -> bool:
        return self.backlog > 0 and percentile(self.loaded, 0.99) <= self.bound


class FairnessCaller:
    """Asks the mesh for vectors."""

    def __init__(self, channel: grpc.aio.Channel, texts: list[str]) -> None:
        self._stub: inference_pb2_grpc.InferenceServiceAsyncStub = (
            inference_pb2_grpc.InferenceServiceStub(channel)  # type: ignore[assignment]
        )
        self._texts = texts
        self._chance = random.Random(SEED)
        self._pages = page_files()

    async def ask(self, client: FairnessClient) -> float:
        """Milliseconds that it took. Raises grpc.RpcError."""
        if client.is_of_pages:
            chosen = (
                inference_pb2.Image(data=self._chance.choice(self._pages))
                for _ in range(client.texts)
            )
            items = [inference_pb2.Item(image=image) for image in chosen]
        else:
            items = [
                inference_pb2.Item(text=self._chance.choice(self._texts))
                for _ in range(client.texts)
            ]
        request = inference_pb2.EncodeRequest(model=client.model, items=items)
        begin = time.perf_counter()
        await self._stub.Encode(
            request, timeout=TIMEOUT_SECONDS, metadata=(("x-shoal-tenant", client.tenant),)
        )
        return (time.perf_counter() - begin) * 1e3

    async def capacity(self, client: FairnessClient, seconds: float, at_once: int = 8) -> float:
        """Texts a second, asked for by as many callers as keep the worker busy."""
        begin = time.perf_counter()

        async def caller() -> int:
            done = 0
            while time.perf_counter() < begin + seconds:
                await self.ask(client)
                done += client.texts
            return done

        done = sum(await asyncio.gather(*(caller() for _ in range(at_once))))
        return done / (time.perf_counter() - begin)


def page_files() -> list[bytes]:
    """PNG files of 560 x 560 pixels of noise."""
    pixels = np.random.default_rng(SEED).integers(0, 256, (8, 560, 560, 3), np.uint8)
    files = []
    for one in pixels:
        out = BytesIO()
        Image.fromarray(one).save(out, "PNG", compress_level=1)
        files.append(out.getvalue())
    return files


def arrivals(rate: float, seed: int) -> Iterator[float]:
    """Seconds from the beginning, for ever."""
    chance, at = random.Random(seed), 0.0
    while True:
        at += chance.expovariate(rate)
        yield at


async def until(begin: float, at: float) -> None:
    await asyncio.sleep(max(0.0, begin + at - time.perf_counter()))


class Heavy:
    """A: asks whether or not it is answered, until it is cancelled."""

    def __init__(self, caller: FairnessCaller, client: FairnessClient, rate: float) -> None:
        self._caller, self._client, self._rate = caller, client, rate
        self._open: set[asyncio.Task[float]] = set()
        self.refused = 0

    @property
    def backlog(self) -> int:
        return len(self._open)

    async def run(self) -> None:
        begin = time.perf_counter()
        try:
            for at in arrivals(self._rate / self._client.texts, SEED):
                await until(begin, at - BACKLOG_SECONDS)
                task = asyncio.create_task(self._caller.ask(self._client))
                self._open.add(task)
                task.add_done_callback(self._ended)
        finally:
            for task in list(self._open):
                task.cancel()

    def _ended(self, task: asyncio.Task[float]) -> None:
        self._open.discard(task)
        if not task.cancelled() and task.exception() is not None:
            self.refused += 1


async def ask_openly(
    caller: FairnessCaller,
    client: FairnessClient,
    rate: float,
    seconds: float,
    tick: Tick,
    heavy: Heavy | None = None,
) -> FairnessAnswers:
    """Send B's requests for `seconds` and at least MIN_REQUESTS of them, unless that takes far too
    long.
    """
    begin, backlog = time.perf_counter(), sys.maxsize
    tasks: list[asyncio.Task[float]] = []
    for at in arrivals(rate, SEED + 1):
        await until(begin, at)
        if (at >= seconds and len(tasks) >= MIN_REQUESTS) or at >= MAX_FACTOR * seconds:
            break
        tasks.append(asyncio.create_task(caller.ask(client)))
        if heavy is not None:
            backlog = min(backlog, heavy.backlog)
        tick(min(at / seconds, 1.0))
    return FairnessAnswers(await asyncio.gather(*tasks), backlog)


@dataclass(frozen=True, slots=True)
class FairnessAnswers:
    milliseconds: list[float]
    backlog: int


class Tick:
    """Moves the bar of one part of a scenario."""

    def __init__(self, progress: Progress, task: TaskID, begin: float, share: float) -> None:
        self._progress, self._task, self._begin, self._share = progress, task, begin, share

    def __call__(self, part: float) -> None:
        self._progress.update(self._task, completed=self._begin + self._share * part)


async def measure(
    scenario: Scenario, models: str, texts: list[str], seconds: float, progress: Progress
) -> ScenarioResult:
    bar = progress.add_task(scenario.name, total=1.0)
    # Pages are to be computed each time.
    environment = (("SHOAL_LOG_LEVEL", "DEBUG"), ("SHOAL_IMAGE_CACHE_BYTES", "0"))
    async with AsyncExitStack() as stack:
        mesh = await stack.enter_async_context(
            running(Settings(port=0, models=models, environment=environment))
        )
        channel = await stack.enter_async_context(grpc.aio.insecure_channel(mesh.address))
        caller = FairnessCaller(channel, texts)
        for client in (scenario.heavy, scenario.light):
            await caller.ask(client)
            await caller.capacity(client, seconds / 10)  # it is warm and measured then
        capacity = await caller.capacity(scenario.heavy, seconds / 5)
        heavy_rate = OVERLOAD * capacity
        if scenario.heavy.model in (SLOW, PAGES):
            light_rate = SHARE * await caller.capacity(scenario.light, seconds / 10)
        else:
            light_rate = heavy_rate / RATIO
        idle = await ask_openly(
            caller, scenario.light, light_rate, seconds / 2, Tick(progress, bar, 0.1, 0.4)
        )
        found = ScenarioResult(scenario.name, capacity, heavy_rate, light_rate, idle.milliseconds)
        heavy = Heavy(caller, scenario.heavy, heavy_rate)
        loading = asyncio.create_task(heavy.run())
        await asyncio.sleep(seconds / 10)
        before = len(_log(mesh))
        asked = await ask_openly(
            caller, scenario.light, light_rate, seconds, Tick(progress, bar, 0.5, 0.5), heavy
        )
        found.batches = _batches(_log(mesh)[before:], scenario)
        loading.cancel()
        await asyncio.wait([loading])
        found.loaded, found.backlog, found.refused = (
            asked.milliseconds,
            asked.backlog,
            heavy.refused,
        )
    progress.update(bar, completed=1.0)
    return found


def _log(mesh: LocalMesh) -> list[str]:
    return (mesh.logs / "worker-0.log").read_text().splitlines()


def _batches(lines: list[str], scenario: Scenario) -> list[float]:
    """Milliseconds of A's batches."""
    reported = [json.loads(line) for line in lines if line.startswith("{") and line.endswith("}")]
    own = [
        one
        for one in reported
        if one["message"] == "batch" and one["model"] == scenario.heavy.model
    ]
    return [one["seconds"] * 1e3 for one in own if one["tenant"] == scenario.heavy.tenant]


async def measured(names: list[str], seconds: float, console: Console) -> list[ScenarioResult]:
    from tests.parity.checkpoints import SentenceFiles, write_checkpoint
    from tests.parity.vlm_models import slow_reader

    texts = real_texts(256, SEED).texts
    with (
        tempfile.TemporaryDirectory(prefix="fairness-") as root,
        Progress(console=console, transient=True) as progress,
    ):
        slow = write_checkpoint(
            "bert", Path(root) / "slow", positions=256, sentence=SentenceFiles(max_seq_length=256),
            config=SLOW_SIZE
        )  # fmt: skip
        models = f"{HOT}={minilm_directory()}:{LIGHT}={minilm_directory()}:{SLOW}={slow}"
        if "pages" in names:
            slow_reader().save(Path(root) / "pages")
            models += f":{PAGES}={Path(root) / 'pages'}"
        wanted = [scenario for scenario in SCENARIOS if scenario.name in names]
        return [await measure(scenario, models, texts, seconds, progress) for scenario in wanted]


def print_found(found: list[ScenarioResult], console: Console) -> None:
    table = Table(title="B with a heavy A, milliseconds", title_justify="left")
    for heading in (
        "scenario",
        "A got, asked for, B asks for (texts/s)",
        "A's backlog",
        "requests of B",
        "B alone p50",
        "p99",
    ):
        table.add_column(heading, justify="left" if heading == "scenario" else "right")
    for heading in ("B with A p50", "p99", "one batch of A p50", "p99", "bound", ""):
        table.add_column(heading, justify="right")
    for one in found:
        rates = f"{one.capacity:,.0f}  {one.heavy_rate:,.0f}  {one.light_rate:,.1f}"
        numbers = [
            f"{percentile(values, share):.1f}"
            for values in (one.idle, one.loaded, one.batches)
            for share in (0.5, 0.99)
        ]
        verdict = "[green]met[/]" if one.is_met else "[red]not met[/]"
        table.add_row(
            one.name,
            rates,
            str(one.backlog),
            str(len(one.loaded)),
            *numbers,
            f"{one.bound:.1f}",
            verdict,
        )
    console.print(table)
    console.print(
        (
            f"bound: {IDLE_FACTOR} x B's p99 alone + p99 of A's batches; A's backlog: the least "
            "seen, in requests"
        ),
        style="dim",
    )


def to_json(found: list[ScenarioResult]) -> list[dict[str, object]]:
    return [
        asdict(one) | {"batch": one.batch, "bound": one.bound, "met": one.is_met} for one in found
    ]


def main(
    quick: Annotated[
        bool, typer.Option("--quick", help="6 seconds a scenario: a look, not a measurement")
    ] = False,
    seconds: Annotated[
        float,
        typer.Option(min=1, help="Of load, for each scenario; longer where B asks for little"),
    ] = 25.0,
    scenario: Annotated[
        list[str] | None, typer.Option(help="Only this one: model, tenant, slow or pages")
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON with every request; the table goes to stderr")
    ] = False,
) -> None:
    """Measure the effect of a heavy model, a heavy tenant and a slow model on the latency of a
    light one.
    """
    console = Console(stderr=as_json)
    if not console.is_terminal:
        console.width = 180
    names = scenario or [one.name for one in SCENARIOS]
    if unknown := set(names) - {one.name for one in SCENARIOS}:
        raise typer.BadParameter(
            f"{', '.join(sorted(unknown))}: there are model, tenant, slow and pages"
        )
    busy = asyncio.run(busy_cores())
    found = asyncio.run(measured(names, 6.0 if quick else seconds, console))
    console.print(", ".join(f"{key} {value}" for key, value in machine().items()), style="dim")
    print_found(found, console)
    if busy > 0.1:
        console.print(
            f"note: {busy:.2f} cores were busy with something else before", style="yellow"
        )
    if as_json:
        print(json.dumps({"machine": machine(), "busy_cores": busy, "scenarios": to_json(found)}))


if __name__ == "__main__":
    typer.run(main)
