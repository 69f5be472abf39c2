"""Requirements on a Redis server that holds the queue: version 6.2 or newer, no eviction of keys,
and data of our layout.
"""

from __future__ import annotations

import logging
from typing import cast

from redis.asyncio import Redis
from redis.exceptions import NoPermissionError, RedisError

from libs.queue.connection.client import translate, translated
from libs.queue.keys import LAYOUT
from libs.telemetry.logs import fields
from libs.versions import LAYOUT_VERSION

log = logging.getLogger(__name__)

OLDEST = (6, 2)


class UnsuitableRedis(Exception):
    """The Redis server cannot hold the queue: it is too old, may evict queued work, forbids INFO to
    our user, or holds another layout. The message names the fix.
    """


async def check_redis(redis: Redis, *, again: bool = False) -> None:
    """Raise UnsuitableRedis unless the server can hold the queue and its data has our layout.

    Args:
        again: The server replaced one that passed. Then unsuitable settings (version, eviction of
            keys) are only logged: routers enqueue lost jobs again, and stopping the mesh would
            serve no client.
    """
    try:
        await _check_server(redis)
    except UnsuitableRedis as error:
        if not again:
            raise
        log.error("redis is unsuitable", extra=fields({"error": str(error)}))
    with translated():
        await redis.set(LAYOUT, LAYOUT_VERSION, nx=True)
        found = cast("bytes | None", await redis.get(LAYOUT))
    layout = str(LAYOUT_VERSION) if found is None else found.decode(errors="replace")
    if layout != str(LAYOUT_VERSION):
        raise UnsuitableRedis(
            f"Redis holds layout {layout} ({LAYOUT}), but this version of Shoal reads layout"
            f" {LAYOUT_VERSION}: run the version that wrote it, or drain that mesh first and start"
            " this one on an empty Redis"
        )


async def _check_server(redis: Redis) -> None:
    """Raise UnsuitableRedis if the server is older than 6.2 or may evict keys, NoCapacity if it
    does not answer.
    """
    try:
        server = await redis.info("server")
        memory = await redis.info("memory")
    except NoPermissionError as error:
        raise UnsuitableRedis(
            f"our Redis user may not run INFO ({error}): `shoal redis-acl` prints the required ACL"
        ) from error
    except RedisError as error:
        raise translate(error) from error
    version = str(server["redis_version"])
    if tuple(int(part) for part in version.split(".")[:2]) < OLDEST:
        raise UnsuitableRedis(f"Redis {version} is too old: Shoal needs 6.2 or newer")
    policy = memory["maxmemory_policy"]
    if policy != "noeviction":
        raise UnsuitableRedis(
            f"Redis may evict queued work (maxmemory-policy is {policy}): set it to noeviction,"
            " with `redis-cli CONFIG SET maxmemory-policy noeviction` and in redis.conf or the"
            " provider's parameter group"
        )
