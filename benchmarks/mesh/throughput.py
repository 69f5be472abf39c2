"""Measure the throughput of the mesh on one machine: `python -m benchmarks.mesh.throughput`, or
`make bench`.

The same 512 real texts go through (a) sentence-transformers, (b) the installed peers that are
libraries (OpenVINO, ONNX Runtime, CTranslate2, candle), in process, (c) the worker's forward pass
alone, (d) the whole mesh as `shoal up` lays it out (redis-server, router, workers and one client,
each a process) and (e) the installed peers that are servers (Infinity, vLLM), over HTTP. `make
bench-peers` installs peers. All are started and warmed first; then, round by round and in an order
that turns, each runs alone while the others wait. Ratios are taken within a round, so that the
machine's drift (15 % and more) cancels; the mesh is compared with runs of the forward alone just
before and just after it, on as many processes and threads. Finally, a router alone is measured
(`benchmarks.mesh.router`).

Tokenising is part of what sentence-transformers, candle, the servers and the mesh do; the forward
alone and the other libraries get token ids.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated

import numpy as np
import typer
from rich.console import Console
from rich.progress import Progress
from shoal import AsyncClient

from benchmarks.common.machine import busy_cores, machine
from benchmarks.common.processes import (
    Vectors,
    cpu_seconds,
    listening_port,
    local_model,
    scraped,
)
from benchmarks.common.report import (
    ARRIVAL,
    BATCHES,
    SORTED,
    STEADY,
    IdleQuery,
    Latency,
    Name,
    RunReport,
    SpeedSeries,
    print_report,
    targets,
    to_json,
    usage,
)
from benchmarks.common.texts import MINILM_ID, Mix, real_texts
from benchmarks.mesh import router
from benchmarks.peers.engine import DTYPES as LIBRARY_DTYPES
from benchmarks.peers.engine import PADDED
from benchmarks.peers.engine import SORTED as SORTED_KINDS
from benchmarks.peers.install import PEERS, installed
from benchmarks.peers.servers import serving
from services.local.devices import layout
from services.local.mesh import running
from services.local.settings import Settings, available_cores, known_models

SEED = 7
SERVER_DTYPES = ("bfloat16", "float32")
"""Data types of servers; the second only with everything."""
FORWARD = "forward alone"
STEADY_CALLERS, STEADY_TEXTS = 4, 128
"""Steady traffic: number of callers, and texts in each of their requests, sent one after the other.
"""
ROUTER_CALLERS, ROUTER_SECONDS = (64, 256), 3.0
MIN_COSINE = 0.999
"""Minimum cosine of an engine's vector to sentence-transformers' in float32; below it, the engines
do not compute the same.
"""
METRICS = (("SHOAL_METRICS_ADDRESS", "127.0.0.1:0"),)
"""Settings of a mesh with metrics, each process at a separate port; `ResourceMeter` finds it."""
FORWARD_CPU = "shoal_device_cpu_seconds_total"
COUNTERS = (
    FORWARD_CPU,
    "shoal_device_busy_seconds_total",
    "shoal_device_stalled_seconds_total/starved",
    "shoal_device_stalled_seconds_total/turnaround",
    "shoal_tenant_tokens_total",
)
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
    """The extent of a run.

    Attributes:
        turns: Minimum single texts that each of many callers sends.
        queries: Single queries of each round.
        steady_seconds: Seconds of steady traffic in each round.
        everything: Include rows that no target needs, which take minutes.
    """

    texts: int
    rounds: int
    turns: int
    queries: int
    steady_seconds: float
    everything: bool


@dataclass(frozen=True, slots=True)
class Measure:
    """`run` sends all texts, perhaps several times, and returns its seconds for all texts once;
    `vectors` sends them once and brings the answer. `meter`: of the mesh."""

    series: SpeedSeries
    run: Callable[[], Awaitable[float]]
    vectors: Callable[[], Awaitable[Vectors]]
    meter: ResourceMeter | None = None


@dataclass(frozen=True, slots=True)
class ResourceMeter:
    """The resources that a mesh's processes have used.

    Attributes:
        pids: Processes of a local mesh, by name.
    """

    pids: dict[str, int]

    def cpu(self) -> dict[str, float]:
        """CPU seconds by role; the client is this process."""
        found: dict[str, float] = defaultdict(float)
        for name, pid in {"client": os.getpid(), **self.pids}.items():
            found[name.partition("-")[0]] += cpu_seconds(pid)
        return found

    def workers(self) -> dict[str, float]:
        """Sums of the workers' own counters: seconds, and the tokens that they have computed."""
        scrapes = [
            scraped(listening_port(pid))
            for name, pid in self.pids.items()
            if name.startswith("worker")
        ]
        return {name: sum(scrape[name] for scrape in scrapes) for name in COUNTERS}


@dataclass(frozen=True, slots=True)
class IdleMeasure:
    """`ask` sends one query and waits for its answer."""

    latency: Latency
    ask: Callable[[str], Awaitable[IdleQuery]]


async def in_parts(encode: Encode, texts: list[str], size: int) -> Vectors:
    """All at once, in requests of `size` texts."""
    return np.concatenate(
        await asyncio.gather(
            *(encode(texts[first : first + size]) for first in range(0, len(texts), size))
        )
    )


async def singly(encode: Encode, texts: list[str], at_once: int) -> Vectors:
    """Text by text, `at_once` callers of which each waits for an answer before it sends the
    next.
    """
    vectors: list[Vectors] = [np.empty(0, np.float32)] * len(texts)
    waiting = iter(range(len(texts)))

    async def caller() -> None:
        for index in waiting:
            vectors[index] = await encode([texts[index]])

    await asyncio.gather(*(caller() for _ in range(at_once)))
    return np.concatenate(vectors)


async def timed(way: Callable[[], Awaitable[object]]) -> float:
    begin = time.perf_counter()
    await way()
    return time.perf_counter() - begin


async def steadily(encode: Encode, texts: list[str], seconds: float) -> float:
    """A closed loop of bulk requests; seconds for all texts once, from the first answer to the
    last.
    """
    parts = [texts[first : first + STEADY_TEXTS] for first in range(0, len(texts), STEADY_TEXTS)]
    end = time.perf_counter() + seconds
    answered: list[tuple[float, int]] = []

    async def caller(number: int) -> None:
        while time.perf_counter() < end:
            part = parts[number % len(parts)]
            await encode(part)
            answered.append((time.perf_counter(), len(part)))
            number += 1

    await asyncio.gather(*(caller(number) for number in range(STEADY_CALLERS)))
    return seconds_once(answered, len(texts))


def seconds_once(answered: list[tuple[float, int]], texts: int) -> float:
    """Return the seconds in which a steady stream of answers, of (time, texts), has this many
    texts. The first answer only starts the clock, and the last ones, as many as callers, do not
    count, because fewer and fewer callers are left.
    """
    counted = answered[: max(2, len(answered) - STEADY_CALLERS + 1)]
    brought = sum(count for _, count in counted[1:])
    return (counted[-1][0] - counted[0][0]) * texts / brought


async def timed_singles(encode: Encode, texts: list[str], at_once: int, turns: int) -> float:
    """All texts singly, so often that each caller sends `turns`, because the end, when fewer and
    fewer callers are left, should be a small part; seconds for all of them once."""
    times = -(-turns * at_once // len(texts))
    return await timed(lambda: singly(encode, texts * times, at_once)) / times


def served(
    engine: str, dtype: str, where: str, encode: Encode, mix: Mix, turns: int
) -> Iterator[Measure]:
    """The three ways in which clients send texts to a server."""
    in_32 = f"{-(-len(mix.texts) // 32)} x 32"
    ways: dict[str, Callable[[], Awaitable[Vectors]]] = {
        "1 x all": lambda: encode(mix.texts),
        in_32: lambda: in_parts(encode, mix.texts, 32),
        "64 at once": lambda: singly(encode, mix.texts, 64),
    }
    timers = {shape: partial(timed, way) for shape, way in ways.items()}
    timers["64 at once"] = partial(timed_singles, encode, mix.texts, 64, turns)
    for shape, way in ways.items():
        yield Measure(SpeedSeries(Name(engine, dtype, where, shape)), timers[shape], way)


async def local_measures(
    stack: AsyncExitStack, plan: Plan, layouts: list[tuple[int, int]], libraries: list[str]
) -> list[Measure]:
    """(a), (b) and (c): models without a server."""
    kinds = [("sentence-transformers", "sentence-transformers", *layouts[0])]
    for name in libraries:
        # A target compares OpenVINO with the forward on the mesh's layout, too.
        where = layouts if name == "openvino" else layouts[:1]
        kinds += [(name, PEERS[name].label, *layout) for layout in where]
    kinds += [("forward", FORWARD, *layout) for layout in layouts]
    starting = [
        local_model(kind, processes, threads, plan.texts, SEED)
        for kind, _, processes, threads in kinds
    ]
    models = await asyncio.gather(*(stack.enter_async_context(model) for model in starting))
    measures = []
    for (kind, label, processes, threads), model in zip(kinds, models, strict=True):
        shapes = {"": SORTED if kind in SORTED_KINDS else BATCHES}
        if kind in PADDED:
            shapes[" arrival"] = ARRIVAL
        for order, shape in shapes.items():
            for dtype in LIBRARY_DTYPES[kind]:
                if (
                    order
                    and not plan.everything
                    and (kind, dtype, processes)
                    != (
                        "openvino",
                        "bfloat16",
                        1,
                    )
                ):
                    continue
                way = f"{dtype}{order}"
                series = SpeedSeries(Name(label, dtype, layout_name(processes, threads), shape))
                measures.append(
                    Measure(
                        series, partial(timed, partial(model.run, way)), partial(model.vectors, way)
                    )
                )
    return measures


async def mesh_measures(
    stack: AsyncExitStack, plan: Plan, mix: Mix, workers: int, threads: int
) -> tuple[list[Measure], IdleMeasure, str]:
    """(d): the mesh, its model resident on every worker; and which native kernels these use. Its
    processes serve their metrics, which cost nothing until they are read."""
    settings = Settings(
        port=0,
        workers=workers,
        threads=threads,
        models=known_models([], {}),
        dtype="bfloat16",
        environment=METRICS,
    )
    mesh = await stack.enter_async_context(running(settings))
    client = await stack.enter_async_context(AsyncClient(mesh.address))
    for _ in range(workers):
        await client.models.load(MINILM_ID)

    async def encode(texts: list[str]) -> Vectors:
        return (await client.encode(MINILM_ID, texts)).dequantize()

    async def ask(text: str) -> IdleQuery:
        begin = time.perf_counter()
        answer = await client.encode(MINILM_ID, [text])
        total, reported = time.perf_counter() - begin, answer.timings
        stages = {
            "queue": reported.queue_seconds,
            "prepare": reported.prepare_seconds,
            "wait": reported.wait_seconds,
        }
        stages |= {
            "forward": reported.forward_seconds,
            "finish": reported.finish_seconds,
            "router": reported.total_seconds,
        }
        return IdleQuery(total, stages)

    meter = ResourceMeter(mesh.supervisor.pids)
    where = layout_name(workers, threads)
    measures = [
        replace(one, meter=meter)
        for one in served("mesh", "bfloat16", where, encode, mix, plan.turns)
    ]
    more = {
        "256 at once": (
            partial(timed_singles, encode, mix.texts, 256, plan.turns),
            partial(singly, encode, mix.texts, 256),
        ),
        STEADY: (
            partial(steadily, encode, mix.texts, plan.steady_seconds),
            partial(in_parts, encode, mix.texts, STEADY_TEXTS),
        ),
    }
    measures += [
        Measure(SpeedSeries(Name("mesh", "bfloat16", where, shape)), *ways, meter)
        for shape, ways in more.items()
    ]
    kernels = {worker.kernels for worker in (await client.mesh()).workers}
    return measures, IdleMeasure(Latency("mesh", "bfloat16"), ask), ", ".join(sorted(kernels))


async def server_measures(
    stack: AsyncExitStack, plan: Plan, mix: Mix, name: str, dtype: str
) -> tuple[list[Measure], IdleMeasure]:
    """(e): a peer that is a server."""
    server = await stack.enter_async_context(serving(name, dtype))
    label = PEERS[name].label

    async def ask(text: str) -> IdleQuery:
        begin = time.perf_counter()
        await server.encode([text])
        return IdleQuery(time.perf_counter() - begin)

    measures = list(
        served(label, dtype, layout_name(1, available_cores()), server.encode, mix, plan.turns)
    )
    return measures, IdleMeasure(Latency(label, dtype), ask)


def layout_name(processes: int, threads: int) -> str:
    return f"{processes} x {threads}"


def lowest_cosine(vectors: Vectors, reference: Vectors) -> float:
    norms = np.linalg.norm(vectors, axis=1) * np.linalg.norm(reference, axis=1)
    return float((np.einsum("td,td->t", vectors, reference) / norms).min())


async def run_rounds(
    measures: list[Measure],
    idle: list[IdleMeasure],
    forward: Measure,
    plan: Plan,
    mix: Mix,
    progress: Progress,
) -> None:
    """Warm all, which also compares their vectors with the first's; then measure in turns, the
    mesh between runs of `forward`. The display rests while one runs."""
    task = progress.add_task("warming", total=len(measures) * (plan.rounds + 1))
    reference = await measures[0].vectors()
    for measure in measures:
        measure.series.cosine = lowest_cosine(await measure.vectors(), reference)
        progress.update(task, advance=1, refresh=True)
    for number in range(plan.rounds):
        progress.update(task, description=f"round {number + 1} of {plan.rounds}")
        turn = number * len(measures) // plan.rounds
        before: float | None = None
        for measure in measures[turn:] + measures[:turn]:
            if measure.meter is None:
                measure.series.seconds.append(await measure.run())
                before = None
            else:
                before = await forward.run() if before is None else before
                await run_metered(measure, measure.meter, mix)
                after = await forward.run()
                measure.series.beside.append((before + after) / 2)
                before = after
            progress.update(task, advance=1, refresh=True)
        for one in idle:
            one.latency.rounds.append(await ask_one_by_one(one.ask, plan.queries))


async def run_metered(measure: Measure, meter: ResourceMeter, mix: Mix) -> None:
    """CPU time is read last before the run and first after it: reading the workers' counters costs
    them some.
    """
    counted = meter.workers()
    spent = meter.cpu()
    measure.series.seconds.append(await measure.run())
    spent = {name: seconds - spent[name] for name, seconds in meter.cpu().items()}
    counted = {name: value - counted[name] for name, value in meter.workers().items()}
    measure.series.usage.append(usage(spent, counted, len(mix.texts) / mix.tokens))


async def ask_one_by_one(ask: Callable[[str], Awaitable[IdleQuery]], count: int) -> list[IdleQuery]:
    """The first few are not counted: they find a processor's caches full of the measure before."""
    queries = [await ask(QUERIES[number % len(QUERIES)]) for number in range(count + len(QUERIES))]
    return queries[len(QUERIES) :]


async def measured(
    plan: Plan,
    mix: Mix,
    workers: int,
    threads: int,
    peers: list[str],
    console: Console,
) -> RunReport:
    """The whole run: starts everything, measures, stops everything. `peers`: names of PEERS."""
    notes: list[str] = []
    layouts = list(dict.fromkeys([(1, available_cores()), (workers, threads)]))
    own, alike = layout_name(*layouts[0]), layout_name(workers, threads)
    begin = time.monotonic()
    async with AsyncExitStack() as stack:
        console.print("starting", style="dim")
        libraries = [name for name in peers if not PEERS[name].is_server]
        measures = await local_measures(stack, plan, layouts, libraries)
        forward = next(
            one for one in measures if one.series.name == Name(FORWARD, "bfloat16", alike, BATCHES)
        )
        idle = []
        of_peers = [
            await server_measures(stack, plan, mix, name, dtype)
            for name in peers
            if PEERS[name].is_server
            for dtype in (SERVER_DTYPES if plan.everything else SERVER_DTYPES[:1])
        ]
        stub = await stack.enter_async_context(router.stubbed())
        # Last: nothing may be forked once gRPC has its threads.
        of_mesh, asked, kernels = await mesh_measures(stack, plan, mix, workers, threads)
        for found, query in [(of_mesh, asked), *of_peers]:
            measures += found
            idle.append(query)
        console.print(f"started in {time.monotonic() - begin:.0f} s", style="dim")
        progress = stack.enter_context(
            Progress(console=console, transient=True, auto_refresh=False)
        )
        before = await busy_cores()
        await run_rounds(measures, idle, forward, plan, mix, progress)
        after = await busy_cores()
        routed = [
            await stub.turn(callers, ROUTER_SECONDS)
            for _ in range(plan.rounds)
            for callers in ROUTER_CALLERS
        ]
    if max(before, after) > 0.1:
        notes.append(
            f"{before:.2f} cores were busy before and {after:.2f} after the rounds, with all "
            "engines waiting: not a quiet machine"
        )
    notes += [
        f"{one.series.name}: its vectors differ"
        for one in measures
        if one.series.cosine < MIN_COSINE
    ]
    notes.append(f"the run took {(time.monotonic() - begin) / 60:.1f} minutes")
    series, latencies = [measure.series for measure in measures], [one.latency for one in idle]
    per_core = {
        count: [turn.per_core for turn in routed if turn.callers == count]
        for count in ROUTER_CALLERS
    }
    found_targets = targets(series, latencies, per_core, own, alike)
    here = machine() | {"native kernels": kernels}
    return RunReport(
        here, notes, len(mix.texts), mix.tokens, series, latencies, routed, found_targets
    )


def main(
    quick: Annotated[
        bool, typer.Option("--quick", help="128 texts, 2 rounds, 5 s of steady traffic: a look")
    ] = False,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds; with --quick 2")] = 5,
    steady: Annotated[
        float, typer.Option(min=5.0, help="Seconds of steady traffic in each round; with --quick 5")
    ] = 30.0,
    peers: Annotated[
        str,
        typer.Option(help="Names of peers, with commas between them. Default: all installed"),
    ] = ",".join(installed()),
    everything: Annotated[
        bool,
        typer.Option(
            "--everything",
            help="Also servers in float32, and libraries in arrival order: minutes more",
        ),
    ] = False,
    workers: Annotated[
        int | None, typer.Option(help="Workers of the mesh. Default: as `shoal up`")
    ] = None,
    threads: Annotated[
        int | None, typer.Option(help="Threads of each worker. Default: as `shoal up`")
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON with every round; tables go to stderr")
    ] = False,
) -> None:
    """Measure sentence-transformers, the forward pass alone, the mesh, its peers and a router on
    the same real texts.
    """
    console = Console(stderr=as_json)
    if not console.is_terminal:
        console.width = 160
    plan = (
        Plan(128, 2, 2, 50, 5.0, everything)
        if quick
        else Plan(512, rounds, 4, max(100, -(-300 // rounds)), steady, everything)
    )
    mix = real_texts(plan.texts, SEED)
    console.print(mix.describe(), style="dim")
    names = [name for name in peers.split(",") if name]
    if missing := [name for name in names if name not in installed()]:
        there = ", ".join(installed()) or "none"
        raise typer.BadParameter(
            f"{', '.join(missing)}: not installed (make bench-peers); installed: {there}",
            param_hint="--peers",
        )
    report = asyncio.run(measured(plan, mix, *layout(workers, threads), names, console))
    if left_out := [peer.label for name, peer in PEERS.items() if name not in names]:
        report.notes.append(f"without {', '.join(left_out)} (make bench-peers installs peers)")
    print_report(report, console)
    if as_json:
        print(json.dumps(to_json(report)))


if __name__ == "__main__":
    typer.run(main)
