"""What does one hostile tenant do to a light one? `python -m benchmarks.stress.hostile`, or `make bench-hostile`.

A mesh of one router, one worker of one thread and Redis, each a process. A light tenant asks for the vector of one text of MiniLM
at a time, at its own pace (Poisson, open loop): first alone, then beside a tenant that asks, half as fast again as its rate limit
allows, for what multiplies most (`hostile_client.py`): the longest instruction with 2,000 items, the longest hypothesis with 256
labels, the longest query with as many documents as are allowed, the longest labels with 900 items, texts of megabytes, and each of
them far beyond its limit. Half of its requests are cancelled at once, half are left to run out of 2 s.

Bound: the light tenant's p99 at most twice what it is alone, all of its requests answered, and no process beyond its memory.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Final

import grpc
import grpc.aio
import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from shoal.v1 import inference_pb2 as pb
from shoal.v1 import inference_pb2_grpc

from benchmarks.common.machine import busy_cores, machine
from benchmarks.common.report import percentile
from benchmarks.common.texts import MINILM_ID, minilm_directory, real_texts
from benchmarks.stress.fairness import Tick, arrivals, until
from benchmarks.stress.hostile_client import TENANT
from services.local.mesh import LocalMesh, running
from services.local.settings import Settings
from tests.fuzz.tiny_kinds import LABELS, PAIRS, write_kinds
from tests.support.peak import Peak

ROOT: Final = Path(__file__).resolve().parents[2]
SEED: Final = 7
RATIO_BOUND: Final = 2.0
LIGHT_RATE: Final = 6.0
"""Requests a second of the light tenant: a tenth of what the worker can do, about."""
HOSTILE_RATE: Final = 4.0
"""Requests a second that the file of tenants allows the hostile one, which asks for ASKED times as many."""
ASKED: Final = 1.5
LIGHT_DEADLINE_SECONDS: Final = 60.0
SETTLE_SECONDS: Final = 3.0
MIB: Final = 1 << 20
IN_FLIGHT_BYTES: Final = 512 * MIB
MODEL_BYTES: Final = 512 * MIB
REDIS_BYTES: Final = 1024 * MIB
"""What k8s/base/redis/redis.conf gives it."""


@dataclass(slots=True)
class Asked:
    """The light tenant's requests: milliseconds of those that were answered, and why the others were not."""

    milliseconds: list[float] = field(default_factory=list)
    errors: Counter[str] = field(default_factory=Counter)

    def percentile(self, share: float) -> float:
        return percentile(self.milliseconds, share)


@dataclass(frozen=True, slots=True)
class Memory:
    """Of one process, in bytes: when the mesh was idle with its models loaded, its peak since, and what it may take."""

    idle: int
    peak: int
    limit: int


@dataclass(frozen=True, slots=True)
class Found:
    """`hostile`: what became of that tenant's requests, by their kind."""

    alone: Asked
    beside: Asked
    hostile: Mapping[str, Mapping[str, int]]
    memory: Mapping[str, Memory]

    @property
    def ratio(self) -> float:
        return self.beside.percentile(0.99) / self.alone.percentile(0.99)

    @property
    def faults(self) -> list[str]:
        """What is not as it must be."""
        found = []
        if self.ratio > RATIO_BOUND:
            found.append(f"the light tenant's p99 is {self.ratio:.1f} times what it is alone; at most {RATIO_BOUND:g} is allowed")
        if self.beside.errors:
            found.append(f"the light tenant's requests failed: {dict(self.beside.errors)}")
        found += [f"{name} took more memory than it may" for name, one in self.memory.items() if one.peak > one.limit]
        return found


class Light:
    """The light tenant."""

    def __init__(self, channel: grpc.aio.Channel, texts: list[str]) -> None:
        self._stub: inference_pb2_grpc.InferenceServiceAsyncStub = inference_pb2_grpc.InferenceServiceStub(channel)  # type: ignore[assignment]
        self._texts = texts
        self._chance = random.Random(SEED)

    async def ask(self, asked: Asked) -> None:
        request = pb.EncodeRequest(model=MINILM_ID, items=[pb.Item(text=self._chance.choice(self._texts))])
        begin = time.perf_counter()
        try:
            await self._stub.Encode(request, timeout=LIGHT_DEADLINE_SECONDS, metadata=(("x-shoal-tenant", "light"),))
        except grpc.aio.AioRpcError as error:
            asked.errors[error.code().name] += 1
        else:
            asked.milliseconds.append((time.perf_counter() - begin) * 1e3)

    async def ask_openly(self, rate: float, seconds: float, tick: Tick) -> Asked:
        asked, begin, tasks = Asked(), time.perf_counter(), []
        for at in arrivals(rate, SEED):
            await until(begin, min(at, seconds))
            tick(min(at / seconds, 1.0))
            if at >= seconds:
                break
            tasks.append(asyncio.create_task(self.ask(asked)))
        await asyncio.gather(*tasks)
        return asked


class HostileProcess:
    """`benchmarks.stress.hostile_client` at work, until `stop`."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    @staticmethod
    async def started(address: str, rate: float) -> HostileProcess:
        command = (sys.executable, "-m", "benchmarks.stress.hostile_client", address, str(rate))
        pipe = asyncio.subprocess.PIPE
        return HostileProcess(await asyncio.create_subprocess_exec(*command, cwd=ROOT, stdin=pipe, stdout=pipe))

    async def stop(self) -> Mapping[str, Mapping[str, int]]:
        """What became of its requests."""
        told, _ = await self._process.communicate(b"")
        outcomes: Mapping[str, Mapping[str, int]] = json.loads(told)
        return outcomes

    def kill(self) -> None:
        if self._process.returncode is None:
            self._process.kill()


async def measured(seconds: float, light_rate: float, hostile_rate: float, progress: Progress) -> Found:
    bar = progress.add_task("alone", total=1.0)
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="hostile-")))
        mesh = await stack.enter_async_context(running(_settings(folder, hostile_rate)))
        channel = await stack.enter_async_context(grpc.aio.insecure_channel(mesh.address))
        await _load_all(channel)
        light = Light(channel, real_texts(256, SEED).texts)
        await light.ask_openly(light_rate, seconds / 10, Tick(progress, bar, 0.0, 0.05))  # it is warm and measured then
        alone = await light.ask_openly(light_rate, seconds, Tick(progress, bar, 0.05, 0.45))
        progress.update(bar, description="beside")
        idle, peaks = _resident(mesh), {name: Peak(pid) for name, pid in mesh.supervisor.pids.items()}
        hostile = await HostileProcess.started(mesh.address, ASKED * hostile_rate)
        stack.callback(hostile.kill)
        await asyncio.sleep(SETTLE_SECONDS)
        beside = await light.ask_openly(light_rate, seconds, Tick(progress, bar, 0.5, 0.5))
        outcomes = await hostile.stop()
        limits = {"redis": REDIS_BYTES, "router": idle["router"] + IN_FLIGHT_BYTES, "worker-0": idle["worker-0"] + MODEL_BYTES}
        memory = {name: Memory(idle[name], peak.bytes, limits[name]) for name, peak in peaks.items()}
    return Found(alone, beside, outcomes, memory)


def _settings(folder: Path, hostile_rate: float) -> Settings:
    write_kinds(folder)
    tenants = folder / "tenants.yaml"
    tenants.write_text(f"tenants:\n  {TENANT}: {{requests_per_second: {hostile_rate:g}, burst_seconds: 1}}\n")
    environment = {
        "SHOAL_TENANTS": str(tenants),
        "SHOAL_IN_FLIGHT_BYTES": str(IN_FLIGHT_BYTES),
        "SHOAL_MEMORY_BYTES": str(MODEL_BYTES),
        "SHOAL_LOG_LEVEL": "WARNING",
    }
    return Settings(port=0, models=f"{MINILM_ID}={minilm_directory()}:{folder}", environment=tuple(environment.items()))


async def _load_all(channel: grpc.aio.Channel) -> None:
    """One request to each model, so that nobody waits for a load."""
    stub: inference_pb2_grpc.InferenceServiceAsyncStub = inference_pb2_grpc.InferenceServiceStub(channel)  # type: ignore[assignment]
    item = pb.Item(text="a text")
    await stub.Encode(pb.EncodeRequest(model=MINILM_ID, items=[item]), timeout=LIGHT_DEADLINE_SECONDS)
    await stub.Score(pb.ScoreRequest(model=PAIRS, query=item, documents=[item]), timeout=LIGHT_DEADLINE_SECONDS)
    entities = pb.EntitiesTask(labels=["a"])
    await stub.Extract(pb.ExtractRequest(model=LABELS, items=[item], entities=entities), timeout=LIGHT_DEADLINE_SECONDS)


def _resident(mesh: LocalMesh) -> dict[str, int]:
    return {name: Peak(pid).bytes for name, pid in mesh.supervisor.pids.items()}


def print_found(found: Found, console: Console) -> None:
    light = Table(title="the light tenant, milliseconds", title_justify="left")
    for heading in ("", "requests", "errors", "p50", "p99", "max"):
        light.add_column(heading, justify="left" if not heading else "right")
    for name, asked in (("alone", found.alone), ("beside a hostile tenant", found.beside)):
        numbers = [f"{asked.percentile(share):.1f}" for share in (0.5, 0.99, 1.0)]
        light.add_row(name, str(len(asked.milliseconds)), str(asked.errors.total()), *numbers)
    console.print(light)
    console.print(f"p99 beside / alone: {found.ratio:.2f}; bound {RATIO_BOUND:g}")
    hostile = Table(title="the hostile tenant's requests", title_justify="left")
    hostile.add_column("")
    hostile.add_column("requests", justify="right")
    hostile.add_column("ended with")
    for kind, codes in found.hostile.items():
        hostile.add_row(kind, str(sum(codes.values())), ", ".join(f"{count} {code}" for code, count in codes.items()))
    console.print(hostile)
    memory = Table(title="memory, MiB", title_justify="left")
    for heading in ("process", "idle", "peak", "limit"):
        memory.add_column(heading, justify="left" if heading == "process" else "right")
    for name, one in found.memory.items():
        memory.add_row(name, *(f"{size / MIB:,.0f}" for size in (one.idle, one.peak, one.limit)))
    console.print(memory)
    for fault in found.faults:
        console.print(f"[red]not met[/]: {fault}")
    if not found.faults:
        console.print("[green]met[/]")


def to_json(found: Found) -> dict[str, object]:
    return asdict(found) | {"ratio": found.ratio, "faults": found.faults}


def main(
    seconds: Annotated[float, typer.Option(min=5, help="Of the light tenant alone, and as many beside the other")] = 60.0,
    light_rate: Annotated[float, typer.Option(min=0.1, help="Requests a second of the light tenant")] = LIGHT_RATE,
    hostile_rate: Annotated[float, typer.Option(min=0.1, help="Requests a second that the hostile one is allowed")] = HOSTILE_RATE,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON with every request; the tables go to stderr")] = False,
) -> None:
    """Measure what a tenant that sends the largest products it can does to the latency of a light one, and to memory."""
    console = Console(stderr=as_json)
    if not console.is_terminal:
        console.width = 160
    busy = asyncio.run(busy_cores())
    with Progress(console=console, transient=True) as progress:
        found = asyncio.run(measured(seconds, light_rate, hostile_rate, progress))
    console.print(", ".join(f"{key} {value}" for key, value in machine().items()), style="dim")
    print_found(found, console)
    if busy > 0.1:
        console.print(f"note: {busy:.2f} cores were busy with something else before", style="yellow")
    if as_json:
        print(json.dumps({"machine": machine(), "busy_cores": busy, **to_json(found)}))
    if found.faults:
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
