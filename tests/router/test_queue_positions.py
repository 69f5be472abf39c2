"""Reads of a lane's queue positions: one call at a time, shared by the requests that wait."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, cast

import pytest

from libs.errors import NoCapacity
from libs.queue import LaneKey
from libs.queue.queue_position import QueuePosition
from services.router.admission.queue_positions import QueuePositionReader
from services.router.state.background import Background
from tests.router.parts import until

LANE = LaneKey("cpu", "a/b")


class FakePositions:
    """Returns the number of the call as leased tokens, once `gate` is set."""

    def __init__(self) -> None:
        self.calls: list[Sequence[str]] = []
        self.gate = asyncio.Event()
        self.away = False

    async def read(self, lane: LaneKey, tenants: Sequence[str]) -> list[QueuePosition]:
        self.calls.append(tenants)
        number = len(self.calls)
        await self.gate.wait()
        if self.away:
            raise NoCapacity("Redis is away")
        return [QueuePosition(leased=number) for _ in tenants]


def make_reader() -> tuple[QueuePositionReader, FakePositions, Background]:
    positions, background = FakePositions(), Background()
    return QueuePositionReader(cast(Any, positions), background), positions, background


async def test_requests_during_a_call_share_the_next_one() -> None:
    reader, positions, background = make_reader()
    first = asyncio.create_task(reader.read(LANE, "red"))
    await until(lambda: positions.calls, "the first call")
    waiting = [asyncio.create_task(reader.read(LANE, name)) for name in ("red", "blue", "red")]
    await asyncio.sleep(0)
    assert positions.calls == [["red"]]
    positions.gate.set()
    assert (await first).position.leased == 1
    assert [(await one).position.leased for one in waiting] == [2, 2, 2]
    assert positions.calls == [["red"], ["red", "blue"]]
    await background.finished()


async def test_tokens_admitted_on_one_result_count_for_its_tenant() -> None:
    reader, positions, _ = make_reader()
    positions.gate.set()
    red, again, blue = await asyncio.gather(
        reader.read(LANE, "red"), reader.read(LANE, "red"), reader.read(LANE, "blue")
    )
    red.admit(100)
    assert (red.since, again.since, blue.since) == (100, 100, 0)
    assert (await reader.read(LANE, "red")).since == 0


async def test_failed_call_fails_its_requests_and_later_ones_are_read_again() -> None:
    reader, positions, _ = make_reader()
    positions.gate.set()
    positions.away = True
    with pytest.raises(NoCapacity):
        await reader.read(LANE, "red")
    positions.away = False
    assert (await reader.read(LANE, "red")).position.leased == 2
