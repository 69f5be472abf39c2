"""Measure the cost of the registry of workers: `python -m benchmarks.mesh.registry`, or `make
bench-registry`.

A real redis-server and `libs/fleet` as a router uses it; the workers are heartbeats made here, each
with ten resident models and others that lie on its disk. Between two refreshes half of the workers
send a heartbeat, as in a second of a mesh (`SHOAL_HEARTBEAT_SECONDS` is 2 s). For each number of
workers and of models:

- heartbeat: CPU of the router and of Redis, and bytes to Redis, of one heartbeat
- refresh: CPU of a router and of Redis, and bytes from Redis, of one refresh (one per second in
  every router and scheduler)
- memory of Redis

From these it derives, for a number of routers (the heartbeats spread over them) and two schedulers,
the cores of Redis and of each router, and bytes per second. What that leaves out: requests, and
notifications. CPU times are not wall times, so that other work on the machine changes them little.
"""

from __future__ import annotations

import argparse
import asyncio
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
from libs.queue import connect
from services.local.redis_server import find_redis_server, redis_arguments
from services.local.supervision.child import Child
from services.local.supervision.environment import environment_of
from services.local.workplace import workplace

RESIDENT_MODELS = 10
HEARTBEAT_SECONDS = 2.0
SCHEDULERS = 2
SIZES = ((10, 20), (100, 20), (1_000, 20), (10_000, 20), (100, 1_000), (1_000, 1_000))
"""Numbers of workers, and of models on the disk of each."""


@dataclass(frozen=True, slots=True)
class Cost:
    """The cost of a heartbeat or refresh: seconds of CPU, bytes that Redis received or sent."""

    router_seconds: float
    redis_seconds: float
    bytes: float


@dataclass(frozen=True, slots=True)
class Result:
    """The costs with this many workers, each with this many models on its disk."""

    workers: int
    models: int
    heartbeat: Cost
    refresh: Cost
    redis_bytes: int

    def redis_cores(self, routers: int) -> float:
        """Return the cores that Redis needs with this many routers."""
        readers = routers + SCHEDULERS
        beats = self.workers / HEARTBEAT_SECONDS
        return readers * self.refresh.redis_seconds + beats * self.heartbeat.redis_seconds

    def router_cores(self, routers: int) -> float:
        """Return the cores that each router needs."""
        beats = self.workers / HEARTBEAT_SECONDS / routers
        return self.refresh.router_seconds + beats * self.heartbeat.router_seconds

    def bytes_a_second(self, routers: int) -> float:
        """Return the bytes that Redis receives and sends in a second."""
        readers = routers + SCHEDULERS
        beats = self.workers / HEARTBEAT_SECONDS
        return readers * self.refresh.bytes + beats * self.heartbeat.bytes


class Workers:
    """The heartbeats of all workers."""

    def __init__(self, workers: int, models: int) -> None:
        self.heartbeats = [_heartbeat(number, models) for number in range(workers)]
        self._beats = 0

    def next(self, count: int) -> Iterable[worker_pb2.HeartbeatRequest]:
        """Yield the next heartbeats, of all workers in turn."""
        for _ in range(count):
            heartbeat = self.heartbeats[self._beats % len(self.heartbeats)]
            self._beats += 1
            heartbeat.device_seconds += 0.5
            for model in heartbeat.models:
                model.idle_seconds += 0.25
                model.resident_seconds += HEARTBEAT_SECONDS
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


async def measure(redis: Redis, workers: int, models: int, rounds: int) -> Result:
    await redis.flushall()
    all_workers = Workers(workers, models)
    # The router of the heartbeats, and another that only reads: it has applied none themselves.
    fleet, other = (Fleet(redis, ttl_ms=3_600_000) for _ in range(2))
    for heartbeat in all_workers.next(workers):
        heartbeat.on_disk_tag = await fleet.report(heartbeat)
        heartbeat.ClearField("on_disk")
    for reader in (fleet, other):
        await reader.refresh()
    beats, refreshes = [], []
    for _ in range(rounds):
        count = max(1, workers // 2)
        sent = list(all_workers.next(count))
        beats.append(await _cost(redis, "total_net_input_bytes", _report(fleet, sent), count))
        refreshes.append(await _cost(redis, "total_net_output_bytes", other.refresh(), 1))
    for reader in (fleet, other):
        assert len(reader.snapshot.workers) == workers
        assert all(
            len(one.models) == models + RESIDENT_MODELS for one in reader.snapshot.workers.values()
        )
    memory: Any = await redis.info("memory")
    return Result(workers, models, _median(beats), _median(refreshes), memory["used_memory"])


async def _report(fleet: Fleet, sent: Sequence[worker_pb2.HeartbeatRequest]) -> None:
    for heartbeat in sent:
        await fleet.report(heartbeat)


async def _cost(redis: Redis, traffic: str, work: Awaitable[object], count: int) -> Cost:
    """Await the work and return its cost divided by `count`."""
    before = await _counters(redis, traffic)
    own = time.process_time()
    await work
    own = time.process_time() - own
    after = await _counters(redis, traffic)
    return Cost(own / count, (after[0] - before[0]) / count, (after[1] - before[1]) / count)


async def _counters(redis: Redis, traffic: str) -> tuple[float, int]:
    """Return the seconds of CPU that Redis has used, and its bytes in that direction."""
    used: Any = await redis.info("cpu")
    stats: Any = await redis.info("stats")
    return used["used_cpu_user"] + used["used_cpu_sys"], stats[traffic]


def _median(costs: Sequence[Cost]) -> Cost:
    return Cost(
        *(median(getattr(one, name) for one in costs) for name in Cost.__dataclass_fields__)
    )


def _measured(results: Sequence[Result]) -> Table:
    table = Table(title="measured: one heartbeat, and one refresh of a router")
    for name in (
        "workers",
        "models each",
        "beat: router",
        "Redis",
        "bytes",
        "refresh: router",
        "Redis",
        "bytes",
        "memory of Redis",
    ):
        table.add_column(name, justify="right")
    for one in results:
        table.add_row(
            f"{one.workers:,}",
            f"{one.models:,}",
            f"{one.heartbeat.router_seconds * 1e6:,.0f} µs",
            f"{one.heartbeat.redis_seconds * 1e6:,.0f} µs",
            f"{one.heartbeat.bytes:,.0f}",
            f"{one.refresh.router_seconds * 1e3:,.1f} ms",
            f"{one.refresh.redis_seconds * 1e3:,.1f} ms",
            f"{one.refresh.bytes / 1e3:,.0f} kB",
            f"{one.redis_bytes / 1e6:,.1f} MB",
        )
    return table


def _derived(results: Sequence[Result], routers: Sequence[int]) -> Table:
    table = Table(
        title="derived: heartbeats of all workers, refreshes of all routers and "
        f"{SCHEDULERS} schedulers"
    )
    for name in ("workers", "models each", "routers", "cores of Redis", "of a router", "MB/s"):
        table.add_column(name, justify="right")
    for one in results:
        for count in routers:
            table.add_row(
                f"{one.workers:,}",
                f"{one.models:,}",
                f"{count:,}",
                f"{one.redis_cores(count):.3f}",
                f"{one.router_cores(count):.3f}",
                f"{one.bytes_a_second(count) / 1e6:,.1f}",
            )
    return table


async def _run(sizes: Sequence[tuple[int, int]], rounds: int) -> list[Result]:
    with workplace(None) as place:
        redis = Child(
            "redis",
            redis_arguments(find_redis_server(), place.redis),
            environment_of("redis", os.environ),
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
    parser.add_argument("--routers", type=int, action="append", help="default: 3, 10 and 100")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, help="also write everything to this file")
    wanted = parser.parse_args()
    sizes = [_size(text) for text in wanted.size or ()] or SIZES
    results = asyncio.run(_run(sizes, wanted.rounds))
    console = Console()
    console.print(
        f"{platform.machine()}, Python {platform.python_version()}, {wanted.rounds} rounds"
    )
    console.print(_measured(results))
    console.print(_derived(results, wanted.routers or (3, 10, 100)))
    if wanted.json:
        wanted.json.write_text(json.dumps([asdict(one) for one in results], indent=2))


if __name__ == "__main__":
    main()
