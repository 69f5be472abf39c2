"""The memory that bodies and answers of tenants and addresses may hold."""

from __future__ import annotations

import pytest

from services.edge.intake.budget import BodyReservation, Budget, network_key
from services.edge.messages.base import HttpError
from tests.edge.hostile.test_intake import MIB, filled


def known(budget: Budget, tenant: str, address: str = "10.0.0.1") -> BodyReservation:
    found = budget.enter(address)
    found.identify(tenant)
    return found


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
