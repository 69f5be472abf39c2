"""The connection to Redis: time limits, retries, what the server must be, and errors in our words."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from redis.asyncio import BlockingConnectionPool, Redis
from redis.asyncio.retry import Retry
from redis.backoff import ExponentialWithJitterBackoff
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import OutOfMemoryError, ReadOnlyError, RedisError, ResponseError
from redis.exceptions import TimeoutError as RedisTimeoutError

from libs.errors import NoCapacity

OLDEST = (6, 2)
ANSWER_SECONDS = 5.0
_REFUSALS = ("READONLY", "MISCONF", "MASTERDOWN", "BUSY")
"""A replica, a server that cannot write its disk or lost its primary, one that is busy. From a script they come as plain errors."""


class UnsuitableRedis(Exception):
    """The Redis server is too old, or may throw queued work away. Says what to change."""


def connect(url: str, *, max_connections: int = 16) -> Redis:
    """A client for `url` (redis://, rediss://, unix://). Connects on first use, and again after every loss.

    Every connection answers within 5 s or is dropped. Repeating a command is safe: all scripts may run twice.
    """
    pool = BlockingConnectionPool.from_url(
        url,
        max_connections=max_connections,
        timeout=ANSWER_SECONDS,
        socket_timeout=ANSWER_SECONDS,
        socket_connect_timeout=3.0,
        **({} if url.startswith("unix:") else {"socket_keepalive": True}),
        health_check_interval=15,
        retry=Retry(ExponentialWithJitterBackoff(base=0.01, cap=0.2), retries=2),
        protocol=2,
    )
    return Redis.from_pool(pool)


async def check(redis: Redis) -> None:
    """UnsuitableRedis if the server is older than 6.2 or may evict keys; NoCapacity if it does not answer."""
    with translated():
        server = await redis.info("server")
        memory = await redis.info("memory")
    version = str(server["redis_version"])
    if tuple(int(part) for part in version.split(".")[:2]) < OLDEST:
        raise UnsuitableRedis(f"Redis {version} is too old: Shoal needs 6.2 or newer")
    policy = memory["maxmemory_policy"]
    if policy != "noeviction":
        raise UnsuitableRedis(
            f"Redis may evict queued work (maxmemory-policy is {policy}): set it to noeviction, with "
            "`redis-cli CONFIG SET maxmemory-policy noeviction` and in redis.conf or the provider's parameter group"
        )


def translate(error: RedisError) -> Exception:
    """NoCapacity while Redis is away, loading, full or takes no writes; other errors are bugs of ours and stay as they are."""
    if isinstance(error, (RedisConnectionError, RedisTimeoutError)):
        return NoCapacity("the queue (Redis) cannot be reached")
    if isinstance(error, OutOfMemoryError) or (isinstance(error, ResponseError) and "OOM" in str(error)):
        return NoCapacity("the queue (Redis) is out of memory")
    if isinstance(error, ReadOnlyError) or (isinstance(error, ResponseError) and any(word in str(error) for word in _REFUSALS)):
        return NoCapacity("the queue (Redis) takes no writes now")
    return error


@contextmanager
def translated() -> Iterator[None]:
    """Raises `translate`'s error for Redis' own."""
    try:
        yield
    except RedisError as error:
        raise translate(error) from error
