"""Simulate a mesh of up to 10,000 workers: `python -m benchmarks.mesh.registry`, or `make
simulate-mesh`.

A real redis-server and `libs/fleet` as routers use it; the workers are heartbeats made here, each
with ten resident models, of which half are in use, and others that lie on its disk. For each number
of workers and of models it measures seconds of CPU, which other work on the machine changes little:

- quiet heartbeat: one that says nothing new, of the router and Redis, with its bytes
- changed heartbeat: one that is stored
- refresh: of a router or scheduler in which nothing has changed, and the cost of each change
- memory of Redis and of a router, and the first read of all workers

From these it derives the load of a mesh without requests, for a number of routers (the heartbeats
are spread over them) and two schedulers: *quiet*, while nothing changes, and *busy*, while measured
values of every worker change as often as they are stored. Notifications are left out.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import platform
import sys
import time
from collections.abc import Awaitable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from redis.asyncio import Redis
from rich.console import Console
from rich.table import Table
from shoal.v1 import inference_pb2, models_pb2, worker_pb2

from libs.fleet import Fleet
from libs.fleet.drift import MEASURE_MS
from libs.fleet.scripts import HEARD, WORKERS
from libs.queue import connect
from services.local.redis_server import find_redis_server, redis_arguments
from services.local.supervision.child import Child
from services.local.supervision.environment import child_environment
from services.local.workplace import workplace

RESIDENT_MODELS = 10
HEARTBEAT_SECONDS = 2.0
SCHEDULERS = 2
SIZES = ((100, 20), (100, 1_000), (1_000, 20), (3_000, 20), (10_000, 20))
"""Numbers of workers, and of models on the disk of each."""
SAMPLE = 300
"""Heartbeats of each kind that a round sends at most."""


@dataclass(frozen=True, slots=True)
class RegistryCost:
    """Seconds of CPU of the router and of Redis, and bytes that Redis received and sent."""

    router_seconds: float
    redis_seconds: float
    bytes: float

    def times(self, count: float) -> RegistryCost:
        return RegistryCost(
            *(getattr(self, name) * count for name in RegistryCost.__dataclass_fields__)
        )

    def plus(self, other: RegistryCost) -> RegistryCost:
        names = RegistryCost.__dataclass_fields__
        return RegistryCost(*(getattr(self, name) + getattr(other, name) for name in names))


@dataclass(frozen=True, slots=True)
class RegistryResult:
    """The costs with this many workers, each with this many models on its disk."""

    workers: int
    models: int
    quiet: RegistryCost
    changed: RegistryCost
    refresh: RegistryCost
    change: RegistryCost
    """Cost of each change in a refresh."""
    first: RegistryCost
    """Cost of the first read."""
    redis_bytes: int
    router_bytes: int

    def load(self, routers: int, *, is_busy: bool) -> tuple[float, float, float]:
        """Return the cores of Redis and of each router, and bytes per second."""
        changes = self.workers / (MEASURE_MS / 1000) if is_busy else 0.0
        beats = self.quiet.times(self.workers / HEARTBEAT_SECONDS - changes)
        beats = beats.plus(self.changed.times(changes))
        reads = self.refresh.plus(self.change.times(changes))
        all_reads = reads.times(routers + SCHEDULERS)
        return (
            all_reads.redis_seconds + beats.redis_seconds,
            reads.router_seconds + beats.router_seconds / routers,
            all_reads.bytes + beats.bytes,
        )


class RegistryWorkers:
    """The heartbeats of all workers."""

    def __init__(self, workers: int, models: int) -> None:
        self.heartbeats = [_heartbeat(number, models) for number in range(workers)]
        self._began = time.monotonic()
        self._beats = 0

    def next(
        self, count: int, *, is_changed: bool = False
    ) -> Iterable[worker_pb2.HeartbeatRequest]:
        """Yield the next heartbeats, of all workers in turn, made when they are sent."""
        for _ in range(count):
            heartbeat = self.heartbeats[self._beats % len(self.heartbeats)]
            self._beats += 1
            age = time.monotonic() - self._began
            heartbeat.device_seconds += 0.5
            heartbeat.used_bytes += is_changed
            for number, model in enumerate(heartbeat.models):
                model.idle_seconds = 0.0 if number % 2 else age
                model.held_jobs = self._beats % 7 + 1 if number % 2 else 0
                model.tokens_per_second = 21_345.6 * (1 + 0.02 * (self._beats % 3))
                model.resident_seconds = age
            yield heartbeat


def _card(model: str) -> models_pb2.ModelCard:
    return models_pb2.ModelCard(
        model=model,
        revision="0123456789abcdef0123456789abcdef01234567",
        family="bert",
        tasks=[models_pb2.TASK_ENCODE],
        representations=[inference_pb2.REPRESENTATION_DENSE],
        dimensions=384,
        max_tokens=512,
        bytes=90_000_000,
        data_type="bfloat16",
        prompts=["query", "document"],
        inputs=[models_pb2.INPUT_KIND_TEXT],
        created_unix_seconds=1_700_000_000,
    )


def _heartbeat(number: int, models: int) -> worker_pb2.HeartbeatRequest:
    held = [
        worker_pb2.WorkerModel(
            model=f"organization/resident-model-{(number + index) % 500}",
            state=models_pb2.MODEL_STATE_RESIDENT,
            bytes=300_000_000,
            load_seconds=2.5,
            tokens_per_second=21_345.6,
            activation_bytes_per_token=4_321.0,
            measured_batch_tokens=8_192,
            tokens_per_byte=0.26,
            data_type="bfloat16",
            card=_card(f"organization/resident-model-{(number + index) % 500}"),
        )
        for index in range(RESIDENT_MODELS)
    ]
    cold = [
        worker_pb2.WorkerModel(
            model=f"organization/some-model-{index}",
            state=models_pb2.MODEL_STATE_COLD,
            bytes=300_000_000 + index,
            card=_card(f"organization/some-model-{index}"),
        )
        for index in range(models)
    ]
    return worker_pb2.HeartbeatRequest(
        worker_id=f"worker-l4-spot-{number:05}",
        epoch=f"{number:016x}",
        pool="l4-spot",
        device="NVIDIA L4",
        memory_bytes=24_000_000_000,
        used_bytes=3_000_000_000,
        batch_tokens=16_384,
        models=held,
        on_disk=cold,
    )


async def measure(redis: Redis, workers: int, models: int, rounds: int) -> RegistryResult:
    await redis.flushall()
    all_workers = RegistryWorkers(workers, models)
    # The router of the heartbeats, and another that only reads: it has applied none themselves.
    fleet, other = (Fleet(redis, ttl_ms=3_600_000) for _ in range(2))
    for heartbeat in all_workers.next(workers):
        heartbeat.on_disk_tag = await fleet.report(heartbeat)
        heartbeat.ClearField("on_disk")
    await fleet.refresh()
    gc.collect()
    resident = _resident_bytes()
    first = await _cost(redis, other.refresh(), 1)
    gc.collect()
    memory: Any = await redis.info("memory")
    router_bytes = _resident_bytes() - resident
    # As in a service: the collector seldom visits records that live long.
    gc.freeze()
    count, kinds = min(workers, SAMPLE), ("quiet", "changed")
    beats: dict[str, list[RegistryCost]] = {kind: [] for kind in kinds}
    reads: dict[str, list[RegistryCost]] = {kind: [] for kind in kinds}
    for _ in range(rounds):
        for kind in kinds:
            await _hear_all(redis)
            for reader in (fleet, other):
                await reader.refresh()
            # The first heartbeats after changes also compare cards.
            await _report(fleet, all_workers.next(count))
            sent = all_workers.next(count, is_changed=kind == "changed")
            beats[kind].append(await _cost(redis, _report(fleet, sent), count))
            await _hear_all(redis)
            reads[kind].append(await _cost(redis, other.refresh(), 1))
    gc.unfreeze()
    refresh, with_changes = _median(reads["quiet"]), _median(reads["changed"])
    change = with_changes.plus(refresh.times(-1)).times(1 / count)
    await fleet.refresh()
    for reader in (fleet, other):
        assert len(reader.snapshot.workers) == workers
        assert all(
            len(one.models) == models + RESIDENT_MODELS for one in reader.snapshot.workers.values()
        )
    quiet, changed = (_median(beats[kind]) for kind in kinds)
    sizes = memory["used_memory"], router_bytes
    return RegistryResult(workers, models, quiet, changed, refresh, change, first, *sizes)


async def _hear_all(redis: Redis) -> None:
    """Note a heartbeat of every worker now: this simulation sends them more slowly than a mesh, in
    which all others would count as silent.
    """
    seconds, microseconds = await redis.time()
    ids: Any = await redis.hkeys(WORKERS)
    await redis.zadd(HEARD, dict.fromkeys(ids, seconds * 1000 + microseconds // 1000))


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text("ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")


async def _report(fleet: Fleet, sent: Iterable[worker_pb2.HeartbeatRequest]) -> None:
    for heartbeat in sent:
        await fleet.report(heartbeat)


async def _cost(redis: Redis, work: Awaitable[object], count: int) -> RegistryCost:
    """Await the work and return its cost divided by `count`."""
    before = await _counters(redis)
    own = time.process_time()
    await work
    own = time.process_time() - own
    after = await _counters(redis)
    return RegistryCost(own / count, (after[0] - before[0]) / count, (after[1] - before[1]) / count)


async def _counters(redis: Redis) -> tuple[float, int]:
    """Return the seconds of CPU that Redis has used, and the bytes that it received and sent."""
    used: Any = await redis.info("cpu")
    stats: Any = await redis.info("stats")
    return used["used_cpu_user"] + used["used_cpu_sys"], (
        stats["total_net_input_bytes"] + stats["total_net_output_bytes"]
    )


def _median(costs: Sequence[RegistryCost]) -> RegistryCost:
    return RegistryCost(
        *(median(getattr(one, name) for one in costs) for name in RegistryCost.__dataclass_fields__)
    )


def _measured(results: Sequence[RegistryResult]) -> Table:
    table = Table(title="measured: CPU of a router / of Redis, bytes to and from Redis")
    for name in (
        "workers",
        "models each",
        "quiet heartbeat",
        "changed heartbeat",
        "refresh",
        "each change",
        "first read",
        "memory: Redis",
        "router",
    ):
        table.add_column(name, justify="right")
    for one in results:
        costs = (one.quiet, one.changed, one.refresh, one.change, one.first)
        table.add_row(
            f"{one.workers:,}",
            f"{one.models:,}",
            *(
                f"{cost.router_seconds * 1e6:,.0f} / {cost.redis_seconds * 1e6:,.0f} µs,"
                f" {cost.bytes:,.0f}"
                for cost in costs
            ),
            f"{one.redis_bytes / 1e6:,.1f} MB",
            f"{one.router_bytes / 1e6:,.1f} MB",
        )
    return table


def _derived(results: Sequence[RegistryResult], routers: Sequence[int]) -> Table:
    table = Table(
        title="derived, quiet - busy: heartbeats of all workers, refreshes of all routers and "
        f"{SCHEDULERS} schedulers"
    )
    for name in ("workers", "models each", "routers", "cores of Redis", "of a router", "MB/s"):
        table.add_column(name, justify="right")
    for one in results:
        for count in routers:
            quiet, busy = (one.load(count, is_busy=is_busy) for is_busy in (False, True))
            table.add_row(
                f"{one.workers:,}",
                f"{one.models:,}",
                f"{count:,}",
                f"{quiet[0]:.3f} - {busy[0]:.3f}",
                f"{quiet[1]:.3f} - {busy[1]:.3f}",
                f"{quiet[2] / 1e6:,.1f} - {busy[2] / 1e6:,.1f}",
            )
    return table


async def _run(sizes: Sequence[tuple[int, int]], rounds: int) -> list[RegistryResult]:
    with workplace(None) as place:
        redis = Child(
            "redis",
            redis_arguments(find_redis_server(), place.redis),
            child_environment("redis", os.environ),
            place.logs / "redis.log",
        )
        async with redis:
            client = connect(f"unix://{place.redis / 'redis.sock'}")
            results = []
            for workers, models in sizes:
                results.append(await measure(client, workers, models, rounds))
                print(".", end="", flush=True, file=sys.stderr)
            print(file=sys.stderr)
            await client.aclose()
            return results


def _size(text: str) -> tuple[int, int]:
    workers, models = text.split("x")
    return int(workers), int(models)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument(
        "--size",
        action="append",
        metavar="WORKERSxMODELS",
        help="default: " + " ".join(f"{workers}x{models}" for workers, models in SIZES),
    )
    parser.add_argument("--routers", type=int, action="append", help="default: 10, 100 and 300")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, help="also write everything to this file")
    wanted = parser.parse_args()
    sizes = [_size(text) for text in wanted.size or ()] or SIZES
    results = asyncio.run(_run(sizes, wanted.rounds))
    console = Console(width=200)
    console.print(
        f"{platform.machine()}, Python {platform.python_version()}, {wanted.rounds} rounds"
    )
    console.print(_measured(results))
    console.print(_derived(results, wanted.routers or (10, 100, 300)))
    if wanted.json:
        wanted.json.write_text(json.dumps([asdict(one) for one in results], indent=2))


if __name__ == "__main__":
    main()
