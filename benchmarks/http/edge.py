"""Measure the cost of the HTTP edge: `python -m benchmarks.http.edge`, or `make bench-edge`. One
run, four targets.

1. Overhead of the edge for a single query: the same text by HTTP through the edge of a whole mesh
   and by gRPC to its router, in turns, one after the other; the same before a stub of a router,
   where nothing else takes time.
2. Singles/s of one edge on one core: the edge is pinned to the first core; a stub of a router
   (`stub_router.py`), which answers at once with a ready-made vector, and the connections
   (`load.py`) share the last one. CPU of each process shows which one waits.
3. 64 single texts at once as OpenAI's clients send them, through edge, router and workers, against
   Infinity's OpenAI endpoint, by the same client (if `make bench-peers` installed it).
4. One request of 512 texts, by HTTP and by gRPC.

All are started and warmed first, and idle while others are measured. Ratios are taken within a
round.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from statistics import median
from typing import Annotated, Any

import grpc
import typer
import uvloop
from rich.console import Console
from rich.table import Table
from shoal import AsyncClient
from shoal.v1 import inference_pb2, inference_pb2_grpc

from benchmarks.common.machine import busy_cores, machine
from benchmarks.common.processes import (
    HttpPool,
    LineProcess,
    OpenAi,
    cpu_seconds,
    listening,
    pin,
)
from benchmarks.common.report import spread
from benchmarks.common.texts import MINILM_ID, Mix, real_texts
from benchmarks.mesh.throughput import QUERIES, Encode, layout_name, singly, timed, timed_singles
from benchmarks.peers.install import installed
from benchmarks.peers.servers import serving
from services.local import mesh
from services.local.devices import layout
from services.local.settings import Settings, free_port, known_models
from services.local.supervision import launch
from services.local.supervision.child import Child
from services.local.supervision.environment import child_environment
from services.local.workplace import workplace

SEED = 7
CONNECTIONS = (1, 32, 64)
WARM_SECONDS = 1.0
STUB_MODEL = "stub/embedder"
PATH = "/v1/embeddings"
AT_ONCE = 64
PATIENCE_SECONDS = 600.0
PATIENT = (("SHOAL_DEADLINE_SECONDS", f"{PATIENCE_SECONDS:g}"),)
"""A machine that others share may be slow."""
ADDED_MS, SINGLES, OVER_INFINITY, OF_GRPC = 1.0, 2000.0, 3.0, 0.95
"""The targets: p50 that the edge adds, singles/s on one core, times Infinity, share of bulk by
gRPC.
"""
Ask = Callable[[str], Awaitable[object]]


@dataclass(frozen=True, slots=True)
class LoopResult:
    """The results of a closed loop. Times in seconds.

    Attributes:
        micros: µs of CPU a request, by process.
    """

    connections: int
    rate: float
    p50: float
    p99: float
    micros: dict[str, float]


@dataclass(slots=True)
class QueryRounds:
    """Seconds of single queries, of all rounds, both ways in turns."""

    http: list[float] = field(default_factory=list)
    grpc: list[float] = field(default_factory=list)

    @property
    def added_p50(self) -> float:
        return quantile(self.http, 0.5) - quantile(self.grpc, 0.5)


@dataclass(slots=True)
class EdgeReport:
    """`rates`: texts/s of each round, by engine and shape."""

    turns: list[LoopResult] = field(default_factory=list)
    stub: QueryRounds = field(default_factory=QueryRounds)
    mesh: QueryRounds = field(default_factory=QueryRounds)
    rates: dict[str, list[float]] = field(default_factory=dict)


def quantile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(len(values) * share))]


class Stubbed:
    """An edge before a stub of a router, each on a dedicated core if the machine has two."""

    def __init__(self, edge: Child, port: int, router: LineProcess, load: LineProcess) -> None:
        self.port = port
        self.router_port: int = router.ready["port"]
        self._load = load
        self._pids = {"edge": edge.pid, "stub router": router.pid, "connections": load.pid}

    async def turn(self, connections: int, seconds: float) -> LoopResult:
        body = json.dumps({"model": STUB_MODEL, "input": QUERIES[0], "encoding_format": "base64"})
        before = {name: cpu_seconds(pid) for name, pid in self._pids.items()}
        done = await self._load.ask(
            {"connections": connections, "seconds": seconds, "path": PATH, "body": body}
        )
        spent = {name: cpu_seconds(pid) - before[name] for name, pid in self._pids.items()}
        micros = {name: value / done["answers"] * 1e6 for name, value in spent.items()}
        return LoopResult(
            connections, done["answers"] / done["seconds"], done["p50"], done["p99"], micros
        )


@asynccontextmanager
async def stubbed() -> AsyncIterator[Stubbed]:
    """The processes are forked by one that has made no gRPC call."""
    cores = sorted(os.sched_getaffinity(0))
    async with AsyncExitStack() as stack:
        place = stack.enter_context(workplace(None))
        port = free_port()
        router = await stack.enter_async_context(
            LineProcess.started("benchmarks.http.stub_router", [])
        )
        reported = {
            "SHOAL_HTTP_ADDRESS": f"127.0.0.1:{port}",
            "SHOAL_ROUTERS": f"127.0.0.1:{router.ready['port']}",
        }
        command = [sys.executable, "-P", launch.__file__, "services.edge"]
        edge = Child(
            "edge",
            command,
            child_environment("edge", os.environ) | reported,
            place.logs / "edge.log",
        )
        await stack.enter_async_context(edge)
        await listening(edge, port)
        load = await stack.enter_async_context(
            LineProcess.started("benchmarks.http.load", [str(port)])
        )
        pin(edge.pid, cores[0])
        pin(router.pid, cores[-1])
        pin(load.pid, cores[-1])
        yield Stubbed(edge, port, router, load)


async def ask_in_turns(queries: QueryRounds, by_http: Ask, by_grpc: Ask, count: int) -> None:
    """`count` queries each way. The first few are not counted: they find a processor's caches full
    of something else.
    """
    warm = len(QUERIES)
    for number in range(count + warm):
        text = QUERIES[number % len(QUERIES)]
        for ask, times in ((by_http, queries.http), (by_grpc, queries.grpc)):
            seconds = await timed(partial(ask, text))
            if number >= warm:
                times.append(seconds)


def open_clients(
    stack: AsyncExitStack, http_port: int, grpc_address: str, model: str
) -> tuple[Ask, Ask]:
    """The same query both ways, by clients that cost little themselves."""
    pool = HttpPool(http_port)
    stack.push_async_callback(pool.close)
    channel = grpc.aio.insecure_channel(grpc_address)
    stack.push_async_callback(channel.close, None)
    stub: Any = inference_pb2_grpc.InferenceServiceStub(channel)

    async def by_http(text: str) -> object:
        body = {"model": model, "input": text, "encoding_format": "base64"}
        return await pool.post(PATH, json.dumps(body).encode())

    async def by_grpc(text: str) -> object:
        return await stub.Encode(
            inference_pb2.EncodeRequest(model=model, items=[inference_pb2.Item(text=text)]),
            timeout=60.0,
        )

    return by_http, by_grpc


async def measured(
    mix: Mix, rounds: int, seconds: float, queries: int, console: Console, *, with_infinity: bool
) -> EdgeReport:
    """The whole run: starts everything, measures, stops everything."""
    report = EdgeReport()
    workers, threads = layout(None, None)
    async with AsyncExitStack() as stack:
        console.print("starting", style="dim")
        stub = await stack.enter_async_context(stubbed())
        peer = (
            await stack.enter_async_context(serving("infinity", "bfloat16"))
            if with_infinity
            else None
        )
        # Last: nothing may be forked once gRPC has its threads.
        settings = Settings(
            port=0,
            workers=workers,
            threads=threads,
            models=known_models([], {}),
            dtype="bfloat16",
            http_port=0,
            environment=PATIENT,
        )
        running = await stack.enter_async_context(mesh.running(settings))
        client = await stack.enter_async_context(
            AsyncClient(running.address, timeout=PATIENCE_SECONDS)
        )
        for _ in range(workers):
            await client.models.load(MINILM_ID)
        port = int(running.http_address.rpartition(":")[2])
        pool = HttpPool(port)
        stack.push_async_callback(pool.close)
        by_http = OpenAi(pool, PATH, MINILM_ID).encode

        async def by_grpc(texts: list[str]) -> Any:
            return (await client.encode(MINILM_ID, texts)).dequantize()

        engines: dict[str, Encode] = {"edge": by_http, "gRPC": by_grpc}
        if peer is not None:
            engines["Infinity"] = peer.encode
        console.print(f"mesh of {layout_name(workers, threads)}; warming", style="dim")
        for encode in engines.values():
            await singly(encode, mix.texts[:AT_ONCE], AT_ONCE)
            await encode(mix.texts)
        await stub.turn(max(CONNECTIONS), WARM_SECONDS)
        of_stub = open_clients(stack, stub.port, f"127.0.0.1:{stub.router_port}", STUB_MODEL)
        of_mesh = open_clients(stack, port, running.address, MINILM_ID)
        for number in range(rounds):
            console.print(f"round {number + 1} of {rounds}", style="dim")
            report.turns += [await stub.turn(connections, seconds) for connections in CONNECTIONS]
            await ask_in_turns(report.stub, *of_stub, queries)
            await ask_in_turns(report.mesh, *of_mesh, queries)
            names = list(engines)
            turn = number % len(names)
            for name in names[turn:] + names[:turn]:
                singles = await timed_singles(engines[name], mix.texts, AT_ONCE, 4)
                bulk = min([await timed(partial(engines[name], mix.texts)) for _ in range(2)])
                for shape, took in (("64 at once", singles), ("one request", bulk)):
                    report.rates.setdefault(f"{name}, {shape}", []).append(len(mix.texts) / took)
    return report


def ratios(report: EdgeReport, one: str, other: str) -> list[float]:
    return [
        first / second
        for first, second in zip(
            report.rates.get(one, []), report.rates.get(other, []), strict=False
        )
    ]


def show(report: EdgeReport, mix: Mix, console: Console) -> None:
    counts = list(dict.fromkeys(turn.connections for turn in report.turns))
    columns = [[turn for turn in report.turns if turn.connections == count] for count in counts]
    title = (
        f"An edge on one core before a stub of a router: median of {len(columns[0])} rounds "
        "(lowest-highest)"
    )
    table = Table(
        "", *(f"{count} connections" for count in counts), title=title, title_justify="left"
    )
    table.add_row(
        "[bold]singles/s", *(spread([turn.rate for turn in column]) for column in columns)
    )
    for name in report.turns[0].micros:
        table.add_row(
            f"{name}: µs of CPU a request",
            *(spread([turn.micros[name] for turn in column]) for column in columns),
        )
    table.add_row(
        "p50, ms", *(f"{median(turn.p50 for turn in column) * 1e3:.2f}" for column in columns)
    )
    table.add_row(
        "p99, ms", *(f"{median(turn.p99 for turn in column) * 1e3:.2f}" for column in columns)
    )
    console.print(table)
    table = Table("one query at a time, ms", "p50", "p99", title_justify="left")
    for where, queries in (("stub", report.stub), ("mesh", report.mesh)):
        for way, values in (("HTTP", queries.http), ("gRPC", queries.grpc)):
            cells = (f"{quantile(values, share) * 1e3:.2f}" for share in (0.5, 0.99))
            table.add_row(f"{where}, {way} ({len(values)})", *cells)
    console.print(table)
    table = Table(f"{len(mix.texts)} texts", "texts/s", title_justify="left")
    for name, rates in report.rates.items():
        table.add_row(name, spread(rates))
    console.print(table)
    table = Table("target", "measured", "", title_justify="left")
    for what, found, is_met in targets(report):
        table.add_row(
            what, found, "" if is_met is None else "met" if is_met else "[bold red]missed"
        )
    console.print(table)


def targets(report: EdgeReport) -> list[tuple[str, str, bool | None]]:
    """Return each target, its measurement, and if it is met (None: it was not measured)."""
    added = report.mesh.added_p50 * 1e3
    tail = (quantile(report.mesh.http, 0.99) - quantile(report.mesh.grpc, 0.99)) * 1e3
    rate = median(turn.rate for turn in report.turns if turn.connections == AT_ONCE)
    over = ratios(report, "edge, 64 at once", "Infinity, 64 at once")
    share = ratios(report, "edge, one request", "gRPC, one request")
    return [
        (
            f"a query: the edge adds at most {ADDED_MS:g} ms p50",
            f"{added:.2f} ms p50, {tail:.2f} ms p99",
            added <= ADDED_MS,
        ),
        (f"an edge on one core: {SINGLES:,.0f} singles/s", f"{rate:,.0f}", rate >= SINGLES),
        (
            f"64 OpenAI singles at once: {OVER_INFINITY:g} x Infinity",
            f"{median(over):.2f} x" if over else "Infinity is not installed: make bench-peers",
            median(over) >= OVER_INFINITY if over else None,
        ),
        (
            f"a request of 512: {OF_GRPC:g} x gRPC",
            f"{median(share):.3f} x",
            median(share) >= OF_GRPC,
        ),
    ]


def main(
    quick: Annotated[bool, typer.Option("--quick", help="2 rounds of less: a look")] = False,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds; with --quick 2")] = 5,
    skip_infinity: Annotated[
        bool, typer.Option("--skip-infinity", help="Leave Infinity out even if it is installed")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON with every round; tables go to stderr")
    ] = False,
) -> None:
    """Measure the edge's overhead for a query, its throughput on one core, and the mesh through it
    against Infinity.
    """
    console = Console(stderr=as_json)
    if not console.is_terminal:
        console.width = 160
    mix = real_texts(512, SEED)
    with_infinity = "infinity" in installed() and not skip_infinity
    begin = time.monotonic()
    rounds, seconds, queries = (2, 2.0, 60) if quick else (rounds, 5.0, 200)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        busy = runner.run(busy_cores())
        report = runner.run(
            measured(mix, rounds, seconds, queries, console, with_infinity=with_infinity)
        )
    console.print(", ".join(f"{key} {value}" for key, value in machine().items()), style="dim")
    show(report, mix, console)
    console.print(f"the run took {(time.monotonic() - begin) / 60:.1f} minutes", style="dim")
    if len(os.sched_getaffinity(0)) < 2:
        console.print(
            "note: there is one core, which the edge shares with all others", style="yellow"
        )
    if busy > 0.1:
        console.print(
            f"note: {busy:.2f} cores were busy with something else before", style="yellow"
        )
    if as_json:
        found = [
            {"target": what, "measured": text, "met": is_met}
            for what, text, is_met in targets(report)
        ]
        print(
            json.dumps(
                {"machine": machine(), "busy_cores": busy, "targets": found, **asdict(report)}
            )
        )


if __name__ == "__main__":
    typer.run(main)
