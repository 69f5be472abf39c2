"""The client of Redis: timeouts, retries, and the translation of its errors."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import hiredis
from redis.asyncio import BlockingConnectionPool, Connection, Redis
from redis.asyncio.client import PubSub
from redis.asyncio.connection import parse_url
from redis.asyncio.retry import Retry
from redis.backoff import ExponentialWithJitterBackoff
from redis.exceptions import (
    AskError,
    AuthenticationError,
    ClusterDownError,
    MovedError,
    NoPermissionError,
    NoScriptError,
    OutOfMemoryError,
    ReadOnlyError,
    RedisError,
    ResponseError,
    TryAgainError,
)
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError

from libs.errors import NoCapacity
from libs.queue.connection.cluster import ClusterRedis, ClusterTopology
from libs.queue.connection.pipeline import PipelinedRedis
from libs.queue.connection.sentinel import NoMaster, master_pool
from libs.queue.connection.trust import PasswordFile, RedisTrust, TlsConnection
from libs.queue.connection.urls import ClusterUrl, SentinelUrl, check_redis_url, is_tls, servers

ANSWER_SECONDS = 5.0
CONNECTIONS = 16
"""Maximum connections to a server."""
_SMALL_BYTES = 64 * 1024
"""A command of at most this size is written without waiting: the socket takes it at once, or little
of it is left to write.
"""
_REFUSALS = ("READONLY", "UNBLOCKED", "NOREPLICAS", "MISCONF", "MASTERDOWN", "BUSY")
"""Refusals, in order: a replica; a master that became one during a blocking command; a master with
fewer replicas than `min-replicas-to-write`; a server that cannot write its disk; one that lost its
primary; one that is busy with a script.

Errors raised within a script have no separate class, so their text is searched.
"""
_NOT_ALLOWED = ("The user executing the script can't", "ACL failure in script")
"""The texts of Redis before 7, and of Valkey, for NOPERM within a script."""


def connect(
    url: str,
    trust: RedisTrust | None = None,
    *,
    max_connections: int = CONNECTIONS,
    allow_insecure: bool = False,
    slots: int = 1,
) -> Redis:
    """Return a client for `url`: redis://, rediss://, unix://, redis+sentinel:// and
    rediss+sentinel:// for the master that Sentinels name, or redis+cluster:// and rediss+cluster://
    for the keys of `{fleet}` (`cluster.client_for_key` returns clients for other keys).

    It connects on first use, and again after every loss. A connection that does not answer within 5
    s is dropped. Retrying a command is safe: all scripts may run twice. Raises InvalidInput for an
    invalid URL, ValueError for unusable files of `trust`.

    Args:
        allow_insecure: Sentinels or a cluster may name a master on another machine even without
            TLS.
        slots: The number of reply lists that may be waited for at once. On a cluster that takes as
            many further connections to each master.
    """
    check_redis_url(url)
    trust, sentinels = trust or RedisTrust(), SentinelUrl.parse(url)
    options = {
        **_parsed(servers(url)[0], trust),
        "max_connections": max_connections,
        "timeout": ANSWER_SECONDS,
        "socket_timeout": ANSWER_SECONDS,
        "socket_connect_timeout": 3.0,
        "health_check_interval": 15,
        "retry": Retry(ExponentialWithJitterBackoff(base=0.01, cap=0.2), retries=2),
        "protocol": 2,
        # Otherwise redis-py sends CLIENT SETINFO, which Redis 6.2 does not know and our ACL users
        # may not run.
        "driver_info": None,
    }
    if (nodes := ClusterUrl.parse(url)) is not None:
        options["max_connections"] = max_connections + slots
        return _cluster(nodes, options, allow_insecure=allow_insecure).client("{fleet}")
    if sentinels is None:
        return PipelinedRedis.create(
            BlockingConnectionPool(**options), answer_seconds=ANSWER_SECONDS
        )
    pool = master_pool(
        sentinels,
        options,
        password_file=trust.sentinel_password_file,
        allow_insecure=allow_insecure,
    )
    return PipelinedRedis.create(pool, answer_seconds=ANSWER_SECONDS)


def _cluster(
    nodes: ClusterUrl, options: dict[str, Any], *, allow_insecure: bool
) -> ClusterTopology:
    own = {name: value for name, value in options.items() if name not in ("host", "port", "db")}
    is_plain = "context" not in options and not allow_insecure
    return ClusterTopology(nodes.addresses, own, is_plain=is_plain)


async def open_all(redis: Redis) -> None:
    """Fill the connection pool of `redis` at once, before its first use. Otherwise connections are
    opened one by one while many commands wait for them.

    Raises NoCapacity if a connection fails; of a cluster, if no master answers.
    """
    if not isinstance(redis, ClusterRedis):
        held = redis.server.held_connections if isinstance(redis, PipelinedRedis) else 0
        await _open(redis.connection_pool, held)
        return
    opened = await asyncio.gather(
        *(_open(server.pool, server.held_connections) for server in redis.topology.servers),
        return_exceptions=True,
    )
    if all(opened):
        raise next(error for error in opened if error)


async def _open(pool: Any, held: int) -> None:
    wanted = min(pool.max_connections, CONNECTIONS) - held
    opening = [asyncio.create_task(pool.get_connection()) for _ in range(wanted)]
    try:
        with translated():
            await asyncio.gather(*opening)
    finally:
        for task in opening:
            task.cancel()
        for connection in await asyncio.gather(*opening, return_exceptions=True):
            if not isinstance(connection, BaseException):
                await pool.release(connection)


class Subscriber(PubSub):
    """Subscriptions that end with their connection, by `RedisConnectionError`: the subscriber must
    subscribe again.

    redis-py's PubSub reconnects within the call, resubscribes while it reconnects, and reconnects
    again if that fails. While every new connection is reset, it recurses deeper each time, to a
    RecursionError (redis-py 8).
    """

    async def _execute(
        self, conn: Any, command: Callable[..., Awaitable[Any]], *args: Any, **kwargs: Any
    ) -> Any:
        return await command(*args, **kwargs)


class _Robust:
    """A mixin for redis-py connections on uvloop. Its transport raises RuntimeError for a write
    after the peer has closed it, and small commands are written without a task for each.
    """

    _writer: asyncio.StreamWriter | None
    is_connected: bool
    next_health_check: float

    async def send_packed_command(self, command: Any, check_health: bool = True) -> None:
        try:
            writer = self._free_writer(command, check_health)
            if writer is not None:
                writer.writelines(command)
            else:
                await super().send_packed_command(command, check_health)  # type: ignore[misc]
        except RuntimeError as error:
            raise RedisConnectionError(
                "the connection was closed before the command was written"
            ) from error

    def write_now(self, packed: bytes) -> None:
        """Write a packed command without waiting until the socket takes it. Raises
        RedisConnectionError.
        """
        if not self.is_connected or self._writer is None:
            raise RedisConnectionError("the connection was closed before the command was written")
        try:
            self._writer.write(packed)
        except RuntimeError as error:
            raise RedisConnectionError(
                "the connection was closed before the command was written"
            ) from error

    async def drained(self) -> None:
        """Wait until the socket has taken most of the written bytes. A broken connection is
        detected when it is read.
        """
        if self._writer is not None:
            with suppress(OSError):
                await self._writer.drain()

    def pack_command(self, *args: Any) -> list[bytes]:
        """Pack a command with hiredis. redis-py packs in Python and takes five times as long."""
        return [
            hiredis.pack_command(
                (*args[0].encode().split(), *args[1:]) if isinstance(args[0], str) else args
            )
        ]

    def _free_writer(self, command: Any, check_health: bool) -> asyncio.StreamWriter | None:
        """Return the writer if the command can be written at once, as nearly all can. redis-py
        creates a task for each write to limit its time.
        """
        writer = self._writer
        if not self.is_connected or writer is None or not isinstance(command, list):
            return None
        if check_health and asyncio.get_running_loop().time() >= self.next_health_check:
            return None
        is_free = (
            not writer.transport.get_write_buffer_size() and sum(map(len, command)) <= _SMALL_BYTES
        )
        return writer if is_free else None


def _robust(kind: type[Connection]) -> type[Connection]:
    return type(kind.__name__, (_Robust, kind), {})


def _parsed(url: str, trust: RedisTrust) -> dict[str, Any]:
    """Return the arguments of a connection pool for the URL, with the TLS context and credentials
    of `trust`.
    """
    parsed: dict[str, Any] = {**parse_url(url)} | (
        {} if url.startswith("unix:") else {"socket_keepalive": True}
    )
    if is_tls(url):
        parsed |= {"connection_class": TlsConnection, "context": trust.contexts()}
    if trust.password_file is not None:
        user = parsed.pop("username", "")
        parsed |= {"credential_provider": PasswordFile(user, trust.password_file)}
    return parsed | {"connection_class": _robust(parsed.get("connection_class", Connection))}


def translate(error: RedisError) -> Exception:
    """Translate an error of Redis.

    Returns NoCapacity while Redis is unreachable, loading, out of memory or read-only, refuses our
    password, or has an ACL older than this version. Other errors are bugs and are returned
    unchanged.
    """
    if isinstance(error, AuthenticationError) or isinstance(error.__cause__, AuthenticationError):
        return NoCapacity("the queue (Redis) refuses our user name and password")
    if isinstance(error, NoPermissionError) or (
        isinstance(error, ResponseError) and any(word in str(error) for word in _NOT_ALLOWED)
    ):
        return NoCapacity(
            "the queue (Redis) does not let our user run a command:"
            " `shoal redis-acl` prints the required ACL"
        )
    if isinstance(error, RedisConnectionError) and "certificate" in str(error).lower():
        return NoCapacity(
            "the queue (Redis) cannot be reached: its certificate or ours is not trusted"
        )
    if isinstance(error, NoMaster):
        return NoCapacity(f"the queue (Redis) cannot be reached: {error}")
    if isinstance(error, MovedError):
        return NoCapacity(
            "the queue (Redis) keeps redirecting to other masters: a cluster needs"
            " SHOAL_REDIS_URL=redis+cluster://… or rediss+cluster://…"
        )
    if isinstance(error, (AskError, TryAgainError)):
        return NoCapacity(
            "the queue (Redis) is moving a slot to another master, key by key: use atomic slot"
            " migration, or drain the slot's lanes first"
        )
    if isinstance(error, ClusterDownError):
        return NoCapacity("the queue (Redis) has no master for a slot now")
    # NoScriptError: Redis lost a script that was just loaded.
    if isinstance(error, (RedisConnectionError, RedisTimeoutError, NoScriptError)):
        return NoCapacity("the queue (Redis) cannot be reached")
    if isinstance(error, OutOfMemoryError) or (
        isinstance(error, ResponseError) and "OOM" in str(error)
    ):
        return NoCapacity("the queue (Redis) is out of memory")
    if isinstance(error, ReadOnlyError) or (
        isinstance(error, ResponseError) and any(word in str(error) for word in _REFUSALS)
    ):
        return NoCapacity("the queue (Redis) accepts no writes now")
    return error


@contextmanager
def translated() -> Iterator[None]:
    """Raise Redis errors within the context as `translate` translates them."""
    try:
        yield
    except RedisError as error:
        raise translate(error) from error
