"""Reading bodies: when callers are identified and charged, tested without sockets."""

from __future__ import annotations

import asyncio
import threading
from contextlib import suppress

import pytest
from shoal.errors import ShoalError, Unauthenticated
from shoal.transport.wire import Metadata

from services.edge.intake import reading
from services.edge.intake.budget import BodyReservation, Budget
from services.edge.intake.callers import (
    MAX_LOOKUPS,
    Callers,
)
from services.edge.intake.counting import (
    ContentCount,
    count_objects,
)
from services.edge.intake.reading import MAX_WALKED_BYTES, BodyIntake, Payer
from services.edge.messages.base import HttpError
from tests.edge.test_server import until

MIB = 1 << 20


def filled(budget: Budget, reservation: BodyReservation, step: int = MIB) -> int:
    """Take bytes until the reservation is refused; return their sum."""
    with suppress(HttpError):
        while True:
            reservation.take(step)
    with pytest.raises(HttpError) as raised:
        reservation.take(step)
    assert (raised.value.status, raised.value.retry_after) == (429, 1.0)
    return reservation.bytes


class FakeClock:
    """A clock that shows `seconds`."""

    def __init__(self) -> None:
        self.seconds = 1000.0

    def __call__(self) -> float:
        return self.seconds


class FakeRouter:
    """Identifies callers.

    Attributes:
        error: Raised instead of an answer.
        go: Answers wait for it.
    """

    def __init__(self) -> None:
        self.asked: list[dict[str, str]] = []
        self.error: ShoalError | None = None
        self.go = asyncio.Event()
        self.go.set()

    async def tenant(self, metadata: Metadata) -> str:
        self.asked.append(dict(metadata))
        await self.go.wait()
        if self.error is not None:
            raise self.error
        return self.asked[-1]["authorization"]


def caller(name: str, request_id: str = "r") -> Metadata:
    return (("x-request-id", request_id), ("authorization", name))


class Setting:
    """An intake in front of a fake router. Strangers hold the maximum of all unidentified callers
    of one address.
    """

    def __init__(self) -> None:
        self.router = FakeRouter()
        self.budget = Budget(512 * MIB)
        self.callers = Callers(self.router.tenant, FakeClock())
        self.intake = BodyIntake(self.budget, self.callers)

    def payer(self, name: str) -> Payer:
        return self.intake.payer("10.0.0.1", caller(name))

    def fill(self) -> None:
        filled(self.budget, self.budget.enter("10.0.0.1"), 16 << 10)


async def test_unidentified_callers_do_not_block_known_callers_of_their_address() -> None:
    setting = Setting()
    await setting.callers.tenant(caller("a"))
    setting.fill()
    held = setting.budget.held_bytes
    await setting.payer("a").take(64 << 10)
    assert setting.budget.held_by_tenants() == {"a": 64 << 10}
    assert setting.budget.held_bytes == held + (64 << 10)
    assert len(setting.router.asked) == 1


async def test_answer_is_charged_to_its_tenant_while_unidentified_callers_fill_the_allowance() -> (
    None
):
    setting = Setting()
    setting.fill()
    setting.router.go.clear()
    asking = [
        asyncio.create_task(
            setting.callers.tenant(caller(f"stranger-{number}"), f"10.1.0.{number}")
        )
        for number in range(MAX_LOOKUPS)
    ]
    await until(lambda: len(setting.router.asked) == MAX_LOOKUPS)
    answered = asyncio.create_task(setting.payer("a").reserve(32 * MIB, is_accepted=True))
    await until(lambda: len(setting.router.asked) == MAX_LOOKUPS + 1)
    setting.router.go.set()
    await answered
    await asyncio.gather(*asking)
    assert setting.budget.held_by_tenants() == {"a": 32 * MIB}


async def test_msgpack_is_walked_after_its_caller_is_identified(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    setting = Setting()
    walked: list[int] = []

    def count(body: bytes, *, is_msgpack: bool) -> ContentCount:
        walked.append(threading.get_ident())
        return count_objects(body, is_msgpack=is_msgpack)

    monkeypatch.setattr(reading, "count_objects", count)
    setting.router.error = Unauthenticated("unknown token")
    body = b"\x90" * (MAX_WALKED_BYTES + 1)
    with pytest.raises(HttpError, match="unknown token"):
        await setting.intake.admit(body, setting.payer("a"), is_msgpack=True)
    assert walked == []
    setting.router.error = None
    await setting.intake.admit(body, setting.payer("b"), is_msgpack=True)
    await setting.intake.admit(body[:100], setting.payer("c"), is_msgpack=True)
    assert [thread == threading.get_ident() for thread in walked] == [False, True]
    assert len(setting.router.asked) == 2


async def test_small_request_needs_no_lookup() -> None:
    setting = Setting()
    payer = setting.payer("a")
    for size in (1000, 500, 3000):
        with pytest.raises(StopIteration):
            payer.take(size).send(None)
    await setting.intake.admit(b'{"input": "a"}', payer, is_msgpack=False)
    assert setting.router.asked == []


async def test_heads_of_unidentified_callers_are_refused_without_a_lookup() -> None:
    setting = Setting()
    setting.fill()
    payer = setting.payer("a")
    with pytest.raises(HttpError, match="unidentified callers"):
        await payer.take_head(120 << 10)
    await payer.take_head(1000)
    assert setting.router.asked == []
    await payer.take(100)
    assert setting.budget.held_by_tenants() == {"a": 1100}, "a small head is charged with its body"
