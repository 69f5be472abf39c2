"""A Redis or Valkey Cluster: which master holds each hash slot, and clients that follow it.

A client stands for the keys of one hash tag, which are all on one master. The clients of a master
share its connections, so there is one line for scripts a master. When a master refuses a tag
(MOVED), fails, or is replaced, the topology is read again from any node, and the clients of the tag
continue at the new master.

While a slot moves key by key, ASK is followed for commands and scripts of one key. Scripts of
several keys fail (TRYAGAIN) unless all their keys are in one place.

redis-py's RedisCluster is not used: it has no pipelined connection, sends ASKING and its command on
different connections, and fails at once when all connections are in use (redis-py 8.1).
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, Final, TypeVar

import hiredis
from redis.asyncio import BlockingConnectionPool, ConnectionPool, Redis
from redis.asyncio.client import Pipeline
from redis.asyncio.retry import Retry
from redis.backoff import ExponentialWithJitterBackoff, NoBackoff
from redis.crc import key_slot
from redis.exceptions import (
    AskError,
    AuthenticationError,
    ClusterDownError,
    MovedError,
    NoPermissionError,
    ReadOnlyError,
    RedisError,
    ResponseError,
    TryAgainError,
)
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError

from libs.environment import is_loopback_host
from libs.errors import NoCapacity
from libs.queue.connection.pipeline import PipelinedRedis, Reply, ServerConnections
from libs.queue.connection.sentinel import NoMaster
from libs.telemetry.logs import fields

log = logging.getLogger(__name__)

T = TypeVar("T")
Address = tuple[str, int]

HASH_SLOTS: Final = 16_384
MASTER_SECONDS: Final = 2.0
"""Time for which work on many lanes waits for one master. A worker's heartbeat, which renews leases
on all of them, has 5 s.
"""
TOPOLOGY_SECONDS: Final = 1.0
"""A node that takes longer to return the topology is skipped."""
REFRESH_SECONDS: Final = 0.1
"""The topology is read at most this often, however many calls fail."""
MAX_ASKED: Final = 8
"""Maximum nodes asked for the topology before the call that needs it fails."""
MAX_MASTERS: Final = 1000
"""The largest cluster that Redis supports."""
_CLUSTER_RETRIES: Final = 5
"""A call is repeated this often, over about half a second. Then it fails, as if Redis were
unreachable.
"""
_SLOW_FAILURE_SECONDS: Final = 1.0
_SLOW_COST: Final = 3
"""A failure that took longer, such as a timeout, counts as this many failures."""
_FAILED: Final = (RedisConnectionError, RedisTimeoutError, ClusterDownError, ReadOnlyError)
"""Errors of a master that is unavailable, has lost the cluster, or has become a replica."""
_MIGRATING: Final = (AskError, TryAgainError)
"""Errors while the keys of a slot move one by one, and MovedError, a subclass of AskError."""
_DEMOTED: Final = "UNBLOCKED"
"""The error of a blocking command at a master that has become a replica."""
_BEYOND: Final = (
    "the cluster names a master on another machine, and traffic would be plain text"
    " (SHOAL_ALLOW_INSECURE=1 allows it)"
)


class ClusterRedis(PipelinedRedis):
    """The client for the keys of one hash slot. It always uses the connections of the slot's
    master.
    """

    topology: ClusterTopology

    @classmethod
    def for_topology(cls, topology: ClusterTopology, server: ServerConnections) -> ClusterRedis:
        client = cls.for_server(server)
        client.topology = topology
        return client

    def move_to(self, server: ServerConnections) -> None:
        """Continue at another master."""
        self.server = server
        self.connection_pool = server.pool

    async def execute_command(self, *args: Any, **options: Any) -> Reply:
        return await self.topology.follow(
            self,
            partial(super().execute_command, *args, **options),
            lambda target: target.execute_command(*args, **options),
        )

    def pipeline(self, transaction: bool = True, shard_hint: str | None = None) -> Pipeline:
        return _ClusterPipeline(self, transaction, shard_hint)

    async def aclose(self, close_connection_pool: bool | None = None) -> None:
        """Close the connections of all clients of the cluster."""
        await self.topology.aclose()

    async def _call(self, *command: Any) -> Reply:
        return await self.topology.follow(
            self,
            partial(self._send, hiredis.pack_command(command)),
            lambda target: target.execute_command(*command),
        )

    async def _send(self, packed: bytes) -> Reply:
        line = self.server.line
        if line is None or line.error is not None:
            line = await self.server.open()
        return await line.send(packed)


class _AskingRedis(Redis):
    """A client of a master that is receiving the keys of a slot one by one. It serves the keys that
    have moved only to commands that follow ASKING.
    """

    async def _send_command_parse_response(
        self, conn: Any, command_name: Any, *args: Any, **options: Any
    ) -> Reply:
        await conn.send_command("ASKING")
        await conn.read_response()
        await conn.send_command(*args)
        return await self.parse_response(conn, command_name, **options)


class _ClusterPipeline(Pipeline):
    """Commands on keys of one master. All are sent again if one of them is refused or the
    connection ends, so they must be safe to repeat.
    """

    def __init__(self, client: ClusterRedis, transaction: bool, shard_hint: str | None) -> None:
        super().__init__(client.connection_pool, client.response_callbacks, transaction, shard_hint)
        self._client = client

    async def execute(self, raise_on_error: bool = True) -> list[Any]:
        commands = list(self.command_stack)
        return await self._client.topology.follow(
            self._client,
            partial(self._attempt, commands, raise_on_error),
            lambda _: self._execute_each(commands),
        )

    async def _attempt(self, commands: list[Any], raise_on_error: bool) -> list[Any]:
        self.command_stack = list(commands)
        self.connection_pool = self._client.connection_pool
        return await super().execute(raise_on_error)

    async def _execute_each(self, commands: list[Any]) -> list[Any]:
        """Execute each command where its key is, because some keys of the slot have moved."""
        return [await self._client.execute_command(*args, **options) for args, options in commands]


class ClusterTopology:
    """The masters of a cluster, by hash slot."""

    def __init__(
        self, seeds: Sequence[Address], options: Mapping[str, Any], *, is_plain: bool
    ) -> None:
        """
        Args:
            seeds: Addresses of some nodes. Until the topology is known, the first counts as the
                master of all slots.
            options: Of a BlockingConnectionPool, without host and port; `timeout` is the time
                that a reply may take.
            is_plain: Masters on other machines are refused.
        """
        self._seeds = list(seeds)
        self._options = {**options, "retry": Retry(NoBackoff(), 0)}
        self._is_plain = is_plain
        # The state: the connections by address; the master of each range of hash slots, and whether
        # a node has named it; a client for each hash slot that was used; the read of the topology
        # that runs or ran last, and when it ended (the loop's clock); connections that are being
        # closed.
        self._servers: dict[Address, ServerConnections] = {}
        self._ranges: list[tuple[int, int, Address]] = [(0, HASH_SLOTS - 1, self._seeds[0])]
        self._is_known = False
        self._clients: dict[int, ClusterRedis] = {}
        self._reading: asyncio.Task[None] | None = None
        self._read_at = -math.inf
        self._closing: set[asyncio.Task[None]] = set()

    def client(self, key: str) -> ClusterRedis:
        """Return the client for all keys with the hash tag of this key."""
        slot = key_slot(key.encode())
        if slot not in self._clients:
            self._clients[slot] = ClusterRedis.for_topology(self, self._server(self._master(slot)))
        return self._clients[slot]

    @property
    def addresses(self) -> tuple[Address, ...]:
        """Return the addresses of the masters, sorted."""
        return tuple(sorted({address for _, _, address in self._ranges}))

    @property
    def servers(self) -> list[ServerConnections]:
        """Return the connections of each master."""
        return [self._server(address) for address in self.addresses]

    def masters(self) -> list[PipelinedRedis]:
        """Return a client for each master, for commands without keys. They do not follow a
        failover.
        """
        return [PipelinedRedis.for_server(server) for server in self.servers]

    async def follow(
        self,
        client: ClusterRedis,
        attempt: Callable[[], Awaitable[T]],
        ask: Callable[[Any], Awaitable[T]],
    ) -> T:
        """Await the attempt, and again after errors that a change of the topology explains. Raises
        the last error.

        Args:
            ask: The attempt at the given client of the master that has the key while the slot
              moves.
        """
        target: Redis | None = None
        pauses, failures = ExponentialWithJitterBackoff(base=0.01, cap=0.2), 0
        loop = asyncio.get_running_loop()
        while True:
            server, begin = client.server, loop.time()
            try:
                return await (attempt() if target is None else ask(target))
            except RedisError as error:
                failures += _SLOW_COST if loop.time() - begin > _SLOW_FAILURE_SECONDS else 1
                if failures > _CLUSTER_RETRIES or not _is_followed(error):
                    raise
                target = await self._recover(error, server)
            if target is None:
                await asyncio.sleep(pauses.compute(failures))

    async def refresh(self, avoid: Address | None = None) -> None:
        """Read the topology; concurrent callers share one read.

        Args:
            avoid: A node that failed, to be asked last.

        Raises NoMaster, or the error of the last node if our user or password is refused.
        """
        await asyncio.shield(self._start_reading(avoid))

    async def aclose(self) -> None:
        if self._reading is not None:
            self._reading.cancel()
        await asyncio.gather(*(server.close() for server in self._servers.values()))
        if self._closing:
            await asyncio.wait(self._closing)

    async def _recover(self, error: RedisError, server: ServerConnections) -> Redis | None:
        """Prepare the next attempt after `server` failed or refused a call. Returns the client for
        that attempt if another master must be asked.
        """
        address = self._address(server)
        if isinstance(error, AskError):
            master = (error.host or (address or self._seeds[0])[0], error.port)
            self._check(master)
            if not isinstance(error, MovedError):
                return _AskingRedis(connection_pool=self._server(master).pool)
            if (client := self._clients.get(error.slot_id)) is not None:
                client.move_to(self._server(master))
            self._start_reading()  # other slots have moved, too
        elif not isinstance(error, TryAgainError):
            await self.refresh(avoid=address)
        return None

    def _start_reading(self, avoid: Address | None = None) -> asyncio.Task[None]:
        if self._reading is None or self._reading.done():
            self._reading = asyncio.create_task(self._read(avoid))
            self._reading.add_done_callback(_retrieve)
        return self._reading

    async def _read(self, avoid: Address | None) -> None:
        await asyncio.sleep(self._read_at + REFRESH_SECONDS - asyncio.get_running_loop().time())
        errors: list[Exception] = []
        try:
            for address in self._order(avoid)[:MAX_ASKED]:
                try:
                    async with asyncio.timeout(TOPOLOGY_SECONDS):
                        reply = await self._ask(address)
                    ranges = _ranges(reply, address)
                except (RedisError, OSError, TimeoutError, ValueError) as error:
                    errors.append(error)
                    continue
                for _, _, master in ranges:
                    self._check(master)
                self._adopt(ranges)
                return
            raise _explain(errors)
        finally:
            self._read_at = asyncio.get_running_loop().time()

    def _order(self, avoid: Address | None) -> list[Address]:
        """Return the known nodes in the order in which they are asked for the topology."""
        masters, seeds = (
            random.sample(nodes, len(nodes)) for nodes in (self.addresses, self._seeds)
        )
        nodes = dict.fromkeys([*masters[: MAX_ASKED // 2], *seeds, *masters])
        return sorted(nodes, key=lambda address: address == avoid)

    async def _ask(self, address: Address) -> Any:
        options = {
            name: value
            for name, value in self._options.items()
            if name not in ("timeout", "max_connections")
        }
        options |= {
            "socket_timeout": TOPOLOGY_SECONDS,
            "socket_connect_timeout": TOPOLOGY_SECONDS,
        }
        client: Any = Redis.from_pool(ConnectionPool(host=address[0], port=address[1], **options))
        try:
            return await client.execute_command("CLUSTER", "SLOTS")
        finally:
            await client.aclose()

    def _check(self, master: Address) -> None:
        if self._is_plain and not is_loopback_host(master[0]):
            raise NoMaster(_BEYOND)

    def _adopt(self, ranges: list[tuple[int, int, Address]]) -> None:
        before = self.addresses
        self._ranges = ranges
        if self._is_known and self.addresses != before:
            names = [f"{host}:{port}" for host, port in self.addresses]
            log.warning("redis has other masters", extra=fields({"masters": ", ".join(names)}))
        self._is_known = True
        for slot, client in self._clients.items():
            client.move_to(self._server(self._master(slot, client.server)))
        used = {id(client.server) for client in self._clients.values()}
        for address, server in list(self._servers.items()):
            if address not in self.addresses and id(server) not in used:
                # Blocked and subscribed connections end, too: no message would arrive there.
                del self._servers[address]
                closing = asyncio.create_task(server.close())
                self._closing.add(closing)
                closing.add_done_callback(self._closing.discard)

    def _master(self, slot: int, current: ServerConnections | None = None) -> Address:
        """Return the address of a slot's master; if no node names one, its `current` one."""
        for first, last, address in self._ranges:
            if first <= slot <= last:
                return address
        return (self._address(current) if current else None) or self._seeds[0]

    def _server(self, address: Address) -> ServerConnections:
        if address not in self._servers:
            pool = BlockingConnectionPool(host=address[0], port=address[1], **self._options)
            self._servers[address] = ServerConnections(
                pool, answer_seconds=self._options["timeout"]
            )
        return self._servers[address]

    def _address(self, server: ServerConnections) -> Address | None:
        return next((address for address, one in self._servers.items() if one is server), None)


def client_for_key(redis: Redis, key: str) -> Redis:
    """Return the client for all keys with the hash tag of this key: `redis` itself unless it is a
    cluster's.
    """
    return redis.topology.client(key) if isinstance(redis, ClusterRedis) else redis


def list_masters(redis: Redis) -> list[Redis]:
    """Return a client for each master of the cluster, or the only client."""
    return [*redis.topology.masters()] if isinstance(redis, ClusterRedis) else [redis]


@asynccontextmanager
async def within_master_timeout() -> AsyncGenerator[None]:
    """Raise NoCapacity after MASTER_SECONDS, so that a master that does not answer delays no work
    for the others.
    """
    try:
        async with asyncio.timeout(MASTER_SECONDS):
            yield
    except TimeoutError:
        raise NoCapacity("a master of the queue (Redis) does not answer") from None


def _is_followed(error: RedisError) -> bool:
    if isinstance(error, AuthenticationError) or isinstance(error.__cause__, AuthenticationError):
        return False
    return isinstance(error, (*_FAILED, *_MIGRATING)) or str(error).startswith(_DEMOTED)


def _ranges(reply: Any, asked: Address) -> list[tuple[int, int, Address]]:
    """Parse CLUSTER SLOTS. A node that does not know its host is at the asked one. Raises
    ValueError.
    """
    try:
        ranges = [
            (int(first), int(last), ((master[0] or b"").decode() or asked[0], int(master[1])))
            for first, last, master, *_ in reply
        ]
    except (TypeError, AttributeError, IndexError) as error:
        raise ValueError("not a reply to CLUSTER SLOTS") from error
    if not ranges or len({address for _, _, address in ranges}) > MAX_MASTERS:
        raise ValueError("the cluster has no masters, or too many")
    return ranges


def _explain(errors: Sequence[Exception]) -> Exception:
    """Return the error for a cluster of which no node returned the topology, without addresses."""
    for error in errors:
        if isinstance(error, (AuthenticationError, NoPermissionError)) or isinstance(
            error.__cause__, AuthenticationError
        ):
            return error
        if isinstance(error, RedisConnectionError) and "certificate" in str(error).lower():
            return error
    if any(isinstance(error, ResponseError) for error in errors):
        return NoMaster("the server is not a node of a cluster: use redis:// for a single server")
    return NoMaster("no node of the cluster answers")


def _retrieve(task: asyncio.Task[None]) -> None:
    """Retrieve the task's error, because no call may be left that waits for it."""
    if not task.cancelled():
        task.exception()
