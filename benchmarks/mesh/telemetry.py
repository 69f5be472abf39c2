"""Measure the cost of traces and scrapes: `python -m benchmarks.mesh.telemetry`, or `make
bench-telemetry`.

Three meshes of one router and one single-threaded worker, each a process, run at the same time and
receive requests in turns, so that disturbances of the machine affect all of them: without a
collector, with one request in twenty traced (as `k8s/components/otel` has it), and with all of them
traced. The collector takes spans and forgets them, in a separate process on the same cores. Metrics
are kept in all three, because they cannot be switched off; the duration of a scrape is reported.

The model is tiny (two layers of width 64) and a request one text of a few words, so that nearly all
of the time is the mesh's overhead: a real model makes each share smaller.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Annotated, Final
from urllib.request import urlopen

import grpc
import typer
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from shoal import AsyncClient

from benchmarks.common.machine import busy_cores, machine
from services.local.settings import free_port

MODEL: Final = "random/tiny"
AT_ONCE: Final = 32
ALWAYS: Final = {"OTEL_TRACES_SAMPLER": "parentbased_always_on"}
SELDOM: Final = {
    "OTEL_TRACES_SAMPLER": "parentbased_traceidratio",
    "OTEL_TRACES_SAMPLER_ARG": "0.05",
}
VARIANTS: Final[Mapping[str, Mapping[str, str] | None]] = {
    "no collector": None,
    "1 in 20 traced": SELDOM,
    "all traced": ALWAYS,
}


@dataclass(slots=True)
class TelemetryRounds:
    """Results of each round: requests/s of the mesh, and its share of the mesh without a collector;
    seconds of each scrape.
    """

    rates: dict[str, list[float]] = field(default_factory=lambda: {name: [] for name in VARIANTS})
    scrapes: dict[str, list[float]] = field(
        default_factory=lambda: {"router-0": [], "worker-0": []}
    )

    def shares(self, name: str) -> list[float]:
        return [
            rate / base
            for rate, base in zip(self.rates[name], self.rates["no collector"], strict=True)
        ]


@contextmanager
def collector() -> Iterator[str]:
    """Its endpoint."""
    process = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.mesh.telemetry", "collect"],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    try:
        yield process.stdout.readline().strip()
    finally:
        process.terminate()
        process.wait()


async def rate(client: AsyncClient, seconds: float) -> float:
    """Requests/s in a closed loop."""
    end, done = time.perf_counter() + seconds, 0

    async def caller(number: int) -> None:
        nonlocal done
        while time.perf_counter() < end:
            await client.encode(MODEL, [f"a text of caller {number}"])
            done += 1

    await asyncio.gather(*(caller(number) for number in range(AT_ONCE)))
    return done / seconds


async def measure(rounds: int, seconds: float, progress: Progress) -> TelemetryRounds:
    # Here, so that --help needs no torch.
    from tests.parity.checkpoints import SentenceFiles, write_checkpoint
    from tests.support.cluster import Cluster

    found, bar = TelemetryRounds(), progress.add_task("telemetry", total=rounds * len(VARIANTS))
    async with AsyncExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="telemetry-")))
        write_checkpoint(
            "bert", directory / "models" / MODEL, sentence=SentenceFiles(max_seq_length=64)
        )
        endpoint = stack.enter_context(collector())
        addresses = {name: f"127.0.0.1:{free_port()}" for name in ("router-0", "worker-0")}
        clients: dict[str, AsyncClient] = {}
        for number, (name, sampler) in enumerate(VARIANTS.items()):
            reported = (
                {} if sampler is None else {**sampler, "OTEL_EXPORTER_OTLP_ENDPOINT": endpoint}
            )
            (home := directory / f"mesh-{number}").mkdir()
            cluster = Cluster(
                home,
                models=str(directory / "models"),
                environment={"OMP_NUM_THREADS": "1", **reported},
            )
            if number == 0:
                cluster.each |= {
                    process: {"SHOAL_METRICS_ADDRESS": address}
                    for process, address in addresses.items()
                }
            stack.enter_context(cluster)
            clients[name] = await stack.enter_async_context(AsyncClient(cluster.address))
            await rate(clients[name], seconds)
        for number in range(rounds):
            for name in [*VARIANTS][number % 3 :] + [*VARIANTS][: number % 3]:
                found.rates[name].append(await rate(clients[name], seconds))
                progress.advance(bar)
            for process, address in addresses.items():
                found.scrapes[process].append(await asyncio.to_thread(scrape, address))
    return found


def scrape(address: str) -> float:
    """Seconds that it takes."""
    begin = time.perf_counter()
    with urlopen(f"http://{address}/metrics", timeout=10) as answer:
        answer.read()
    return time.perf_counter() - begin


def collect() -> None:
    """Take spans and forget them."""
    server = grpc.server(ThreadPoolExecutor(1))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(_Forgetful(), server)  # type: ignore[no-untyped-call]
    print(f"http://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}", flush=True)
    server.start()
    server.wait_for_termination()


class _Forgetful(trace_service_pb2_grpc.TraceServiceServicer):
    def Export(
        self, request: trace_service_pb2.ExportTraceServiceRequest, context: grpc.ServicerContext
    ) -> trace_service_pb2.ExportTraceServiceResponse:
        return trace_service_pb2.ExportTraceServiceResponse()


def show(found: TelemetryRounds, console: Console) -> None:
    table = Table("", box=None)
    for heading in ("requests/s", "of the first", "least", "most"):
        table.add_column(heading, justify="right")
    for name, rates in found.rates.items():
        shares = found.shares(name)
        table.add_row(
            name,
            f"{median(rates):.0f}",
            f"{median(shares):.3f}",
            f"{min(shares):.3f}",
            f"{max(shares):.3f}",
        )
    console.print(table)
    for process, seconds in found.scrapes.items():
        console.print(
            f"a scrape of {process}: {median(seconds) * 1e3:.1f} ms, most "
            f"{max(seconds) * 1e3:.1f} ms"
        )


def main(
    rounds: Annotated[int, typer.Option(min=1, help="Of each mesh once")] = 9,
    seconds: Annotated[float, typer.Option(min=0.5, help="Of each turn")] = 4.0,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON; the table goes to stderr")
    ] = False,
) -> None:
    """Measure how much traces reduce the throughput of a mesh with a tiny model."""
    console = Console(stderr=as_json)
    busy = asyncio.run(busy_cores())
    with Progress(console=console, transient=True) as progress:
        found = asyncio.run(measure(rounds, seconds, progress))
    console.print(", ".join(f"{key} {value}" for key, value in machine().items()), style="dim")
    show(found, console)
    if busy > 0.1:
        console.print(
            f"note: {busy:.2f} cores were busy with something else before", style="yellow"
        )
    if as_json:
        print(json.dumps({"machine": machine(), "busy_cores": busy, **asdict(found)}))


if __name__ == "__main__":
    if sys.argv[1:] == ["collect"]:
        collect()
    else:
        typer.run(main)
