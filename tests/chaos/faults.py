"""Injection and repair of each kind of fault, and the moment at which the mesh has recovered.

A fault is a coroutine: the part before its `yield` harms the mesh, the part after it repairs the
damage that does not recover by itself, and returns once the mesh has recovered.
"""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Final, cast

import numpy as np
import shoal
from redis.asyncio import Redis
from redis.exceptions import RedisError
from shoal.errors import Unavailable

from libs.fleet import Fleet
from libs.queue.connection.client import ANSWER_SECONDS
from libs.queue.keys import slot_number
from tests.chaos import models
from tests.chaos.links import CUT, PASS, Way, narrow, silent, slow
from tests.chaos.plan import EVERYBODY, LEADER, Planned
from tests.chaos.stage import LEASE_SECONDS, NODE_TIMEOUT_SECONDS, QUEUE_SLOTS, Nodes, Stage
from tests.chaos.traffic import Traffic
from tests.support.redis_cluster import RedisCluster
from tests.support.sentinels import SentinelSet

BACK_SECONDS: Final = 180.0
"""A process that was started again and does not serve by then has failed the run."""
NEW_MODEL_SECONDS: Final = 150.0
"""A worker does not try a model again for a minute that it had no room for."""
_POLL_SECONDS: Final = 0.02
REDIS_BACK_SECONDS: Final = 3.0
"""Limit of a recovery from the moment that Redis answers again."""
ELECTION_SECONDS: Final = 2.0
"""The other masters elect the replica within 1 to 2 s after the node timeout, says the
specification of Redis Cluster. Sentinels have the same time.
"""
TAKEOVER_SECONDS: Final = NODE_TIMEOUT_SECONDS + ELECTION_SECONDS
_TAKEOVER_KINDS: Final = ("kill master", "fail over master")
"""Requests that are in flight when the replica takes over count, too."""
_NODE_KINDS: Final = (
    *(*_TAKEOVER_KINDS, "freeze master", "kill replica"),
    *("move slot", "kill sentinel"),
)
_MOVED_KEYS: Final = (
    *(
        f"{{{slot_number(model, QUEUE_SLOTS)}}}"
        for model in (models.DENSE, models.OTHER_DENSE, models.CLASSIFIER, models.GENERATIVE)
    ),
    "{fleet}",
    "{0}",
    "{1}",
)
"""The hash slots that move: those of the lanes, that of the workers and two without jobs."""

Count = str
"""The moment from which a recovery is counted: "begin", "back" (Redis answers again) or "end" of
the fault.
"""


@dataclass
class Fault:
    """One that happens. Monotonic seconds; `over`: when the last request in flight at the begin was
    answered, 0: not yet.
    """

    planned: Planned
    target: str = ""
    shard: tuple[int, int] = (0, 0)
    """The ports of the master and the replica, for a fault of a node."""
    began: float = 0.0
    ended: float = 0.0
    back: float = 0.0
    over: float = 0.0
    failure: str = ""

    @property
    def until(self) -> float:
        """Return the end of the period, from `began`, in which it disturbs others."""
        return max(self.ended, self.back, self.over)

    def recovery(self) -> float:
        """Seconds, counted as `limit` says."""
        since = {"begin": self.began, "back": self.back, "end": self.ended}[
            limit(self.planned.kind)[0]
        ]
        return max(0.0, self.over - since)


def limit(kind: str) -> tuple[Count, float | None]:
    """Return the start of the recovery of a kind and its limit in seconds, or None if it is only
    reported.
    """
    return {
        "kill worker": ("begin", LEASE_SECONDS + 1.0),
        "kill router": ("begin", 3.0),
        "kill redis": ("back", REDIS_BACK_SECONDS),
        "kill master": ("begin", TAKEOVER_SECONDS + REDIS_BACK_SECONDS),
        # A call sent just before the takeover waits for its answer until the connection is dropped.
        "freeze master": ("begin", TAKEOVER_SECONDS + ANSWER_SECONDS + REDIS_BACK_SECONDS),
        "fail over master": ("back", REDIS_BACK_SECONDS),
        "kill replica": ("begin", REDIS_BACK_SECONDS),
        "kill sentinel": ("begin", REDIS_BACK_SECONDS),
        "move slot": ("end", REDIS_BACK_SECONDS),
    }.get(kind, ("end", None))


class Faults:
    """Injects faults into a stage.

    Args:
        redis: a client that bypasses all links.
        expected: the result of a new model of the store for `text`.
    """

    def __init__(
        self, stage: Stage, redis: Redis, client: shoal.AsyncClient, text: str, expected: object
    ) -> None:
        self._stage = stage
        self._cluster = stage.cluster
        self._redis = redis
        self._client = client
        self._text, self._expected = text, expected
        self._later: list[asyncio.Future[None]] = []

    async def do(self, fault: Fault, traffic: Traffic) -> None:
        """Begins it, lets it last, ends it. Sets all times of `fault`; raises what went wrong in
        doing it.
        """
        planned = fault.planned
        fault.target = await self._leader() if planned.target == LEADER else planned.target
        if planned.kind in _NODE_KINDS:
            await self._choose_shard(fault)
        doing = self._kind(fault)
        in_flight = traffic.watch()
        fault.began = time.monotonic()
        await anext(doing)
        delayed = traffic.watch() if planned.kind in _TAKEOVER_KINDS else in_flight
        await asyncio.sleep(planned.seconds)
        with suppress(StopAsyncIteration):
            await anext(doing)
        fault.ended = fault.ended or time.monotonic()
        fault.over = max(await in_flight, await delayed)

    async def finished(self) -> None:
        """Wait also for the work that continues after a fault without disturbing others."""
        await asyncio.gather(*self._later)

    def _kind(self, fault: Fault) -> AsyncGenerator[None, None]:
        verb, _, what = fault.planned.kind.partition(" ")
        doing: dict[str, Callable[[Fault], AsyncGenerator[None, None]]] = {
            "kill": {
                "redis": self._redis_killed,
                "master": self._master_killed,
                "replica": self._replica_killed,
                "sentinel": self._sentinel_killed,
            }.get(what, self._killed),
            "stop": self._stopped,
            "freeze": self._master_frozen if what == "master" else self._frozen,
            "fail": self._master_failed_over,
            "move": self._slot_moved,
            "redis": self._redis_full,
            "flush": self._scripts_flushed,
            "wrong": self._wrong_redis_clock if what.endswith("redis") else self._wrong_clock,
            "slow": self._slow_disk if what.startswith("disk") else self._bad_link,
            "full": self._disk_full,
        }
        return doing.get(verb, self._bad_link)(fault)

    # Processes

    async def _killed(self, fault: Fault) -> AsyncGenerator[None, None]:
        epoch = await self._epoch(fault.target)
        await asyncio.to_thread(self._cluster.kill, fault.target)
        yield
        await self._start_again(fault, epoch)

    async def _stopped(self, fault: Fault) -> AsyncGenerator[None, None]:
        epoch = await self._epoch(fault.target)
        status = await asyncio.to_thread(self._cluster.stop, fault.target, 90.0)
        if status != 0:
            fault.failure = f"{fault.target} ended with status {status} on SIGTERM"
        yield
        await self._start_again(fault, epoch)

    async def _start_again(self, fault: Fault, epoch: str) -> None:
        fault.ended = time.monotonic()
        self._cluster.start(fault.target)
        if fault.target in self._cluster.workers:
            await self._until(
                lambda: self._is_another(fault.target, epoch), f"{fault.target} to report"
            )
        else:
            await self._until(lambda: self._listens(fault.target), f"{fault.target} to listen")
        fault.back = time.monotonic()

    async def _redis_killed(self, fault: Fault) -> AsyncGenerator[None, None]:
        await asyncio.to_thread(self._cluster.kill, "redis")
        yield
        fault.ended = time.monotonic()
        self._cluster.start("redis")
        await self._until(self._redis_answers, "Redis to answer")
        fault.back = time.monotonic()

    async def _frozen(self, fault: Fault) -> AsyncGenerator[None, None]:
        process = self._cluster.processes[
            fault.target
        ]  # this one, even if another replaces it during the fault
        process.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            process.send_signal(signal.SIGCONT)

    # Links

    async def _bad_link(self, fault: Fault) -> AsyncGenerator[None, None]:
        names = self._stage.links.matching(fault.target)
        way, resets = _way(fault.planned)
        await self._stage.links.set(names, way)
        yield
        if resets:  # the firewall on the way has forgotten its connections
            await self._stage.links.set(names, CUT)
        await self._stage.links.set(names, PASS)

    # Redis

    async def _redis_full(self, fault: Fault) -> AsyncGenerator[None, None]:
        # It takes no writes that need memory, whatever it holds.
        await self._command("CONFIG", "SET", "maxmemory", 1)
        try:
            yield
        finally:
            await self._command("CONFIG", "SET", "maxmemory", 0)

    async def _scripts_flushed(self, fault: Fault) -> AsyncGenerator[None, None]:
        await self._command("SCRIPT", "FLUSH")
        yield

    async def _command(self, *command: str | int) -> None:
        """Run a command at Redis, or at every node."""
        if self._stage.nodes is None:
            await self._redis.execute_command(*command)
        else:
            await asyncio.to_thread(self._stage.nodes.commands, *command)

    # The nodes of a Redis Cluster, or of a Redis with Sentinels

    async def _master_killed(self, fault: Fault) -> AsyncGenerator[None, None]:
        nodes, (master, replica) = self._nodes, fault.shard
        await asyncio.to_thread(nodes.kill, master)
        await asyncio.to_thread(nodes.wait_takeover, replica)
        fault.back = time.monotonic()
        yield
        fault.ended = time.monotonic()
        await asyncio.to_thread(nodes.restore)

    async def _master_frozen(self, fault: Fault) -> AsyncGenerator[None, None]:
        nodes, (master, _) = self._nodes, fault.shard
        with nodes.suspended(master):
            yield
        fault.ended = time.monotonic()
        await asyncio.to_thread(nodes.wait_whole)

    async def _master_failed_over(self, fault: Fault) -> AsyncGenerator[None, None]:
        nodes, (_, replica) = self._nodes, fault.shard
        await asyncio.to_thread(nodes.order_takeover, replica)
        fault.back = time.monotonic()
        yield
        await asyncio.to_thread(nodes.wait_whole)

    async def _replica_killed(self, fault: Fault) -> AsyncGenerator[None, None]:
        nodes, (_, replica) = self._nodes, fault.shard
        await asyncio.to_thread(nodes.kill, replica)
        yield
        fault.ended = time.monotonic()
        await asyncio.to_thread(nodes.restore)

    async def _sentinel_killed(self, fault: Fault) -> AsyncGenerator[None, None]:
        nodes = self._nodes
        assert isinstance(nodes, SentinelSet)
        port = nodes.sentinels[fault.planned.number % len(nodes.sentinels)]
        fault.target = f"sentinel {port}"
        await asyncio.to_thread(nodes.kill, port)
        yield
        fault.ended = time.monotonic()
        await asyncio.to_thread(nodes.restore)

    async def _slot_moved(self, fault: Fault) -> AsyncGenerator[None, None]:
        nodes = self._nodes
        assert isinstance(nodes, RedisCluster)
        key = _MOVED_KEYS[int(fault.planned.dice * len(_MOVED_KEYS))]
        source = await asyncio.to_thread(nodes.master_port, key)
        others = [port for port in await asyncio.to_thread(nodes.masters) if port != source]
        target = others[fault.planned.number % len(others)]
        moved = await asyncio.to_thread(nodes.move_slot, key, target)
        fault.ended = time.monotonic()
        fault.target = f"{key} with {moved} keys from node {source} to {target}"
        yield
        await asyncio.to_thread(nodes.wait_whole)

    async def _choose_shard(self, fault: Fault) -> None:
        """Choose a master and its replica, once all nodes are whole."""
        fault.began = time.monotonic()
        nodes = self._nodes
        await asyncio.to_thread(nodes.wait_whole)
        masters = await asyncio.to_thread(nodes.masters)
        master = masters[int(fault.planned.dice * len(masters))]
        fault.shard = master, await asyncio.to_thread(nodes.replica_port, master)
        fault.target = f"master {master}, replica {fault.shard[1]}"

    @property
    def _nodes(self) -> Nodes:
        assert self._stage.nodes is not None
        return self._stage.nodes

    # Clocks and disks

    async def _wrong_clock(self, fault: Fault) -> AsyncGenerator[None, None]:
        minutes = 2.0 + 4.0 * fault.planned.dice
        self._stage.set_clock(fault.target, minutes * 60 * (1 if fault.planned.number % 2 else -1))
        yield
        self._stage.set_clock(fault.target, 0.0)

    async def _wrong_redis_clock(self, fault: Fault) -> AsyncGenerator[None, None]:
        """Shift a server's clock by less than requests have time."""
        name = await self._redis_machine(fault)
        seconds = 5.0 + 10.0 * fault.planned.dice
        direction = 1 if fault.planned.number % 2 else -1
        self._stage.machines.change(name, clock_seconds=direction * seconds)
        yield
        self._stage.machines.change(name)

    async def _slow_disk(self, fault: Fault) -> AsyncGenerator[None, None]:
        # Redis waits for a synchronisation once it has taken two seconds.
        name = await self._redis_machine(fault)
        self._stage.machines.change(name, disk_seconds=2.0 + 2.0 * fault.planned.dice)
        yield
        self._stage.machines.change(name)

    async def _redis_machine(self, fault: Fault) -> str:
        """Return the name of the Redis, or of one of the masters."""
        if self._stage.nodes is None:
            return "redis"
        masters = await asyncio.to_thread(self._stage.nodes.masters)
        fault.target = f"master {masters[int(fault.planned.dice * len(masters))]}"
        return fault.target.removeprefix("master ")

    async def _disk_full(self, fault: Fault) -> AsyncGenerator[None, None]:
        workers = self._cluster.workers if fault.target == EVERYBODY else [fault.target]
        for worker in workers:
            await asyncio.to_thread(self._stage.fill_disk, worker)
        asking = asyncio.ensure_future(self._ask_new_model(await self._stage.new_model()))
        try:
            yield
        finally:
            for worker in workers:
                self._stage.free_disk(worker)
        fault.ended = time.monotonic()
        self._later.append(asyncio.ensure_future(self._note(fault, asking)))

    @staticmethod
    async def _note(fault: Fault, asking: Awaitable[str]) -> None:
        fault.failure = await asking

    async def _ask_new_model(self, model: str) -> str:
        """Ask until the model answers; return an empty string, or the fault in its answer. Errors
        with a retry delay are allowed until then.
        """
        end = time.monotonic() + NEW_MODEL_SECONDS
        while True:
            try:
                found = (
                    await self._client.encode(
                        model, [self._text], timeout=max(1.0, end - time.monotonic())
                    )
                ).dense
            except shoal.ShoalError as error:
                if time.monotonic() > end or not (
                    isinstance(error, Unavailable) and error.retry_after
                ):
                    return f"{model} with a full disk: {type(error).__name__}: {error}"
            else:
                return (
                    ""
                    if np.allclose(found, self._expected, atol=1e-5)  # type: ignore[arg-type]
                    else f"{model}: a wrong answer"
                )

    # Looking

    async def _leader(self) -> str:
        with suppress(RedisError, OSError):
            name = cast(bytes | None, await self._redis.hget("v1:{fleet}:leader", "scheduler"))
            if name:
                return name.decode()
        return self._cluster.schedulers[0]

    async def _epoch(self, worker: str) -> str:
        if worker not in self._cluster.workers:
            return ""
        with suppress(Exception):
            record = (await Fleet(self._redis).refresh()).workers.get(worker)
            return record.epoch if record is not None else ""
        return ""

    async def _is_another(self, worker: str, epoch: str) -> bool:
        return (await self._epoch(worker)) not in ("", epoch)

    async def _listens(self, name: str) -> bool:
        host, port = self._stage.listens(name)
        try:
            _, writer = await asyncio.open_connection(host, port)
        except OSError:
            return False
        writer.close()
        return True

    async def _redis_answers(self) -> bool:
        try:
            return bool(await self._redis.ping())
        except (RedisError, OSError):
            return False

    async def _until(self, is_so: Callable[[], Awaitable[bool]], what: str) -> None:
        end = time.monotonic() + BACK_SECONDS
        while not await is_so():
            if time.monotonic() > end:
                raise TimeoutError(f"waited {BACK_SECONDS:g} s for {what}")
            await asyncio.sleep(_POLL_SECONDS)


def _way(planned: Planned) -> tuple[Way, bool]:
    """Return the link's new state, and whether its connections are reset in the end."""
    dice = planned.dice
    match planned.kind.split()[0]:
        case "cut":
            return CUT, False
        case "silence":
            return silent("both"), dice < 0.5
        case "half":
            return silent("up" if dice < 0.5 else "down"), planned.number % 2 == 0
        case "slow":
            return slow(0.01 + 0.2 * dice, 0.1 * dice), False
        case _:
            return narrow(20_000 + 200_000 * dice), False
