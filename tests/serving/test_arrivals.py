"""Requests that arrive slowly are cut off while memory grows beyond their needs."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest

from libs.errors import DeadlinePassed, NoCapacity
from libs.serving.calls import arrivals
from libs.serving.calls.arrivals import GROWTH_BYTES, Arrivals
from tests.router.parts import refused, until
from tests.serving.parts import HEALTH, Calls, connected, running_server
from tests.serving.test_bombs import MIB, REFLECTION


class FakeCall:
    """A call with a request that arrives when `arrived` is set."""

    def __init__(self) -> None:
        self.arrived = asyncio.Event()

    async def read(self) -> bytes:
        await self.arrived.wait()
        return b"a"


class Memory:
    """The simulated memory of a process."""

    def __init__(self) -> None:
        self.bytes = 100 * MIB
        self.looks = 0

    def __call__(self) -> int:
        self.looks += 1
        return self.bytes


async def test_only_slow_requests_are_cut_off_while_memory_grows() -> None:
    memory = Memory()
    reader, slow = Arrivals(memory), FakeCall()
    reading = asyncio.create_task(reader.read(slow))
    await until(lambda: memory.looks >= 3)
    memory.bytes += GROWTH_BYTES + 1
    with pytest.raises(NoCapacity):
        await reading
    # Freed memory is still resident: the next requests are measured against the earlier baseline,
    # and those that arrive immediately are read.
    prompt = FakeCall()
    prompt.arrived.set()
    assert await reader.read(prompt) == b"a"
    with pytest.raises(NoCapacity):
        await reader.read(FakeCall())
    memory.bytes -= GROWTH_BYTES
    late = FakeCall()
    reading = asyncio.create_task(reader.read(late))
    looks = memory.looks
    await until(lambda: memory.looks >= looks + 3)
    late.arrived.set()
    assert await reading == b"a"


async def test_memory_of_cut_off_requests_is_returned_and_not_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    memory = Memory()
    before = memory.bytes
    monkeypatch.setattr(arrivals, "RECOVERY_SECONDS", 0.02)
    monkeypatch.setattr(arrivals, "trim", lambda: setattr(memory, "bytes", before + GROWTH_BYTES))
    reader = Arrivals(memory)
    reading = asyncio.create_task(reader.read(FakeCall()))
    await until(lambda: memory.looks >= 3)
    memory.bytes += 3 * GROWTH_BYTES
    with pytest.raises(NoCapacity):
        await reading
    await until(lambda: memory.bytes == before + GROWTH_BYTES)
    # Other work used more memory since: a request that begins now has a new baseline.
    memory.bytes += 3 * GROWTH_BYTES
    late, looks = FakeCall(), memory.looks
    loop = asyncio.get_running_loop()
    ends_at = loop.time() + arrivals.RECOVERY_SECONDS
    await until(lambda: loop.time() >= ends_at)
    reading = asyncio.create_task(reader.read(late))
    await until(lambda: memory.looks >= looks + 3)
    late.arrived.set()
    assert await reading == b"a"


async def test_slow_request_is_not_cut_off_for_growth_before_it() -> None:
    memory, first, second = Memory(), FakeCall(), FakeCall()
    reader = Arrivals(memory)
    reading = asyncio.create_task(reader.read(first))
    await until(lambda: memory.looks >= 3)
    memory.bytes += GROWTH_BYTES // 2
    late = asyncio.create_task(reader.read(second))
    first.arrived.set()
    assert await reading == b"a"
    looks = memory.looks
    await until(lambda: memory.looks >= looks + 3)  # gives the second a separate baseline
    memory.bytes += GROWTH_BYTES * 3 // 4
    looks = memory.looks
    await until(lambda: memory.looks >= looks + 3)
    second.arrived.set()
    assert await late == b"a"


async def test_request_that_does_not_arrive_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arrivals, "ARRIVAL_SECONDS", 0.05)
    memory = Memory()
    with pytest.raises(DeadlinePassed):
        await Arrivals(memory).read(FakeCall())
    looks = memory.looks
    await until(lambda: memory.looks > looks)  # the last poll
    # Long enough for the requests that do arrive.
    monkeypatch.setattr(arrivals, "ARRIVAL_SECONDS", 3.0)
    async with running_server(Calls()) as server, connected(server.address) as caller:
        stream: Any = caller.stream(REFLECTION, b"\x3a\x00")
        missing = asyncio.create_task(refused(caller.without_request(HEALTH)))
        assert await stream.read()
        assert await stream.read() is grpc.aio.EOF
        assert (await missing).code in (
            grpc.StatusCode.INVALID_ARGUMENT,
            grpc.StatusCode.DEADLINE_EXCEEDED,
        )
