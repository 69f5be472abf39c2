"""Measure Redis under the connections of many routers: `python -m benchmarks.mesh.connections`, or
`make simulate-mesh`.

Real redis-servers, and the queue and registry as routers use them: each simulated router opens the
connections of a router, waits for replies, notifications and streamed text, and reads the workers
and the lanes' gauges once a second. All of them are in this process. Jobs are made here, and pulled
and answered at once by the next router, so the numbers are of Redis and of the queue's code without
gRPC, in seconds of CPU:

- idle: of Redis and of a router, for each second of a router without requests
- single: a text that is enqueued at one router, pulled and answered at another
- wakeup: the cost that notifying the routers that found the lane empty adds to a single, and each
  router's part of it

From these it derives how many singles and tokens per second (of texts of 128 tokens, one in each
request) a mesh can serve before its busiest master uses 70 % of a core.

`--masters` measures singles of two routers on a Redis Cluster with these numbers of masters.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import asdict, dataclass
from itertools import count
from pathlib import Path
from typing import Any, Final, cast

from redis.asyncio import Redis
from redis.exceptions import RedisError
from rich.console import Console
from rich.table import Table

from libs.errors import NoCapacity
from libs.fleet import Fleet
from libs.queue import LaneKey, Lanes, Pulled, QueuedJob, connect, open_all
from libs.queue.connection.cluster import list_masters
from services.local.redis_server import find_redis_server, redis_arguments
from services.local.supervision.child import Child
from services.local.supervision.environment import child_environment
from services.local.workplace import workplace
from services.router.inbox import REPLY_WAIT_SECONDS
from services.router.state.view import RouterView
from tests.support.redis_cluster import RedisCluster

LANES: Final = [LaneKey("cpu", f"organization/model-{number}") for number in range(24)]
PAYLOAD: Final = b"x" * 300
RESULT: Final = b"y" * 1600
"""About the sizes of a short text and of a vector of 384 numbers."""
CALLERS: Final = 32
ACTIVE: Final = 8
"""Maximum number of routers with requests; the others are idle."""
CLUSTER_SLOTS: Final = 64
REFRESH_SECONDS: Final = 1.0
START_SECONDS: Final = 60.0
BUSY: Final = 0.7
"""The part of a core that the busiest master may use: above, requests wait for each other."""
TEXT_TOKENS: Final = 128


@dataclass(frozen=True, slots=True)
class Spent:
    """Seconds of CPU: of each master, and of this process."""

    redis: tuple[float, ...]
    own: float

    def each(self, number: float) -> Spent:
        return Spent(tuple(one / number for one in self.redis), self.own / number)

    def without(self, other: Spent, times: float) -> Spent:
        redis = zip(self.redis, other.redis, strict=True)
        return Spent(tuple(a - b * times for a, b in redis), self.own - other.own * times)


@dataclass(frozen=True, slots=True)
class ConnectionCosts:
    """The costs with this many routers."""

    routers: int
    masters: int
    connections: int
    """Number of connections to all masters."""
    redis_bytes: int
    """Memory that the connections take."""
    idle: Spent
    """Costs of each router and second."""
    single: Spent
    wakeup: Spent
    """Additional costs of a single of which other routers are notified."""

    def cores(self, singles: float) -> float:
        """Return the cores of Redis for this rate of singles, each notified to other routers."""
        idle = sum(self.idle.redis) * self.routers
        return idle + singles * (sum(self.single.redis) + sum(self.wakeup.redis))

    def singles(self, load: float) -> float:
        """Return the rate of singles, each notified to other routers, at which the busiest master
        uses this part of a core.
        """
        return min(
            (load - idle * self.routers) / (single + max(0.0, wakeup))
            for idle, single, wakeup in zip(
                self.idle.redis, self.single.redis, self.wakeup.redis, strict=True
            )
        )


class IdleRouter:
    """The connections and loops of a router without requests."""

    def __init__(self, url: str, name: str, slots: int) -> None:
        self.redis = connect(url, slots=slots)
        self.lanes = Lanes(self.redis, router_id=name, dead_result=b"", slots=slots)
        self._view = RouterView(Fleet(self.redis))
        self.refreshes = self.wakeups = 0
        self.answers: dict[str, asyncio.Future[bytes]] = {}
        self._is_listening = asyncio.Event()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        await self.lanes.check()
        await open_all(self.redis)
        loops = [
            *(self._take(inbox) for inbox in self.lanes.inboxes),
            self._listen(),
            self._stream(),
            self._refresh(),
        ]
        tasks = [asyncio.create_task(loop) for loop in loops]
        await self._is_listening.wait()
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            with suppress(RedisError):  # on a busy machine connections do not close in time
                await self.redis.aclose()

    async def _take(self, inbox: int) -> None:
        while True:
            for job_id, result in await self.lanes.take_replies(REPLY_WAIT_SECONDS, inbox):
                self.answers.pop(job_id).set_result(result)

    async def _listen(self) -> None:
        async for wakeup in self.lanes.wakeups():
            if wakeup is None:
                self._is_listening.set()
            else:
                self.wakeups += 1

    async def _stream(self) -> None:
        async for _ in self.lanes.streamed_texts():
            pass

    async def _refresh(self) -> None:
        while True:
            with suppress(NoCapacity):
                await self._view.refresh(self.lanes)
                self.refreshes += 1
            await asyncio.sleep(REFRESH_SECONDS)


class ConnectedRouters:
    """Running routers, and the requests between them."""

    def __init__(self, routers: Sequence[IdleRouter]) -> None:
        self.routers = routers
        self._numbers = count()

    async def idle(self, seconds: float) -> Spent:
        """Return the cost of a router in a second in which it reads the mesh once."""
        begin = self._refreshes()
        spent = await self._spent(asyncio.sleep(seconds))
        return spent.each(self._refreshes() - begin)

    def _refreshes(self) -> int:
        return sum(router.refreshes for router in self.routers)

    async def singles(self, number: int, idle: Spent, *, notify: bool) -> Spent:
        """Return the cost of a single, without that of the routers' seconds in that time."""

        async def call(share: int) -> None:
            for _ in range(share):
                await self._single(notify=notify)

        share, begin = number // CALLERS, self._refreshes()
        spent = await self._spent(asyncio.gather(*(call(share) for _ in range(CALLERS))))
        return spent.without(idle, self._refreshes() - begin).each(share * CALLERS)

    async def _single(self, *, notify: bool) -> None:
        number = next(self._numbers)
        active = self.routers[:ACTIVE]
        asked, worker = active[number % len(active)], active[(number + 1) % len(active)]
        lane, job_id = LANES[number % len(LANES)], f"job-{number}"
        answer = asked.answers[job_id] = asyncio.get_running_loop().create_future()
        deadline_ms = asked.lanes.clock_ms() + 3_600_000
        job = QueuedJob(job_id, "tenant", 1.0, 20, deadline_ms, "interactive", PAYLOAD)
        await asked.lanes.enqueue(lane, [[job]], max_tokens=10**9, notify=notify)
        # Another caller may have pulled it by now, and answers it.
        pulled = await worker.lanes.pull(lane, budget_tokens=20, budget_jobs=1, worker_id="w")
        if isinstance(pulled, Pulled):
            results = [(one.job_id, RESULT) for one in pulled.jobs]
            done = await worker.lanes.complete(lane, "w", pulled.batch_id, results, release=True)
            for job_id, result in done.own:
                worker.answers.pop(job_id).set_result(result)
        await answer

    async def _spent(self, work: Awaitable[object]) -> Spent:
        redis, own = await self._redis_seconds(), time.process_time()
        await work
        own = time.process_time() - own
        now = await self._redis_seconds()
        return Spent(tuple(b - a for a, b in zip(redis, now, strict=True)), own)

    async def _redis_seconds(self) -> list[float]:
        found = await asyncio.gather(
            *(master.info("cpu") for master in list_masters(self.routers[0].redis))
        )
        used = cast("list[dict[str, float]]", found)
        return [one["used_cpu_user"] + one["used_cpu_sys"] for one in used]


async def measure(
    url: str, routers: int, slots: int, seconds: float, singles: int
) -> ConnectionCosts:
    async with AsyncExitStack() as stack:
        probe = connect(url, slots=slots)
        stack.push_async_callback(probe.aclose)
        await _check(Lanes(probe, router_id="probe", dead_result=b"", slots=slots))
        before = await _clients(probe)
        made = [IdleRouter(url, f"router-{number}", slots) for number in range(routers)]
        for router in made:
            await stack.enter_async_context(router.running())
        masters = list_masters(made[0].redis)
        after = await _clients(made[0].redis)
        mesh = ConnectedRouters(made)
        idle = await mesh.idle(seconds)
        await mesh.singles(singles // 10, idle, notify=True)
        single = await mesh.singles(singles, idle, notify=False)
        wakeup = (await mesh.singles(singles, idle, notify=True)).without(single, 1)
        wakeup = Spent(wakeup.redis, wakeup.own / routers)
        return ConnectionCosts(
            routers,
            len(masters),
            after[0] - before[0],
            after[1] - before[1],
            idle,
            single,
            wakeup,
        )


async def _check(lanes: Lanes) -> None:
    """Check the server once it has started."""
    async with asyncio.timeout(START_SECONDS):
        while True:
            with suppress(NoCapacity):
                await lanes.check()
                return
            await asyncio.sleep(0.1)


async def _clients(redis: Redis) -> tuple[int, int]:
    """Return the number of connections to all masters, and the memory of the masters."""
    connections = memory = 0
    for master in list_masters(redis):
        clients: Any = await master.info("clients")
        used: Any = await master.info("memory")
        connections += clients["connected_clients"]
        memory += used["used_memory"]
    return connections, memory


async def _single_redis(
    routers: Sequence[int], seconds: float, singles: int
) -> list[ConnectionCosts]:
    results = []
    for number in routers:
        with workplace(None) as place:
            arguments = redis_arguments(find_redis_server(), place.redis)
            environment = child_environment("redis", os.environ)
            async with Child("redis", arguments, environment, place.logs / "redis.log"):
                url = f"unix://{place.redis / 'redis.sock'}"
                results.append(await measure(url, number, 1, seconds, singles))
                _show(results[-1])
    return results


def _clusters(masters: Sequence[int], seconds: float, singles: int) -> list[ConnectionCosts]:
    results = []
    for number in masters:
        with RedisCluster(masters=number) as nodes:
            results.append(asyncio.run(measure(nodes.url, 2, CLUSTER_SLOTS, seconds, singles)))
        _show(results[-1])
    return results


def _show(result: ConnectionCosts) -> None:
    """Print a result as soon as it is measured: many routers take minutes."""
    print(json.dumps(asdict(result)), flush=True, file=sys.stderr)


def _table(title: str, results: Sequence[ConnectionCosts]) -> Table:
    table = Table(title=title)
    for name in (
        "routers",
        "masters",
        "connections",
        "their memory",
        "idle: Redis / router",
        "single: Redis / rest",
        "of each master",
        "wakeup: Redis / each router",
        "cores of Redis, 1,000 singles/s",
        "singles/s of a mesh",
        "tokens/s of a mesh",
    ):
        table.add_column(name, justify="right")
    for one in results:
        table.add_row(
            f"{one.routers:,}",
            f"{one.masters:,}",
            f"{one.connections:,}",
            f"{one.redis_bytes / 1e6:,.1f} MB",
            f"{_micros(one.idle)} µs",
            f"{_micros(one.single)} µs",
            " ".join(f"{seconds * 1e6:,.0f}" for seconds in one.single.redis),
            f"{_micros(one.wakeup)} µs",
            f"{one.cores(1000):.2f}",
            f"{one.singles(BUSY):,.0f}",
            f"{one.singles(BUSY) * TEXT_TOKENS:,.0f}",
        )
    return table


def _micros(spent: Spent) -> str:
    return f"{sum(spent.redis) * 1e6:,.0f} / {spent.own * 1e6:,.0f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--routers", type=int, action="append", help="default: 2, 10, 100 and 300")
    parser.add_argument("--masters", type=int, action="append", help="default: 1, 2 and 3")
    parser.add_argument("--seconds", type=float, default=5.0, help="of idling")
    parser.add_argument("--singles", type=int, default=4000, help="of each kind")
    parser.add_argument("--json", type=Path, help="also write everything to this file")
    wanted = parser.parse_args()
    single = asyncio.run(
        _single_redis(wanted.routers or (2, 10, 100, 300), wanted.seconds, wanted.singles)
    )
    clusters = _clusters(wanted.masters or (1, 2, 3), wanted.seconds, wanted.singles)
    console = Console(width=220)
    console.print(f"{platform.machine()}, Python {platform.python_version()}")
    console.print(_table("routers on one Redis", single))
    console.print(_table("two routers on a Redis Cluster", clusters))
    if wanted.json:
        wanted.json.write_text(json.dumps([asdict(one) for one in (*single, *clusters)], indent=2))


if __name__ == "__main__":
    main()
