"""Publish/subscribe between processes.

A Redis Cluster sends each message of a channel to all its nodes. That suits notifications, which
are short and for all routers. Messages for one router use its shard channel (Redis 7, Valkey),
which only the nodes of one hash slot transport. A server without shard channels, or with ACL rules
that do not allow them, refuses SSUBSCRIBE and SPUBLISH; messages then use an ordinary channel, to
which each router also subscribes.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

from redis.asyncio import ConnectionPool, Redis
from redis.exceptions import NoPermissionError, ResponseError

from libs.errors import NoCapacity
from libs.queue.connection.client import Subscriber, translated
from libs.queue.connection.cluster import ClusterRedis, client_for_key

SILENCE_SECONDS: Final = 2.0
"""A connection that is silent for this duration is pinged, and closed if no reply arrives within
the same duration.
"""


class RedisChannels:
    """Publishes and subscribes as one process. Every method raises NoCapacity while Redis is
    unavailable.
    """

    def __init__(self, redis: Redis, masters: Callable[[], Sequence[Redis]]) -> None:
        """
        Args:
            masters: Returns a client of each present master.
        """
        self._redis = redis
        self._masters = masters
        # The state: the number of failed subscriptions and publications; whether the server may
        # support shard channels.
        self._failures = 0
        self._may_have_shards = isinstance(redis, ClusterRedis)

    async def publish_to_one(self, channel: str, message: bytes) -> None:
        """Publish to the only subscriber of a channel. Without a subscriber the message is lost."""
        with self._counting_failures(), translated():
            if self._may_have_shards:
                try:
                    client: Any = client_for_key(self._redis, channel)
                    await client.execute_command("SPUBLISH", channel, message)
                    return
                except ResponseError as error:
                    if not _is_refused(error):
                        raise
                    self._may_have_shards = False
            await self._any_master().publish(channel, message)

    async def messages(
        self, *channels: str, is_only_one: bool = False
    ) -> AsyncGenerator[bytes | None, None]:
        """Yield None once all channels are subscribed to, and then their messages.

        Args:
            is_only_one: This process is the only subscriber of the channel, so it also subscribes
                to the shard channel of that name (`publish_to_one`).
        """
        with self._counting_failures(), translated():
            shard = await self._shard(channels[0]) if is_only_one else None
            async with Subscriber(shard or self._any_master().connection_pool) as subscriber:
                await subscriber.subscribe(*channels)
                if shard is not None:
                    await subscriber.ssubscribe(*channels)
                is_silent = False
                while True:
                    message = await _next_message(subscriber)
                    if message is None:
                        if is_silent:
                            raise NoCapacity("the queue (Redis) does not answer any more")
                        await subscriber.ping()
                    elif message["type"] == "subscribe" and message["data"] == len(channels):
                        yield None
                    elif message["type"] in ("message", "smessage"):
                        yield message["data"]
                    elif message["type"] == "sunsubscribe":
                        raise NoCapacity("the queue (Redis) has moved a channel")
                    is_silent = message is None

    async def _shard(self, channel: str) -> ConnectionPool | None:
        """Return the connections to the master of a shard channel, or None without a cluster."""
        if not isinstance(self._redis, ClusterRedis):
            return None
        await self._redis.topology.refresh()
        return client_for_key(self._redis, channel).connection_pool

    def _any_master(self) -> Redis:
        """Return a client of any master, and of another one after each failure: a cluster sends a
        message to the subscribers at all nodes.
        """
        masters = self._masters()
        return masters[self._failures % len(masters)]

    @contextmanager
    def _counting_failures(self) -> Iterator[None]:
        try:
            yield
        except NoCapacity:
            self._failures += 1
            raise


async def _next_message(subscriber: Subscriber) -> dict[str, Any] | None:
    """Return the next message, or None if none arrives in SILENCE_SECONDS. A refusal of shard
    channels is skipped.
    """
    while True:
        try:
            message: dict[str, Any] | None = await subscriber.get_message(timeout=SILENCE_SECONDS)
            return message
        except ResponseError as error:
            if not _is_refused(error):
                raise


def _is_refused(error: ResponseError) -> bool:
    return isinstance(error, NoPermissionError) or "unknown command" in str(error)
