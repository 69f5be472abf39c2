"""Measure the effect of a hostile tenant on a light one: `python -m benchmarks.stress.hostile`, or
`make bench-hostile`.

A mesh of one router, one worker of one thread, an edge and Redis, each a process. A light tenant
sends one text of MiniLM at a time at random intervals (Poisson, open loop), a tenth of the mesh's
capacity: first alone, then together with a tenant that sends, half as fast again as its rate limit
allows, the largest requests of one kind of work (`hostile_kinds.py`), kind after kind: texts,
relations, structures, documents, images, generation, and answers that it does not read. Half of its
requests are cancelled at once, half are left to run out of 2 s.

Bound: the light tenant's p99 at most twice its p99 alone, or 0.3 s where that is more; all of its
requests answered; no process beyond its memory; no attack within the limits refused as invalid.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass, field
from functools import partial
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
from benchmarks.stress.hostile_client import LEGAL, TENANT
from benchmarks.stress.hostile_kinds import IMAGES, KINDS, warm_up
from services.local.mesh import LocalMesh, running
from services.local.settings import Settings
from tests.fuzz.package_kinds import write_package_kinds
from tests.fuzz.tiny_kinds import write_kinds
from tests.parity.image_repositories import write_repository
from tests.support.peak import Peak

ROOT: Final = Path(__file__).resolve().parents[2]
SEED: Final = 7
RATIO_BOUND: Final = 2.0
FLOOR_MILLISECONDS: Final = 300.0
"""The light tenant's p99 may be as long as this whatever it is alone."""
LIGHT_SHARE: Final = 0.1
"""The light tenant's part of the mesh's capacity, which is measured first: one with a larger part
would not be light on a slow machine.
"""
MAX_LIGHT_RATE: Final = 6.0
"""Requests per second of the light tenant on a fast machine."""
CAPACITY_CALLERS: Final = 8
HOSTILE_RATE: Final = 4.0
"""Requests per second that the file of tenants allows the hostile one, which asks for ASKED times
as many.
"""
ASKED: Final = 1.5
LIGHT_DEADLINE_SECONDS: Final = 60.0
REFUSED: Final = {"INVALID_INPUT", "INPUT_TOO_LONG"}
"""Outcomes that no attack within the limits has."""
SETTLE_SECONDS: Final = 3.0
MIB: Final = 1 << 20
IN_FLIGHT_BYTES: Final = 512 * MIB
MODEL_BYTES: Final = 512 * MIB
REDIS_BYTES: Final = 1024 * MIB
"""Memory of Redis in k8s/base/redis/redis.conf."""


@dataclass(slots=True)
class LightAnswers:
    """The light tenant's requests: milliseconds of those that were answered, and why the others
    were not.
    """

    milliseconds: list[float] = field(default_factory=list)
    errors: Counter[str] = field(default_factory=Counter)

    def percentile(self, share: float) -> float:
        return percentile(self.milliseconds, share)


@dataclass(frozen=True, slots=True)
class ProcessMemory:
    """Memory of one process, in bytes: when the mesh was idle with its models loaded, its peak
    since, and its limit.
    """

    idle: int
    peak: int
    limit: int


@dataclass(frozen=True, slots=True)
class HostileResult:
    """The result of one kind.

    Attributes:
        light_rate: The light tenant's requests per second.
        hostile: The outcomes of that tenant's requests, by attack.
    """

    kind: str
    light_rate: float
    alone: LightAnswers
    beside: LightAnswers
    hostile: Mapping[str, Mapping[str, int]]
    memory: Mapping[str, ProcessMemory]

    @property
    def ratio(self) -> float:
        return self.beside.percentile(0.99) / self.alone.percentile(0.99)

    @property
    def bound_milliseconds(self) -> float:
        """The largest p99 that the light tenant may have."""
        return max(RATIO_BOUND * self.alone.percentile(0.99), FLOOR_MILLISECONDS)

    @property
    def faults(self) -> list[str]:
        """The bounds that are not met."""
        found = []
        if (p99 := self.beside.percentile(0.99)) > self.bound_milliseconds:
            found.append(
                f"{self.kind}: the light tenant's p99 is {p99:.0f} ms; at most "
                f"{self.bound_milliseconds:.0f} ms is allowed"
            )
        if self.beside.errors:
            found.append(
                f"{self.kind}: the light tenant's requests failed: {dict(self.beside.errors)}"
            )
        found += [
            f"{self.kind}: {name} took more memory than it may"
            for name, one in self.memory.items()
            if one.peak > one.limit
        ]
        found += [
            f"{self.kind}: {attack} was refused as invalid, so it attacked nothing"
            for attack, outcomes in self.hostile.items()
            if attack.endswith(LEGAL) and outcomes.keys() & REFUSED
        ]
        return found


class Light:
    """The light tenant."""

    def __init__(self, channel: grpc.aio.Channel, texts: list[str]) -> None:
        self._stub: inference_pb2_grpc.InferenceServiceAsyncStub = (
            inference_pb2_grpc.InferenceServiceStub(channel)  # type: ignore[assignment]
        )
        self._texts = texts
        self._chance = random.Random(SEED)

    async def ask(self, asked: LightAnswers) -> None:
        request = pb.EncodeRequest(
            model=MINILM_ID, items=[pb.Item(text=self._chance.choice(self._texts))]
        )
        begin = time.perf_counter()
        try:
            await self._stub.Encode(
                request, timeout=LIGHT_DEADLINE_SECONDS, metadata=(("x-shoal-tenant", "light"),)
            )
        except grpc.aio.AioRpcError as error:
            asked.errors[error.code().name] += 1
        else:
            asked.milliseconds.append((time.perf_counter() - begin) * 1e3)

    async def capacity(self, seconds: float) -> float:
        """Return the requests per second that are answered if the next one is always waiting."""
        asked, end = LightAnswers(), time.perf_counter() + seconds

        async def ask_on() -> None:
            while time.perf_counter() < end:
                await self.ask(asked)

        begin = time.perf_counter()
        await asyncio.gather(*(ask_on() for _ in range(CAPACITY_CALLERS)))
        return len(asked.milliseconds) / (time.perf_counter() - begin)

    async def ask_openly(self, rate: float, seconds: float, tick: Tick) -> LightAnswers:
        asked, begin, tasks = LightAnswers(), time.perf_counter(), []
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
    async def started(kind: str, mesh: LocalMesh, rate: float) -> HostileProcess:
        places = mesh.address, mesh.http_address
        command = (
            sys.executable,
            "-m",
            "benchmarks.stress.hostile_client",
            kind,
            *places,
            str(rate),
        )
        pipe = asyncio.subprocess.PIPE
        return HostileProcess(
            await asyncio.create_subprocess_exec(*command, cwd=ROOT, stdin=pipe, stdout=pipe)
        )

    async def stop(self) -> Mapping[str, Mapping[str, int]]:
        """Stop it and return the outcomes of its requests."""
        reported, _ = await self._process.communicate(b"")
        outcomes: Mapping[str, Mapping[str, int]] = json.loads(reported)
        return outcomes

    def kill(self) -> None:
        if self._process.returncode is None:
            self._process.kill()


async def measured(
    kinds: Sequence[str],
    seconds: float,
    light_rate: float | None,
    hostile_rate: float,
    progress: Progress,
) -> list[HostileResult]:
    """Measure the light tenant alone, and together with each kind, with the same duration.

    Args:
        light_rate: The light tenant's requests per second; None: a part of the capacity.
    """
    bar = progress.add_task("alone", total=1.0 + len(kinds))
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="hostile-")))
        mesh = await stack.enter_async_context(running(_settings(folder, hostile_rate)))
        channel = await stack.enter_async_context(grpc.aio.insecure_channel(mesh.address))
        await _load_all(channel)
        light = Light(channel, real_texts(256, SEED).texts)
        capacity = await light.capacity(seconds / 10)  # the mesh is warm then
        rate = light_rate or min(LIGHT_SHARE * capacity, MAX_LIGHT_RATE)
        alone = await light.ask_openly(rate, seconds, Tick(progress, bar, 0.1, 0.9))
        idle = _resident(mesh)
        found = []
        for place, kind in enumerate(kinds):
            progress.update(bar, description=f"with {kind}")
            tick = Tick(progress, bar, 1.0 + place, 1.0)
            found.append(
                await _beside(
                    kind,
                    rate,
                    alone,
                    mesh,
                    idle,
                    partial(light.ask_openly, rate, seconds, tick),
                    hostile_rate,
                )
            )
    return found


async def _beside(
    kind: str,
    light_rate: float,
    alone: LightAnswers,
    mesh: LocalMesh,
    idle: Mapping[str, int],
    ask: Callable[[], Awaitable[LightAnswers]],
    hostile_rate: float,
) -> HostileResult:
    """Measure the light tenant together with one kind.

    Args:
        idle: Bytes of each process before any attack.
    """
    peaks = {name: Peak(pid) for name, pid in mesh.supervisor.pids.items()}
    hostile = await HostileProcess.started(kind, mesh, ASKED * hostile_rate)
    try:
        await asyncio.sleep(SETTLE_SECONDS)
        beside = await ask()
        outcomes = await hostile.stop()
    finally:
        hostile.kill()
    limits = {"redis": REDIS_BYTES, "worker-0": idle["worker-0"] + MODEL_BYTES}
    limits |= {name: idle[name] + IN_FLIGHT_BYTES for name in ("router", "edge")}
    memory = {
        name: ProcessMemory(idle[name], peaks[name].bytes, limit) for name, limit in limits.items()
    }
    return HostileResult(kind, light_rate, alone, beside, outcomes, memory)


def _settings(folder: Path, hostile_rate: float) -> Settings:
    models = folder / "models"
    models.mkdir()
    write_kinds(models)
    write_package_kinds(models)
    write_repository("clip", folder / "clip").directory.rename(models / IMAGES)
    tenants = folder / "tenants.yaml"
    tenants.write_text(
        f"tenants:\n  {TENANT}: {{requests_per_second: {hostile_rate:g}, burst_seconds: 1}}\n"
    )
    environment = {
        "SHOAL_TENANTS": str(tenants),
        "SHOAL_IN_FLIGHT_BYTES": str(IN_FLIGHT_BYTES),
        "SHOAL_MEMORY_BYTES": str(MODEL_BYTES),
        "SHOAL_LOG_LEVEL": "WARNING",
    }
    offered = f"{MINILM_ID}={minilm_directory()}:{models}"
    return Settings(port=0, http_port=0, models=offered, environment=tuple(environment.items()))


async def _load_all(channel: grpc.aio.Channel) -> None:
    """Send one request to each model, so that no later one waits for a load."""
    for attack in warm_up():
        await channel.unary_unary(f"/shoal.v1.InferenceService/{attack.method}", bytes, bytes)(
            attack.body, timeout=LIGHT_DEADLINE_SECONDS
        )


def _resident(mesh: LocalMesh) -> dict[str, int]:
    return {name: Peak(pid).bytes for name, pid in mesh.supervisor.pids.items()}


def print_found(found: Sequence[HostileResult], console: Console) -> None:
    light = Table(
        title=f"the light tenant, {found[0].light_rate:.1f} requests/s, milliseconds",
        title_justify="left",
    )
    for heading in ("beside", "requests", "errors", "p50", "p99", "max", "bound"):
        light.add_column(heading, justify="left" if heading == "beside" else "right")
    rows = [
        ("nothing", found[0].alone, 0.0),
        *((one.kind, one.beside, one.bound_milliseconds) for one in found),
    ]
    for name, asked, bound in rows:
        numbers = [f"{asked.percentile(share):.1f}" for share in (0.5, 0.99, 1.0)]
        light.add_row(
            name,
            str(len(asked.milliseconds)),
            str(asked.errors.total()),
            *numbers,
            f"{bound:.0f}" if bound else "",
        )
    console.print(light)
    hostile = Table(title="the hostile tenant's requests", title_justify="left")
    for heading in ("kind", "attack", "requests", "outcomes"):
        hostile.add_column(heading, justify="right" if heading == "requests" else "left")
    for one in found:
        for attack, codes in one.hostile.items():
            outcomes = ", ".join(f"{count} {code}" for code, count in codes.items())
            hostile.add_row(one.kind, attack, str(sum(codes.values())), outcomes)
    console.print(hostile)
    memory = Table(title="memory, MiB: peak of the kind, of the limit", title_justify="left")
    memory.add_column("kind")
    for name in found[0].memory:
        memory.add_column(name, justify="right")
    for one in found:
        memory.add_row(
            one.kind,
            *(f"{each.peak / MIB:,.0f} of {each.limit / MIB:,.0f}" for each in one.memory.values()),
        )
    console.print(memory)
    faults = [fault for one in found for fault in one.faults]
    for fault in faults:
        console.print(f"[red]not met[/]: {fault}")
    if not faults:
        console.print("[green]met[/]")


def to_json(found: HostileResult) -> dict[str, object]:
    return asdict(found) | {"ratio": found.ratio, "faults": found.faults}


def main(
    kind: Annotated[
        list[str] | None,
        typer.Option(help=f"One of {', '.join(KINDS)}; may be repeated. Default: all."),
    ] = None,
    seconds: Annotated[
        float, typer.Option(min=5, help="Duration of the light tenant alone, and with each kind.")
    ] = 60.0,
    light_rate: Annotated[
        float | None,
        typer.Option(
            min=0.1,
            help="Requests per second of the light tenant. Default: a tenth of the capacity, at "
            f"most {MAX_LIGHT_RATE:g}.",
        ),
    ] = None,
    hostile_rate: Annotated[
        float, typer.Option(min=0.1, help="Requests per second that the hostile one is allowed.")
    ] = HOSTILE_RATE,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON with every request; the tables go to stderr.")
    ] = False,
) -> None:
    """Measure the latency of a light tenant, and memory, together with a tenant that sends the
    largest requests of each kind of work.
    """
    console = Console(stderr=as_json)
    if not console.is_terminal:
        console.width = 160
    kinds = kind or list(KINDS)
    if unknown := sorted(set(kinds) - KINDS.keys()):
        raise typer.BadParameter(f"{', '.join(unknown)}: the kinds are {', '.join(KINDS)}")
    busy = asyncio.run(busy_cores())
    with Progress(console=console, transient=True) as progress:
        found = asyncio.run(measured(kinds, seconds, light_rate, hostile_rate, progress))
    console.print(", ".join(f"{key} {value}" for key, value in machine().items()), style="dim")
    print_found(found, console)
    if busy > 0.1:
        console.print(
            f"note: {busy:.2f} cores were busy with something else before", style="yellow"
        )
    if as_json:
        print(
            json.dumps(
                {"machine": machine(), "busy_cores": busy, "kinds": [to_json(one) for one in found]}
            )
        )
    if any(one.faults for one in found):
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
