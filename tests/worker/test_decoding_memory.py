"""Memory of decoded images: bounded by the worker's memory, and released after an image was resized
or refused.
"""

from __future__ import annotations

import asyncio
import threading
from contextlib import ExitStack
from dataclasses import dataclass, field

import pytest

from libs.errors import InvalidInput, NoCapacity
from services.worker.memory.budget import Ledger, ModelSize
from services.worker.memory.decoding import MAX_WAIT_SECONDS, DecodingMemory

FIELD = "items[0].image"
ALLOWANCE = 100


def nothing() -> None:
    return


@dataclass
class Bench:
    ledger: Ledger = field(default_factory=lambda: Ledger(1000))
    now: float = 0.0
    asked: list[int] = field(default_factory=list)

    def memory(self) -> DecodingMemory:
        return DecodingMemory(
            self.ledger, ALLOWANCE, free_memory=self.asked.append, clock=lambda: self.now
        )


async def test_small_images_use_the_allowance_and_large_ones_claim_memory() -> None:
    one = Bench()
    memory = one.memory()
    with ExitStack() as stack:
        stack.enter_context(memory.reserve(60, FIELD, check=nothing))
        stack.enter_context(memory.reserve(40, FIELD, check=nothing))
        assert one.ledger.used_bytes == 0
        stack.enter_context(memory.reserve(1, FIELD, check=nothing))
        stack.enter_context(memory.reserve(999, FIELD, check=nothing))
        assert one.ledger.used_bytes == 1000
    assert one.ledger.used_bytes == 0
    with memory.reserve(ALLOWANCE, FIELD, check=nothing):
        assert one.ledger.used_bytes == 0


async def test_image_waits_for_memory_of_another() -> None:
    one = Bench()
    memory = one.memory()
    entered, held, waits = (
        threading.Event(),
        memory.reserve(600, FIELD, check=nothing),
        threading.Event(),
    )
    held.__enter__()

    def second() -> None:
        with memory.reserve(500, FIELD, check=waits.set):
            entered.set()

    running = asyncio.create_task(asyncio.to_thread(second))
    await asyncio.to_thread(waits.wait, 20)
    assert not entered.is_set()
    held.__exit__(None, None, None)
    await running
    assert entered.is_set()
    assert one.ledger.used_bytes == 0
    assert set(one.asked) == {500}, "room was asked for while it waited"


async def test_image_without_memory_is_refused_after_a_timeout() -> None:
    one = Bench()
    claim = one.ledger.claim("org/model", ModelSize(900))
    assert claim is not None

    def check() -> None:
        one.now += MAX_WAIT_SECONDS / 2

    with pytest.raises(NoCapacity, match="500 bytes, which were not free within 10 s"):
        await asyncio.to_thread(one.memory().reserve(500, FIELD, check=check).__enter__)
    one.ledger.release(claim)


async def test_image_that_can_never_fit_is_refused_immediately() -> None:
    memory = Bench().memory()
    with (
        pytest.raises(InvalidInput, match="1,001 bytes, but this worker has 1,000") as caught,
        memory.reserve(1001, FIELD, check=nothing),
    ):
        raise AssertionError
    assert caught.value.field == FIELD


async def test_cancelled_job_stops_waiting() -> None:
    one = Bench()
    memory = one.memory()
    ended = ValueError("cancelled")

    def cancelled() -> None:
        raise ended

    with memory.reserve(1000, FIELD, check=nothing), pytest.raises(ValueError, match="cancelled"):
        await asyncio.to_thread(memory.reserve(200, FIELD, check=cancelled).__enter__)
    assert one.ledger.used_bytes == 0
