"""Scripts share one connection: each reply reaches its command, and a connection that ends or falls
silent is replaced.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from typing import Any

import pytest
from redis.asyncio import Redis
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import NoScriptError, ResponseError
from redis.exceptions import TimeoutError as RedisTimeoutError

from libs.queue import connect
from libs.queue.connection import client
from libs.queue.connection.pipeline import ServerConnections
from tests.support.redis import RedisServer

ECHO = "return ARGV[1]"
WRONG = "return redis.call('LPUSH', KEYS[1])"


@pytest.fixture
def frail() -> Iterator[RedisServer]:
    """A server of the test's own, to be stopped by it."""
    with RedisServer() as server:
        yield server


@pytest.fixture
async def redis(frail: RedisServer, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Redis]:
    monkeypatch.setattr(client, "ANSWER_SECONDS", 60.0)  # a test may freeze the server for a while
    one = connect(frail.url)
    yield one
    await one.aclose()


async def load(redis: Redis, script: str) -> str:
    sha: Any = await redis.script_load(script)
    return str(sha, "ascii")


async def say(redis: Redis, echo: str, what: str | bytes | int) -> bytes:
    reply: bytes = await redis.evalsha(echo, 0, what)
    return reply


async def connections(redis: Redis) -> int:
    return int((await redis.info("stats"))["total_connections_received"])


async def test_many_at_once_each_get_their_own_reply_over_one_connection(redis: Redis) -> None:
    echo, wrong = await load(redis, ECHO), await load(redis, WRONG)
    before = await connections(redis)

    async def one(number: int) -> object:
        if number % 10 == 3:
            with pytest.raises(ResponseError):
                await redis.evalsha(wrong, 1, "list")
            return None
        if number % 10 == 4:
            with pytest.raises(NoScriptError):
                await redis.evalsha("0" * 40, 0)
            return None
        return await redis.evalsha(echo, 0, number)

    found = await asyncio.gather(*(one(number) for number in range(200)))
    assert found == [
        None if number % 10 in (3, 4) else str(number).encode() for number in range(200)
    ]
    assert await connections(redis) == before


async def test_caller_that_leaves_takes_no_reply_of_another(redis: Redis) -> None:
    echo = await load(redis, ECHO)
    calls = [asyncio.create_task(say(redis, echo, number)) for number in range(20)]
    await asyncio.sleep(0)
    for call in calls[::2]:
        call.cancel()
    found = await asyncio.gather(*calls, return_exceptions=True)
    assert [one for one in found if isinstance(one, bytes)] == [
        str(number).encode() for number in range(1, 20, 2)
    ]
    assert await redis.evalsha(echo, 0, "last") == b"last"


async def test_large_command_and_a_large_reply(redis: Redis) -> None:
    echo = await load(redis, ECHO)
    large = b"\r\n$3" * (4 << 20)
    assert list(await asyncio.gather(say(redis, echo, large), say(redis, echo, "small"))) == [
        large,
        b"small",
    ]


async def test_commands_of_a_connection_that_ends_are_sent_again(
    redis: Redis, frail: RedisServer
) -> None:
    echo = await load(redis, ECHO)
    frail.freeze()
    calls = [asyncio.create_task(say(redis, echo, number)) for number in range(10)]
    await asyncio.sleep(0.1)
    other = connect(frail.url)
    killing = asyncio.create_task(
        other.execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
    )
    await asyncio.sleep(0.1)
    frail.thaw()
    await killing
    assert await asyncio.gather(*calls) == [str(number).encode() for number in range(10)]
    assert await redis.evalsha(echo, 0, "later") == b"later"
    await other.aclose()


async def test_server_that_says_nothing_is_left_and_found_again(
    redis: Redis, frail: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    echo = await load(redis, ECHO)
    monkeypatch.setattr(client, "ANSWER_SECONDS", 0.5)
    impatient = connect(frail.url)
    frail.freeze()
    try:
        with pytest.raises(RedisTimeoutError):
            async with asyncio.timeout(60):
                await impatient.evalsha(echo, 0, "a")
    finally:
        frail.thaw()
    async with asyncio.timeout(60):
        while True:  # on a busy machine the server may need longer than this client waits
            with suppress(RedisTimeoutError):
                assert await impatient.evalsha(echo, 0, "b") == b"b"
                break
    await impatient.aclose()


async def test_callers_share_one_failing_attempt_to_connect() -> None:
    """One after the other they would each wait for a server that does not answer."""
    attempts, refused = 0, asyncio.Event()

    class Pool:
        async def get_connection(self) -> Any:
            nonlocal attempts
            attempts += 1
            await refused.wait()
            raise RedisConnectionError("refused")

    pool: Any = Pool()
    server = ServerConnections(pool, answer_seconds=1)
    waiting = [asyncio.create_task(server.open()) for _ in range(10)]
    await asyncio.sleep(0)
    refused.set()
    errors = await asyncio.gather(*waiting, return_exceptions=True)
    assert {str(error) for error in errors} == {"refused"}
    assert attempts == 1


async def test_connection_that_is_opened_while_its_server_is_closed_is_closed_too() -> None:
    asked, opened = asyncio.Event(), asyncio.Event()
    ended: list[str] = []

    class Connection:
        async def disconnect(self) -> None:
            ended.append("disconnected")

    class Pool:
        async def get_connection(self) -> Any:
            asked.set()
            await opened.wait()
            return Connection()

        async def release(self, connection: Connection) -> None:
            ended.append("released")

        async def aclose(self) -> None: ...

    pool: Any = Pool()
    server = ServerConnections(pool, answer_seconds=1)
    opening = asyncio.create_task(server.open())
    await asked.wait()
    await server.close()
    opened.set()
    with pytest.raises(RedisConnectionError, match="no longer a master"):
        await opening
    assert ended == ["disconnected", "released"]
