"""Measure a router alone: `python -m benchmarks.mesh.router`, or `make bench-router`.

A real router and a real Redis, as `shoal up` starts them, serve single texts between separate
processes that cost nothing else: a stub of a worker that answers each text at once with a
ready-made vector (`stub_worker.py`), and clients of many callers at once (`load.py`) with texts
that share a stream, or with --unary are a gRPC call each. All share this machine's cores, so
singles/s is the throughput of all of them together; the capacity of the router with a dedicated
core is 1 s ÷ its CPU time of a request, user and system time of all its threads, from /proc.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict
from statistics import median
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from benchmarks.common.machine import busy_cores, machine
from benchmarks.common.processes import LineProcess, cpu_seconds, listening
from benchmarks.common.report import ClosedLoop, spread
from benchmarks.mesh.stub_worker import MODEL
from services.local.redis_server import find_redis_server, redis_arguments
from services.local.settings import free_port
from services.local.supervision import launch
from services.local.supervision.child import Child
from services.local.supervision.environment import child_environment
from services.local.workplace import workplace

WARM_SECONDS = 1.0


class StubMesh:
    """The processes of `stubbed`, by name: redis, router, stub worker, and clients."""

    def __init__(
        self, pids: dict[str, int], worker: LineProcess, clients: list[LineProcess]
    ) -> None:
        self._pids, self._worker, self._clients = pids, worker, clients

    async def turn(self, callers: int, seconds: float) -> ClosedLoop:
        """Run one closed loop of this many callers in all."""
        shares = [
            callers // len(self._clients) + (number < callers % len(self._clients))
            for number in range(len(self._clients))
        ]
        pulled = await self._worker.ask({})
        before = {name: cpu_seconds(pid) for name, pid in self._pids.items()}
        asking = zip(self._clients, shares, strict=True)
        done = await asyncio.gather(
            *(client.ask({"callers": share, "seconds": seconds}) for client, share in asking)
        )
        spent = {name: cpu_seconds(pid) - before[name] for name, pid in self._pids.items()}
        now = await self._worker.ask({})
        answers = sum(one["answers"] for one in done)
        jobs_a_pull = (now["jobs"] - pulled["jobs"]) / max(1, now["pulls"] - pulled["pulls"])
        micros = {name: value / answers * 1e6 for name, value in spent.items()}
        return ClosedLoop(
            callers, answers, max(one["seconds"] for one in done), micros, jobs_a_pull
        )


@asynccontextmanager
async def stubbed(clients: int = 1, *, unary: bool = False) -> AsyncIterator[StubMesh]:
    """Start a router, its Redis, a stub worker and `clients` clients, and stop them. This process
    itself makes no gRPC call.
    """
    async with AsyncExitStack() as stack:
        place = stack.enter_context(workplace(None))
        port = free_port()
        address = f"127.0.0.1:{port}"
        redis = Child(
            "redis",
            redis_arguments(find_redis_server(), place.redis, is_durable=True),
            child_environment("redis", os.environ),
            place.logs / "redis.log",
        )
        reported = {
            "SHOAL_ADDRESS": address,
            "SHOAL_REDIS_URL": f"unix://{place.redis / 'redis.sock'}",
            "PYTHONUNBUFFERED": "1",
        }
        router = Child(
            "router",
            [sys.executable, "-P", launch.__file__, "services.router"],
            child_environment("router", os.environ) | reported,
            place.logs / "router.log",
        )
        for child in (redis, router):
            await stack.enter_async_context(child)
        await listening(router, port)
        worker = await stack.enter_async_context(
            LineProcess.started("benchmarks.mesh.stub_worker", [address])
        )
        loads = [
            LineProcess.started("benchmarks.mesh.load", [address, MODEL, *["--unary"] * unary])
            for _ in range(clients)
        ]
        asking = [await stack.enter_async_context(load) for load in loads]
        pids = {"router": router.pid, "redis": redis.pid, "stub worker": worker.pid}
        pids |= {f"client {number}": client.pid for number, client in enumerate(asking)}
        yield StubMesh(pids, worker, asking)


async def measure(
    callers: list[int], seconds: float, rounds: int, clients: int, unary: bool
) -> list[ClosedLoop]:
    """`rounds` turns of each number of callers, one number after the other in each round."""
    async with stubbed(clients, unary=unary) as mesh:
        await mesh.turn(max(callers), WARM_SECONDS)
        return [await mesh.turn(count, seconds) for _ in range(rounds) for count in callers]


def show(turns: list[ClosedLoop], console: Console) -> None:
    counts = list(dict.fromkeys(turn.callers for turn in turns))
    columns = [[turn for turn in turns if turn.callers == count] for count in counts]
    title = f"A router with a stub worker: median of {len(columns[0])} rounds (lowest-highest)"
    table = Table("", *(f"{count} callers" for count in counts), title=title, title_justify="left")
    table.add_row(
        "singles/s, all processes on these cores",
        *(spread([turn.rate for turn in column]) for column in columns),
    )
    for name in turns[0].micros:
        table.add_row(
            f"{name}: µs of CPU a request",
            *(spread([turn.micros[name] for turn in column]) for column in columns),
        )
    table.add_row(
        "[bold]singles/s per core of router",
        *(spread([turn.per_core for turn in column]) for column in columns),
    )
    table.add_row(
        "jobs a pull", *(f"{median(turn.jobs_a_pull for turn in column):.1f}" for column in columns)
    )
    console.print(table)


def main(
    callers: Annotated[
        list[int], typer.Option(help="Callers at once; may be given several times.")
    ] = [64, 256],  # noqa: B006
    seconds: Annotated[float, typer.Option(min=0.5, help="Of each turn")] = 5.0,
    rounds: Annotated[int, typer.Option(min=1, help="Turns of each number of callers")] = 3,
    clients: Annotated[
        int, typer.Option(min=1, help="Client processes, which share the callers")
    ] = 1,
    unary: Annotated[
        bool, typer.Option(help="A gRPC call for each text, in place of a stream")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON; the table goes to stderr")
    ] = False,
) -> None:
    """Measure how many single texts a router hands on, and what one costs it."""
    console = Console(stderr=as_json)
    busy = asyncio.run(busy_cores())
    turns = asyncio.run(measure(callers, seconds, rounds, clients, unary))
    console.print(", ".join(f"{key} {value}" for key, value in machine().items()), style="dim")
    show(turns, console)
    if busy > 0.1:
        console.print(
            f"note: {busy:.2f} cores were busy with something else before", style="yellow"
        )
    if as_json:
        print(
            json.dumps(
                {
                    "machine": machine(),
                    "busy_cores": busy,
                    "turns": [asdict(turn) for turn in turns],
                }
            )
        )


if __name__ == "__main__":
    typer.run(main)
