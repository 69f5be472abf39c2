"""Counting and charging of bodies, and the cache of callers, tested without sockets."""

from __future__ import annotations

import asyncio
import json
import threading
from contextlib import suppress
from random import Random
from typing import Any

import msgspec
import pytest
from shoal.errors import CannotConnect, ShoalError, Unauthenticated
from shoal.transport.wire import Metadata

from services.edge.intake import counting, reading
from services.edge.intake.budget import BodyReservation, Budget, network_key
from services.edge.intake.callers import (
    FRESH_SECONDS,
    MAX_CALLERS,
    MAX_LOOKUPS,
    MAX_REFUSED_CALLERS,
    MAX_STALE_SECONDS,
    REFUSAL_TTL_SECONDS,
    Callers,
)
from services.edge.intake.counting import (
    MAX_DEPTH,
    MAX_OBJECTS,
    MAX_VALUES,
    ContentCount,
    count_objects,
)
from services.edge.intake.reading import MAX_WALKED_BYTES, BodyIntake, Payer
from services.edge.messages import limits
from services.edge.messages.base import HttpError
from services.router.admission.validation import limits as router_limits
from tests.edge.test_server import until

MIB = 1 << 20
TEXTS = ("", 'a"b\\', '[{,"', '\\\\"', "],}", "x" * 20, 'é\\"', "\\", "\\" * 5 + '"', "\n", "🐟")


def value(random: Random, depth: int = 0) -> Any:
    kind = random.random()
    if depth > 6 or kind < 0.4:
        return random.choice((*TEXTS, 5, 1.5, -3, 300, 1 << 40, None, True))
    if kind < 0.7:
        return [value(random, depth + 1) for _ in range(random.randrange(5))]
    return {
        random.choice(TEXTS) + str(at): value(random, depth + 1)
        for at in range(random.randrange(4))
    }


def true_count(found: Any) -> ContentCount:
    """Return the count of a decoded value."""
    if not isinstance(found, list | dict):
        return ContentCount(int(isinstance(found, str)), 0)
    within = [true_count(one) for one in (found.values() if isinstance(found, dict) else found)]
    keys = len(found) if isinstance(found, dict) else 0
    return ContentCount(
        1 + keys + sum(one.objects for one in within),
        len(found) + sum(one.values for one in within),
        1 + max((one.depth for one in within), default=0),
    )


@pytest.mark.parametrize("piece_bytes", [8, 64, 1 << 16])
def test_exact_counts_match_the_decoded_value(
    piece_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(counting, "_PIECE_BYTES", piece_bytes)
    for number in range(1500):
        random = Random(number)
        content = value(random)
        expected = true_count(content)
        body = json.dumps(
            content, ensure_ascii=random.random() < 0.5, indent=random.choice((None, 1))
        ).encode()
        exact, fast = counting._count_exactly(body), count_objects(body, is_msgpack=False)
        assert (exact.objects, exact.depth) == (expected.objects, expected.depth), content
        assert exact.values >= expected.values
        assert fast.objects >= expected.objects
        assert fast.values >= expected.values
        walked = count_objects(msgspec.msgpack.encode(content), is_msgpack=True)
        assert (walked.objects, walked.depth) == (expected.objects, expected.depth), content
        assert walked.values >= expected.values


@pytest.mark.parametrize("shortest", [1, 16])
def test_runs_of_short_values_count_like_the_values_one_by_one(
    shortest: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(500):
        random = Random(number)
        run: list[Any] = random.choices((1, True, None, {}, [], ""), k=random.randrange(60))
        body = msgspec.msgpack.encode([value(random), *run, [value(random), *run]])
        body = body[: random.choice((len(body), random.randrange(len(body))))]  # some are cut
        monkeypatch.setattr(counting, "_MIN_RUN", shortest)
        in_runs = count_objects(body, is_msgpack=True)
        monkeypatch.setattr(counting, "_MIN_RUN", len(body) + 1)
        assert in_runs == count_objects(body, is_msgpack=True), body


def test_punctuation_within_texts_is_not_counted() -> None:
    text = '[{",' * MAX_OBJECTS
    count = count_objects(json.dumps([text, "\\" * 99_999, text]).encode(), is_msgpack=False)
    assert (count.objects, count.depth) == (4, 1)


def test_source_code_is_charged_by_its_exact_count() -> None:
    code = 'if (names["key"] == "a") { list[0] = {"b": [1, 2]}; }\n' * 20_000
    body = json.dumps({"model": "org/model", "input": code}).encode()
    assert count_objects(body, is_msgpack=False).bytes < 4 * 1024


@pytest.mark.parametrize("is_msgpack", [False, True])
def test_limits_of_a_body_are_exact(is_msgpack: bool) -> None:
    def refusal(content: Any) -> str:
        body = msgspec.msgpack.encode(content) if is_msgpack else msgspec.json.encode(content)
        with pytest.raises(HttpError) as raised:
            count_objects(body, is_msgpack=is_msgpack)
        return f"{raised.value.reason}: {raised.value.message}"

    def nested(depth: int) -> Any:
        content: Any = []
        for _ in range(depth - 1):
            content = [content, "]" * 10]
        return content

    encode = msgspec.msgpack.encode if is_msgpack else msgspec.json.encode
    for content in (["a"] * (MAX_OBJECTS - 1), [300] * (MAX_VALUES - 1), nested(MAX_DEPTH)):
        count_objects(encode(content), is_msgpack=is_msgpack)
    assert "TOO_LARGE: the body has more than 200,000 texts" in refusal(["a"] * (MAX_OBJECTS + 1))
    assert "TOO_LARGE: the body has more than 200,000 texts" in refusal([{}] * (MAX_OBJECTS + 1))
    assert "TOO_LARGE: the body has more than 1,000,000 values" in refusal([300] * (MAX_VALUES + 1))
    assert "INVALID_INPUT: the body is nested more than 100 levels deep" in refusal(
        nested(MAX_DEPTH + 1)
    )


def test_msgpack_list_is_refused_by_its_declared_length() -> None:
    with pytest.raises(HttpError, match="values"):
        count_objects(b"\xdd\xff\xff\xff\xff", is_msgpack=True)


def test_invalid_bodies_are_left_to_the_decoder() -> None:
    random = Random(5)
    for _ in range(2000):
        body = random.randbytes(random.randrange(200))
        for is_msgpack in (False, True):
            with suppress(HttpError):
                count_objects(body, is_msgpack=is_msgpack)


def test_list_limits_equal_the_routers() -> None:
    assert router_limits.ITEMS.most == limits.MAX_ITEMS
    assert router_limits.LABELS.most == limits.MAX_LABELS
    assert router_limits.IDS.most == limits.MAX_IDS
    assert router_limits.PARTS.most == limits.MAX_PARTS
    assert router_limits.CHUNKS.most == limits.MAX_SPANS
    assert router_limits.TURNS.most + 2 == limits.MAX_MESSAGES


def known(budget: Budget, tenant: str, address: str = "10.0.0.1") -> BodyReservation:
    found = budget.enter(address)
    found.identify(tenant)
    return found


def filled(budget: Budget, reservation: BodyReservation, step: int = MIB) -> int:
    """Take bytes until the reservation is refused; return their sum."""
    with suppress(HttpError):
        while True:
            reservation.take(step)
    with pytest.raises(HttpError) as raised:
        reservation.take(step)
    assert (raised.value.status, raised.value.retry_after) == (429, 1.0)
    return reservation.bytes


def test_no_tenant_can_fill_the_budget() -> None:
    budget = Budget(512 * MIB)
    small = known(budget, "small", "10.0.0.9")
    small.take(MIB)
    shares = [
        filled(budget, known(budget, f"tenant-{number}", f"10.0.1.{number}")) for number in range(6)
    ]
    assert shares[0] in range(254 * MIB, 257 * MIB)
    assert shares == sorted(shares, reverse=True)
    known(budget, "late", "10.0.0.8").take(2 * MIB)


def test_no_address_can_fill_the_budget() -> None:
    budget = Budget(512 * MIB)
    known(budget, "other", "10.0.0.9").take(MIB)
    total = sum(filled(budget, known(budget, f"tenant-{number}")) for number in range(40))
    assert total <= 512 * MIB * 4 // 5 + MIB
    known(budget, "late", "10.0.0.9").take(32 * MIB)


def test_requests_of_a_tenant_share_its_limit() -> None:
    budget = Budget(64 * MIB)
    known(budget, "other").take(MIB)
    first, second = known(budget, "a"), known(budget, "a")
    first.take(30 * MIB)
    with pytest.raises(HttpError, match="of this tenant"):
        second.take(10 * MIB)
    first.release()
    second.take(10 * MIB)
    second.release()
    assert budget.held_bytes == MIB


def test_sole_identified_request_has_no_limit() -> None:
    budget = Budget(MIB)
    alone = known(budget, "a")
    alone.take(5 * MIB)
    alone.release()
    assert budget.held_bytes == 0


def test_sole_unidentified_request_is_limited() -> None:
    budget = Budget(512 * MIB)
    with pytest.raises(HttpError, match="unidentified callers"):
        budget.enter("10.0.0.1").take(budget.unidentified_limit + 1)


def test_callers_are_identified_before_they_hold_more_than_the_allowance() -> None:
    budget = Budget(512 * MIB)
    one = budget.enter("10.0.0.1")
    assert not one.must_identify(10_000)
    assert one.must_identify(MIB)
    crowd = [budget.enter("10.0.0.1") for _ in range(1000)]
    for other in crowd:
        if not other.must_identify(64 << 10):
            other.take(64 << 10)
    assert budget.held_bytes <= budget.unidentified_limit // 3
    assert one.must_identify(64 << 10), "there is too much of such callers already"
    one.identify("a")
    assert not one.must_identify(MIB)


def test_address_holds_at_most_half_of_the_unidentified_allowance() -> None:
    budget = Budget(512 * MIB)
    budget.enter("10.0.0.2").take(1)
    assert filled(budget, budget.enter("10.0.0.1"), 1 << 16) <= budget.unidentified_limit // 2 + (
        1 << 16
    )
    budget.enter("10.0.0.2").take(1 << 20)


def test_budget_drops_tenants_and_addresses_without_requests() -> None:
    budget = Budget(512 * MIB)
    first, second, stranger = known(budget, "a"), known(budget, "a"), budget.enter("10.0.0.2")
    first.take(3)
    second.take(4)
    stranger.take(5)
    first.release()
    assert (budget.held_by_tenants(), budget.held_bytes, budget.unidentified_bytes) == (
        {"a": 4},
        9,
        5,
    )
    stranger.release()
    second.release()
    assert (
        budget.held_by_tenants(),
        budget._addresses,
        budget.held_bytes,
        budget.unidentified_bytes,
    ) == ({}, {}, 0, 0)


def test_ipv6_addresses_of_one_network_share_a_limit() -> None:
    assert (
        network_key("2001:db8:1:2::5")
        == network_key("2001:db8:1:2:ffff::7")
        != network_key("2001:db8:1:3::5")
    )
    assert network_key("::ffff:10.0.0.1") == "10.0.0.1"
    assert network_key("10.0.0.1") != network_key("10.0.0.2")


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


async def test_concurrent_lookups_of_one_caller_are_shared() -> None:
    router, clock = FakeRouter(), FakeClock()
    callers = Callers(router.tenant, clock)
    router.go.clear()
    asking = [asyncio.create_task(callers.tenant(caller("a", str(number)))) for number in range(20)]
    await asyncio.sleep(0)
    asking[0].cancel()
    router.go.set()
    assert await asyncio.gather(*asking[1:]) == ["a"] * 19
    assert len(router.asked) == 1
    assert router.asked[0]["x-request-id"] not in map(str, range(20)), "a request's id is its own"
    assert await callers.tenant(caller("a")) == "a"
    assert len(router.asked) == 1


async def test_stale_caller_is_used_while_it_is_refreshed() -> None:
    router, clock = FakeRouter(), FakeClock()
    callers = Callers(router.tenant, clock)
    await callers.tenant(caller("a"))
    clock.seconds += FRESH_SECONDS
    router.go.clear()
    assert await callers.tenant(caller("a")) == "a"
    router.error = CannotConnect("no router")
    router.go.set()
    await until(lambda: not callers._asking)
    assert len(router.asked) == 2
    assert await callers.tenant(caller("a")) == "a", "a missing router is not a refusal"
    clock.seconds += MAX_STALE_SECONDS
    with pytest.raises(HttpError) as raised:
        await callers.tenant(caller("a"))
    assert raised.value.status == 503


async def test_refusals_are_cached_briefly() -> None:
    router, clock = FakeRouter(), FakeClock()
    callers = Callers(router.tenant, clock)
    router.error = Unauthenticated("unknown token")
    for _ in range(3):
        with pytest.raises(HttpError, match="unknown token") as raised:
            await callers.tenant(caller("a"))
        assert raised.value.status == 401
    assert len(router.asked) == 1
    router.error = None
    clock.seconds += REFUSAL_TTL_SECONDS
    assert await callers.tenant(caller("a")) == "a"


async def test_cached_callers_are_limited() -> None:
    router = FakeRouter()
    callers = Callers(router.tenant, FakeClock())
    for number in range(MAX_CALLERS + 5):
        await callers.tenant(caller(str(number)))
    assert len(callers._known) == MAX_CALLERS
    await callers.tenant(caller(str(MAX_CALLERS)))
    assert len(router.asked) == MAX_CALLERS + 5


async def test_refused_callers_evict_no_accepted_caller() -> None:
    router = FakeRouter()
    callers = Callers(router.tenant, FakeClock())
    await callers.tenant(caller("accepted"))
    router.error = Unauthenticated("unknown token")
    for number in range(MAX_CALLERS):
        with pytest.raises(HttpError):
            await callers.tenant(caller(f"made-up-{number}"))
    assert len(callers._refused) == MAX_REFUSED_CALLERS
    assert callers.knows(caller("accepted"))
    assert await callers.tenant(caller("accepted")) == "accepted"
    assert len(router.asked) == 1 + MAX_CALLERS


async def test_one_address_cannot_take_all_lookups() -> None:
    router = FakeRouter()
    callers = Callers(router.tenant, FakeClock())
    router.go.clear()
    asking = [
        asyncio.create_task(callers.tenant(caller(f"made-up-{number}"), "10.0.0.1"))
        for number in range(2 * MAX_LOOKUPS)
    ]
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert len(router.asked) < MAX_LOOKUPS
    other = asyncio.create_task(callers.tenant(caller("other"), "10.0.0.2"))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert router.asked[-1]["authorization"] == "other"
    router.go.set()
    assert await other == "other"
    done = await asyncio.gather(*asking, return_exceptions=True)
    refused = [one for one in done if isinstance(one, HttpError)]
    assert {problem.reason for problem in refused} == {"QUEUE_FULL"}
    assert all("from this address" in str(problem) for problem in refused)
    assert await callers.tenant(caller("late"), "10.0.0.1") == "late", (
        "answered lookups do not count any more"
    )


async def test_revoked_caller_is_removed() -> None:
    router, clock = FakeRouter(), FakeClock()
    callers = Callers(router.tenant, clock)
    await callers.tenant(caller("a"))
    router.error = Unauthenticated("revoked token")
    clock.seconds += FRESH_SECONDS
    await callers.tenant(caller("a"))
    await until(lambda: not callers._asking)
    with pytest.raises(HttpError, match="revoked"):
        await callers.tenant(caller("a"))
    assert not callers.knows(caller("a"))


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
