"""How fast is the mesh? One run on one machine: `python -m benchmarks.mesh`, or `make bench`.

The same 512 real texts go through (a) sentence-transformers, (b) the worker's forward pass alone, (c) the whole mesh as `shoal up`
lays it out (redis-server, router, workers and one client, each a process) and (d) an Infinity server, if
benchmarks/setup_infinity.sh installed it. All are started and warmed first; then, round by round and in an order that turns, each
runs alone while the others wait. Ratios are taken within a round, so that the machine's drift (15 % and more) cancels.
"""

from __future__ import annotations

import asyncio
import json
import os
import platform
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from rich.console import Console
from rich.progress import Progress
from shoal import AsyncClient

from benchmarks.processes import INFINITY_PYTHON, Vectors, infinity, local_model
from benchmarks.report import Latency, Name, Query, Report, Series, print_report, targets, to_json
from benchmarks.texts import MINILM_ID, Mix, real_texts
from services.local.devices import layout
from services.local.mesh import running
from services.local.settings import Settings, available_cores, known_models

SEED = 7
DTYPES = ("float32", "bfloat16")
Encode = Callable[[list[str]], Awaitable[Vectors]]
QUERIES = (
    "how to sort a list",
    "read a file line by line",
    "what is a generator expression",
    "difference between a list and a tuple",
    "catch several exceptions at once",
    "is python pass by reference",
    "async context manager",
)


@dataclass(frozen=True, slots=True)
class Plan:
    """How much to measure. `queries`: single queries of each round."""

    texts: int
    rounds: int
    queries: int


@dataclass(frozen=True, slots=True)
class Measure:
    """`run` sends all texts once; `vectors` does so too and brings the answer."""

    series: Series
    run: Callable[[], Awaitable[object]]
    vectors: Callable[[], Awaitable[Vectors]]


@dataclass(frozen=True, slots=True)
class IdleMeasure:
    """`ask` sends one query and waits for its answer."""

    latency: Latency
    ask: Callable[[str], Awaitable[Query]]


async def in_parts(encode: Encode, texts: list[str], size: int) -> Vectors:
    """All at once, in requests of `size` texts."""
    return np.concatenate(await asyncio.gather(*(encode(texts[first : first + size]) for first in range(0, len(texts), size))))


async def singly(encode: Encode, texts: list[str], at_once: int) -> Vectors:
    """Text by text, `at_once` callers of which each waits for an answer before it sends the next."""
    vectors: list[Vectors] = [np.empty(0, np.float32)] * len(texts)
    waiting = iter(range(len(texts)))

    async def caller() -> None:
        for index in waiting:
            vectors[index] = await encode([texts[index]])

    await asyncio.gather(*(caller() for _ in range(at_once)))
    return np.concatenate(vectors)


def served(engine: str, dtype: str, where: str, encode: Encode, mix: Mix) -> Iterator[Measure]:
    """The three ways in which clients send texts to a server."""
    ways: dict[str, Callable[[], Awaitable[Vectors]]] = {
        "1 x all": lambda: encode(mix.texts),
        f"{-(-len(mix.texts) // 32)} x 32": lambda: in_parts(encode, mix.texts, 32),
        "64 at once": lambda: singly(encode, mix.texts, 64),
    }
    for shape, way in ways.items():
        yield Measure(Series(Name(engine, dtype, where, shape)), way, way)


async def local_measures(stack: AsyncExitStack, plan: Plan, layouts: list[tuple[int, int]]) -> list[Measure]:
    """(a) and (b): models without a server."""
    cores = available_cores()
    kinds = [("sentence-transformers", "sentence-transformers", 1, cores)]
    kinds += [("forward", "forward alone", processes, threads) for processes, threads in layouts]
    measures = []
    for kind, label, processes, threads in kinds:
        model = await stack.enter_async_context(local_model(kind, processes, threads, plan.texts, SEED))
        for dtype in DTYPES:
            series = Series(Name(label, dtype, layout_name(processes, threads), "batch 32"))
            measures.append(Measure(series, partial(model.run, dtype), partial(model.vectors, dtype)))
    return measures


async def mesh_measures(stack: AsyncExitStack, mix: Mix, workers: int, threads: int) -> tuple[list[Measure], IdleMeasure]:
    """(c): the mesh, its model resident on every worker."""
    settings = Settings(port=0, workers=workers, threads=threads, models=known_models([], {}), dtype="bfloat16")
    mesh = await stack.enter_async_context(running(settings))
    client = await stack.enter_async_context(AsyncClient(mesh.address))
    for _ in range(workers):
        await client.models.load(MINILM_ID)

    async def encode(texts: list[str]) -> Vectors:
        return (await client.encode(MINILM_ID, texts)).dequantize()

    async def ask(text: str) -> Query:
        begin = time.perf_counter()
        answer = await client.encode(MINILM_ID, [text])
        total, told = time.perf_counter() - begin, answer.timings
        stages = {"queue": told.queue_seconds, "prepare": told.prepare_seconds, "wait": told.wait_seconds}
        stages |= {"forward": told.forward_seconds, "finish": told.finish_seconds, "router": told.total_seconds}
        return Query(total, stages)

    measures = list(served("mesh", "bfloat16", layout_name(workers, threads), encode, mix))
    return measures, IdleMeasure(Latency("mesh", "bfloat16"), ask)


async def infinity_measures(stack: AsyncExitStack, mix: Mix, dtype: str) -> tuple[list[Measure], IdleMeasure]:
    """(d): the peer."""
    server = await stack.enter_async_context(infinity(dtype))

    async def ask(text: str) -> Query:
        begin = time.perf_counter()
        await server.encode([text])
        return Query(time.perf_counter() - begin)

    measures = list(served("Infinity", dtype, layout_name(1, available_cores()), server.encode, mix))
    return measures, IdleMeasure(Latency("Infinity", dtype), ask)


def layout_name(processes: int, threads: int) -> str:
    return f"{processes} x {threads}"


def lowest_cosine(vectors: Vectors, reference: Vectors) -> float:
    norms = np.linalg.norm(vectors, axis=1) * np.linalg.norm(reference, axis=1)
    return float((np.einsum("td,td->t", vectors, reference) / norms).min())


async def run_rounds(measures: list[Measure], idle: list[IdleMeasure], plan: Plan, progress: Progress) -> None:
    """Warms all, which also compares their vectors with the first's; then measures in turns. The display rests while one runs."""
    task = progress.add_task("warming", total=len(measures) * (plan.rounds + 1))
    reference = await measures[0].vectors()
    for measure in measures:
        measure.series.cosine = lowest_cosine(await measure.vectors(), reference)
        progress.update(task, advance=1, refresh=True)
    for number in range(plan.rounds):
        progress.update(task, description=f"round {number + 1} of {plan.rounds}")
        turn = number * len(measures) // plan.rounds
        for measure in measures[turn:] + measures[:turn]:
            begin = time.perf_counter()
            await measure.run()
            measure.series.seconds.append(time.perf_counter() - begin)
            progress.update(task, advance=1, refresh=True)
        for one in idle:
            one.latency.rounds.append(await ask_one_by_one(one.ask, plan.queries))


async def ask_one_by_one(ask: Callable[[str], Awaitable[Query]], count: int) -> list[Query]:
    """The first few are not counted: they find a processor's caches full of the measure before."""
    queries = [await ask(QUERIES[number % len(QUERIES)]) for number in range(count + len(QUERIES))]
    return queries[len(QUERIES) :]


async def busy_cores(seconds: float = 2.0) -> float:
    """How many cores were busy while this process waited: other work on the machine, or an engine that does not rest."""

    def busy() -> int:
        user, nice, system, _, _, interrupt, soft_interrupt, steal = (
            int(part) for part in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]
        )
        return user + nice + system + interrupt + soft_interrupt + steal

    before = busy()
    await asyncio.sleep(seconds)
    return (busy() - before) / os.sysconf("SC_CLK_TCK") / seconds


def machine() -> dict[str, str]:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.partition(": ")[2] for line in lines if line.startswith("model name")]
    flags = next((line for line in lines if line.startswith("flags")), "").split()
    has = [flag for flag in ("avx512_bf16", "amx_bf16") if flag in flags]
    packages = {name: version(name) for name in ("torch", "sentence-transformers", "transformers", "grpcio")}
    here = {
        "cpu": names[0] if names else platform.machine(),
        "cores": str(available_cores()),
        "bfloat16": " ".join(has) or "emulated",
    }
    return here | {"python": platform.python_version()} | packages


async def measured(plan: Plan, mix: Mix, workers: int, threads: int, peers: list[str], console: Console) -> Report:
    """The whole run: starts everything, measures, stops everything."""
    notes: list[str] = []
    layouts = list(dict.fromkeys([(1, available_cores()), (workers, threads)]))
    async with AsyncExitStack() as stack:
        console.print("starting", style="dim")
        measures = await local_measures(stack, plan, layouts)
        idle = []
        of_peers = [await infinity_measures(stack, mix, dtype) for dtype in peers]
        of_mesh = await mesh_measures(stack, mix, workers, threads)  # Last: nothing may be forked once gRPC has its threads.
        for found, query in [of_mesh, *of_peers]:
            measures += found
            idle.append(query)
        progress = stack.enter_context(Progress(console=console, transient=True, auto_refresh=False))
        before = await busy_cores()
        await run_rounds(measures, idle, plan, progress)
        after = await busy_cores()
    if max(before, after) > 0.1:
        notes.append(
            f"{before:.2f} cores were busy before and {after:.2f} after the rounds, with all engines waiting: not a quiet machine"
        )
    series, latencies = [measure.series for measure in measures], [one.latency for one in idle]
    found_targets = targets(series, latencies, layout_name(*layouts[0]), layout_name(workers, threads))
    return Report(machine(), notes, len(mix.texts), mix.tokens, series, latencies, found_targets)


def main(
    quick: Annotated[bool, typer.Option("--quick", help="128 texts, 2 rounds, 100 queries: a look, not a measurement")] = False,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds; with --quick 2")] = 5,
    skip_infinity: Annotated[bool, typer.Option("--skip-infinity", help="Leave Infinity out even if it is installed")] = False,
    workers: Annotated[int | None, typer.Option(help="Workers of the mesh. Default: as `shoal up`")] = None,
    threads: Annotated[int | None, typer.Option(help="Threads of each worker. Default: as `shoal up`")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON with every round; tables go to stderr")] = False,
) -> None:
    """Measure sentence-transformers, the forward pass alone, the mesh and Infinity on the same real texts."""
    console = Console(stderr=as_json)
    if not console.is_terminal:
        console.width = 160
    plan = Plan(128, 2, 50) if quick else Plan(512, rounds, max(100, -(-300 // rounds)))
    mix = real_texts(plan.texts, SEED)
    console.print(mix.describe(), style="dim")
    peers = [] if skip_infinity or not INFINITY_PYTHON.exists() else list(DTYPES)
    report = asyncio.run(measured(plan, mix, *layout(workers, threads), peers, console))
    if not skip_infinity and not peers:
        report.notes.append("Infinity is not installed: benchmarks/setup_infinity.sh")
    print_report(report, console)
    if as_json:
        print(json.dumps(to_json(report)))


if __name__ == "__main__":
    typer.run(main)
