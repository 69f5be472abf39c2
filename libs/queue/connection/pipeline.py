"""One connection to Redis on which commands follow each other without waiting for replies
(pipelining).

redis-py takes a connection out of its pool for each command and waits on it for the reply. For the
scripts of the request path that is most of a router's CPU time: two timers, some 700 calls of
Python functions, and a write and a read of the socket each. Here a command is packed by hiredis and
written at once, and the next received reply is for the oldest waiting command.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from contextlib import suppress
from typing import Any, Final, Self

import hiredis
from redis.asyncio import Redis
from redis.asyncio.connection import ConnectionPool
from redis.backoff import ExponentialWithJitterBackoff
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import RedisError, ResponseError
from redis.exceptions import TimeoutError as RedisTimeoutError

Reply = Any

_RETRIES: Final = 2
_DRAINED_BYTES: Final = 1 << 20
"""The caller of a larger command waits until the socket has taken most of it."""


class _Line:
    """An open connection, and the commands that wait for their replies, in order."""

    def __init__(self, pool: ConnectionPool, connection: Any, answer_seconds: float) -> None:
        self._pool = pool
        self._connection = connection
        self._answer_seconds = answer_seconds
        self._loop = asyncio.get_running_loop()
        # The state: each waiting command's reply and the time it was sent; the timer for the first
        # one; why the connection ended; whether we end it, and have time to wait until it is
        # closed.
        self._waiting: deque[tuple[asyncio.Future[Reply], float]] = deque()
        self._timer: asyncio.TimerHandle | None = None
        self.error: RedisError | None = None
        self._is_closing = False
        self._reading = asyncio.create_task(self._read())

    async def send(self, packed: bytes) -> Reply:
        """Send a command, and return its reply. Raises the errors of redis-py."""
        if self.error is not None:
            raise self.error
        reply: asyncio.Future[Reply] = self._loop.create_future()
        self._connection.write_now(packed)
        self._waiting.append((reply, self._loop.time()))
        if self._timer is None:
            self._timer = self._loop.call_later(self._answer_seconds, self._check_timeout)
        if len(packed) > _DRAINED_BYTES:
            await self._connection.drained()
        return await reply

    async def close(self) -> None:
        self._is_closing = True
        self._end(RedisConnectionError("the connection was closed"))
        self._reading.cancel()
        await asyncio.wait([self._reading])

    async def _read(self) -> None:
        """Pass replies on until the connection ends, then return it to the pool."""
        try:
            while True:
                try:
                    reply = await self._connection.read_response(
                        timeout=math.inf, disconnect_on_error=False
                    )
                except ResponseError as error:  # of this command only
                    reply = error
                waiting, _ = self._waiting.popleft()
                if waiting.done():
                    continue
                if isinstance(reply, Exception):
                    waiting.set_exception(reply)
                else:
                    waiting.set_result(reply)
        except RedisError as error:
            self._end(error)
        except (OSError, IndexError) as error:  # IndexError: a reply without a command
            self._end(RedisConnectionError(f"Error while reading from Redis: {error}"))
        finally:
            with suppress(RedisError):  # the peer does not answer
                await self._connection.disconnect(nowait=not self._is_closing)
            await self._pool.release(self._connection)

    def _check_timeout(self) -> None:
        """End the connection if its first command has waited too long."""
        self._timer = None
        if not self._waiting:
            return
        remaining = self._waiting[0][1] + self._answer_seconds - self._loop.time()
        if remaining > 0:
            self._timer = self._loop.call_later(remaining, self._check_timeout)
        else:
            self._end(RedisTimeoutError("Timeout reading from Redis"))
            self._reading.cancel()

    def _end(self, error: RedisError) -> None:
        if self.error is not None:
            return
        self.error = error
        if self._timer is not None:
            self._timer.cancel()
        for waiting, _ in self._waiting:
            if not waiting.done():
                waiting.set_exception(error)
        self._waiting.clear()


class ServerConnections:
    """The connections to one Redis server: a pool, and a line for scripts."""

    def __init__(self, pool: ConnectionPool, *, answer_seconds: float) -> None:
        """
        Args:
            answer_seconds: The line is dropped if a reply takes longer.
        """
        self.pool = pool
        self._answer_seconds = answer_seconds
        # The state: the line that was opened last, which may have ended; the attempt to open one
        # that runs or ran last; whether no further one may be opened.
        self.line: _Line | None = None
        self._opening: asyncio.Task[_Line] | None = None
        self._is_closed = False

    @property
    def held_connections(self) -> int:
        """Return the number of pool connections that are held permanently."""
        return int(self.line is not None and self.line.error is None)

    async def open(self) -> _Line:
        """Return the open line, or a new one. Concurrent callers share one attempt and its error:
        one after the other would each wait for a server that does not answer.
        """
        if self.line is not None and self.line.error is None:
            return self.line
        if self._opening is None or self._opening.done():
            self._opening = asyncio.create_task(self._connect())
            self._opening.add_done_callback(_retrieve)
        return await asyncio.shield(self._opening)

    async def _connect(self) -> _Line:
        self._check_open()
        pool: Any = self.pool
        connection = await pool.get_connection()
        try:
            self._check_open()  # It may have been closed while the connection opened.
        except RedisConnectionError:
            await connection.disconnect()
            await pool.release(connection)
            raise
        self.line = _Line(pool, connection, self._answer_seconds)
        return self.line

    def _check_open(self) -> None:
        if self._is_closed:
            raise RedisConnectionError("this Redis is no longer a master")

    async def close_line(self) -> None:
        if self.line is not None:
            await self.line.close()

    async def close(self) -> None:
        """Close all connections for good."""
        self._is_closed = True
        await self.close_line()
        await self.pool.aclose()


class PipelinedRedis(Redis):
    """The client of redis-py with one pipelined connection for scripts (EVALSHA, SCRIPT LOAD).

    A command is sent again, up to twice, if its connection ends: scripts may run twice.
    """

    server: ServerConnections

    @classmethod
    def create(cls, pool: ConnectionPool, *, answer_seconds: float) -> PipelinedRedis:
        """Return a client on `pool`. `answer_seconds`: the connection is dropped if a reply takes
        longer.
        """
        client = cls.for_server(ServerConnections(pool, answer_seconds=answer_seconds))
        client.auto_close_connection_pool = True
        return client

    @classmethod
    def for_server(cls, server: ServerConnections) -> Self:
        """Return a client that shares the connections of `server`, and does not close its pool."""
        client = cls(connection_pool=server.pool)
        client.server = server
        return client

    async def evalsha(self, sha: str, numkeys: int, *keys_and_args: Any) -> Reply:
        return await self._call("EVALSHA", sha, numkeys, *keys_and_args)

    async def script_load(self, script: Any) -> Reply:
        return await self._call("SCRIPT", "LOAD", script)

    async def aclose(self, close_connection_pool: bool | None = None) -> None:
        await self.server.close_line()
        await super().aclose(close_connection_pool)

    async def _call(self, *command: Any) -> Reply:
        packed = hiredis.pack_command(command)
        pauses, failures = ExponentialWithJitterBackoff(base=0.01, cap=0.2), 0
        while True:
            line = self.server.line
            if line is None or line.error is not None:
                line = await self.server.open()
            try:
                return await line.send(packed)
            except (RedisConnectionError, RedisTimeoutError):
                failures += 1
                if failures > _RETRIES:
                    raise
            await asyncio.sleep(pauses.compute(failures))


def _retrieve(task: asyncio.Task[_Line]) -> None:
    """Retrieve the task's error, because no caller may be left that waits for it."""
    if not task.cancelled():
        task.exception()
