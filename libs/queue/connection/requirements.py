"""Requirements on a Redis server that holds the queue: version 6.2 or newer, no eviction of keys,
and data of this version's layout. On a cluster they apply to each master.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import nullcontext
from typing import cast

from redis.asyncio import Redis
from redis.exceptions import NoPermissionError, RedisError

from libs.errors import NoCapacity
from libs.queue.connection.client import translate, translated
from libs.queue.connection.cluster import (
    ClusterRedis,
    client_for_key,
    list_masters,
    within_master_timeout,
)
from libs.queue.keys import LAYOUT, layout_value
from libs.telemetry.logs import fields

log = logging.getLogger(__name__)

OLDEST = (6, 2)


class UnsuitableRedis(Exception):
    """The Redis server cannot hold the queue: it is too old, may evict queued work, does not permit
    INFO to Shoal's user, or holds data of another layout. The message says how to fix it.
    """


async def check_redis(redis: Redis, *, slots: int = 1, again: bool = False) -> bool:
    """Raise UnsuitableRedis unless the server can hold the queue and its data has this version's
    layout; NoCapacity if it does not respond.

    On a cluster, masters that do not respond are skipped if at least one responds. Returns False if
    one was skipped, so that the check must be repeated (`redis_check.py`).

    Args:
        slots: The number of slots, which is part of the layout.
        again: The server replaced one that passed. Then unsuitable settings (version, eviction of
            keys) are only logged: routers enqueue lost jobs again, and stopping the mesh would not
            help any client.
    """
    is_complete = True
    try:
        is_complete = await _check_servers(redis)
    except UnsuitableRedis as error:
        if not again:
            raise
        log.error("redis is unsuitable", extra=fields({"error": str(error)}))
    holder, ours = client_for_key(redis, LAYOUT), layout_value(slots)
    may_be_away = again and isinstance(redis, ClusterRedis)
    try:
        async with within_master_timeout() if may_be_away else nullcontext():
            with translated():
                await holder.set(LAYOUT, ours, nx=True)
                found = cast("bytes | None", await holder.get(LAYOUT))
    except NoCapacity:
        if not may_be_away:
            raise
        return False
    layout = ours if found is None else found.decode(errors="replace")
    if layout != ours:
        raise UnsuitableRedis(
            f"Redis holds layout {layout} ({LAYOUT}), but this version of Shoal reads layout"
            f" {ours}: run the version that wrote it with the same SHOAL_QUEUE_SLOTS, or drain that"
            " mesh first and start this one on an empty Redis"
        )
    return is_complete


async def _check_servers(redis: Redis) -> bool:
    """Raise the error of `_check_server` for the first unsuitable master, and NoCapacity if no
    master responds. Returns whether all responded.
    """
    if not isinstance(redis, ClusterRedis):
        await _check_server(redis)
        return True
    with translated():
        await redis.topology.refresh()

    async def check(master: Redis) -> None:
        async with within_master_timeout():
            await _check_server(master)

    found = await asyncio.gather(*map(check, list_masters(redis)), return_exceptions=True)
    errors = [error for error in found if error is not None]
    for error in errors:
        if not isinstance(error, NoCapacity):
            raise error
    if len(errors) == len(found):
        raise errors[0]
    return not errors


async def _check_server(redis: Redis) -> None:
    """Raise UnsuitableRedis if the server is older than 6.2 or may evict keys, NoCapacity if it
    does not respond.
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
