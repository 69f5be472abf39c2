"""Measure the cost of a request: µs of CPU in the client, the router, Redis and the worker. `make
bench-cost`.

One mesh of one single-threaded worker, in the layout of `shoal up`, serves MiniLM to this process,
which sends single short queries one after another and from many callers at once. CPU time is read
from /proc before and after. With `--profile`, py-spy samples router and worker during the run, and
their shares of samples divide their CPU time by stage: the innermost frame of a sample that belongs
to a package of Shoal or to a library that is named here. The forward pass is a stage of the worker;
the rest is the mesh's cost, which is reported separately. Without a profile the worker's counter
gives the CPU time of forward passes.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated, Final

import typer
from rich.console import Console
from rich.table import Table
from shoal import AsyncClient

from benchmarks.common.machine import machine
from benchmarks.common.processes import cpu_seconds
from benchmarks.common.texts import MINILM_ID
from benchmarks.mesh.throughput import FORWARD_CPU, METRICS, QUERIES, ResourceMeter
from services.local.mesh import running
from services.local.settings import Settings, known_models

FORWARD: Final = "forward"
_SAMPLES_A_SECOND: Final = 250

# Stages by the file of a frame, asked in this order from the innermost frame outwards.
_STAGES: Final[tuple[tuple[str, str], ...]] = (
    (
        r"/libs/(?:kernels|models/layers|models/text/heads|kinds/.*/head"
        r"|models/runtime/(?:backbone|packed_model)|models/interface/packed)",
        FORWARD,
    ),
    (r"/libs/(?:models/text/(?:processing|tokenising)|kinds/)", "tokenising"),
    (r"/libs/telemetry/|/opentelemetry/|/prometheus_client/", "telemetry"),
    (r"/(?:services/(?:router|worker)/\w+)", ""),
    (r"/(libs/\w+)", ""),
    (r"/redis/|/hiredis/", "redis client"),
    (r"/grpc/", "grpc"),
    (r"/google/protobuf/", "protobuf"),
    (r"/(?:asyncio|uvloop)/|/asyncio\.py", "event loop"),
)


@dataclass(slots=True)
class SendingCost:
    """The cost of one way of sending requests.

    Attributes:
        micros: µs of CPU a request, by process.
        stages: The same of profiled processes, by stage.
    """

    callers: int
    requests: int
    seconds: float
    micros: dict[str, float]
    stages: dict[str, dict[str, float]] = field(default_factory=dict)


def find_stage(stack: str) -> str:
    """The stage of a sample: frames from the outermost inwards, separated by semicolons."""
    for frame in reversed(stack.split(";")):
        for pattern, name in _STAGES:
            if found := re.search(pattern, frame):
                return name or found.group(found.lastindex or 0).strip("/")
    return "other"


class Profiler:
    """A profiler (py-spy) of one process, between `start` and `stop`."""

    def __init__(self, pid: int, file: Path) -> None:
        self._pid, self._file = pid, file
        self._process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        arguments = [
            "record",
            "--pid",
            str(self._pid),
            "--format",
            "raw",
            "--full-filenames",
            "--gil",
            "--duration",
            "600",
        ]
        self._process = await asyncio.create_subprocess_exec(
            *(
                str(Path(sys.executable).with_name("py-spy")),
                *arguments,
                "--rate",
                str(_SAMPLES_A_SECOND),
                "--output",
                str(self._file),
            ),
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
        )

    async def stop(self) -> Counter[str]:
        """Samples by stage."""
        assert self._process is not None
        self._process.send_signal(signal.SIGINT)
        await self._process.wait()
        samples: Counter[str] = Counter()
        for line in self._file.read_text().splitlines():
            stack, _, count = line.rpartition(" ")
            samples[find_stage(stack)] += int(count)
        return samples


@asynccontextmanager
async def profiled(pids: Mapping[str, int], wanted: bool) -> AsyncIterator[dict[str, Counter[str]]]:
    """Yield a mapping that has the samples of each process once the context ends."""
    samples: dict[str, Counter[str]] = {}
    if not wanted:
        yield samples
        return
    with tempfile.TemporaryDirectory(prefix="cost-") as folder:
        running_ = {
            name: Profiler(pid, Path(folder) / name)
            for name, pid in pids.items()
            if name.startswith(("router", "worker"))
        }
        for profiler in running_.values():
            await profiler.start()
        await asyncio.sleep(1.0)
        yield samples
        for name, profiler in running_.items():
            samples[name] = await profiler.stop()


async def ask(client: AsyncClient, callers: int, requests: int) -> None:
    """Send this many requests in all, from callers that each wait for an answer before they send
    the next.
    """
    waiting = iter(range(requests))

    async def caller() -> None:
        for number in waiting:
            await client.encode(MINILM_ID, [QUERIES[number % len(QUERIES)]])

    await asyncio.gather(*(caller() for _ in range(callers)))


async def measure(callers: list[int], requests: int, *, profile: bool) -> list[SendingCost]:
    settings = Settings(port=0, workers=1, threads=1, models=known_models([], {}), dtype="bfloat16")
    settings = replace(settings, environment=METRICS)
    costs = []
    async with running(settings) as mesh, AsyncClient(mesh.address) as client:
        await client.models.load(MINILM_ID)
        pids = {"client": os.getpid(), **mesh.supervisor.pids}
        meter = ResourceMeter(mesh.supervisor.pids)
        await ask(client, 8, 200)
        for count in callers:
            await ask(client, count, 2 * count)
            async with profiled(pids, profile) as samples:
                forward = meter.workers()[FORWARD_CPU]
                before, begin = (
                    {name: cpu_seconds(pid) for name, pid in pids.items()},
                    time.perf_counter(),
                )
                await ask(client, count, requests)
                seconds = time.perf_counter() - begin
                micros = {
                    name: (cpu_seconds(pid) - before[name]) / requests * 1e6
                    for name, pid in pids.items()
                }
                forward = (meter.workers()[FORWARD_CPU] - forward) / requests * 1e6
            micros["worker beyond the forward"] = micros["worker-0"] - forward
            costs.append(
                SendingCost(
                    count,
                    requests,
                    seconds,
                    micros,
                    {name: _shares(micros[name], found) for name, found in samples.items()},
                )
            )
    return costs


def _shares(micros: float, samples: Counter[str]) -> dict[str, float]:
    whole = sum(samples.values()) or 1
    return {stage: micros * count / whole for stage, count in samples.most_common()}


def show(costs: list[SendingCost], console: Console) -> None:
    table = Table(
        "process",
        *(f"{cost.callers} at once" if cost.callers > 1 else "one after another" for cost in costs),
    )
    for name in costs[0].micros:
        table.add_row(name, *(f"{cost.micros[name]:,.0f}" for cost in costs))
    table.add_row("requests/s", *(f"{cost.requests / cost.seconds:,.0f}" for cost in costs))
    console.print("[bold]µs of CPU a request")
    console.print(table)
    for process in costs[0].stages:
        stages = Table(
            "stage",
            *(
                f"{cost.callers} at once" if cost.callers > 1 else "one after another"
                for cost in costs
            ),
        )
        names = sorted(
            {name for cost in costs for name in cost.stages[process]},
            key=lambda name: -costs[-1].stages[process].get(name, 0),
        )
        for name in names:
            stages.add_row(name, *(f"{cost.stages[process].get(name, 0):,.0f}" for cost in costs))
        own = [
            sum(value for name, value in cost.stages[process].items() if name != FORWARD)
            for cost in costs
        ]
        stages.add_row("[bold]all but the forward pass", *(f"[bold]{value:,.0f}" for value in own))
        console.print(f"[bold]{process}, by stage (the profiler itself included)")
        console.print(stages)


def main(
    callers: Annotated[
        list[int], typer.Option(help="Callers at once; may be given several times.")
    ] = [1, 64],  # noqa: B006
    requests: Annotated[int, typer.Option(help="Requests for each number of callers.")] = 2000,
    profile: Annotated[
        bool, typer.Option("--profile", help="Divide router and worker by stage, with py-spy.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """Measure the cost of a single request in CPU time, by process and by stage."""
    costs = asyncio.run(measure(callers, requests, profile=profile))
    if as_json:
        print(json.dumps({"machine": machine(), "costs": [asdict(cost) for cost in costs]}))
    else:
        show(costs, Console())


if __name__ == "__main__":
    typer.run(main)
