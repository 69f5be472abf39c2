from __future__ import annotations

import pytest
from shoal.calls.retry import Attempts, RetryBudget, RetryBudgets, RetryPolicy
from shoal.errors import CannotConnect, InvalidInput, QueueFull, TlsFailed, WorkerLost
from shoal.transport.addresses import RouterAddresses, is_local, parse

POLICY = RetryPolicy(attempts=5, first_delay=0.1, longest_delay=1.0)
LOST = CannotConnect("lost")


def attempts(*, addresses: int = 1, policy: RetryPolicy = POLICY) -> Attempts:
    return Attempts(policy, deadline=60.0, addresses=addresses)


def test_only_marked_errors_are_retried() -> None:
    assert attempts().delay(InvalidInput("bad"), jitter=0) is None
    assert attempts().delay(WorkerLost("it may be the request"), jitter=0) is None
    assert attempts().delay(QueueFull("full", retry_after=0.0), jitter=0) is not None
    assert attempts().delay(LOST, jitter=0) is not None


def test_retry_is_never_earlier_than_the_given_delay() -> None:
    assert attempts().delay(QueueFull("full", retry_after=2.5), jitter=0) == 2.5
    later = attempts().delay(QueueFull("full", retry_after=2.5), jitter=1)
    assert later == pytest.approx(3.75)


def test_delays_double_up_to_the_longest_and_tries_end() -> None:
    one = attempts(policy=RetryPolicy(attempts=7, first_delay=0.1, longest_delay=1.0))
    delays = [one.delay(LOST, jitter=0) for _ in range(7)]
    assert delays == [
        pytest.approx(0.1),
        pytest.approx(0.2),
        pytest.approx(0.4),
        pytest.approx(0.8),
        1.0,
        1.0,
        None,
    ]


def test_without_a_connection_delays_stay_short_and_no_budget_pays() -> None:
    unsent = CannotConnect("nobody listens")
    unsent.was_sent = False
    one = attempts(policy=RetryPolicy(attempts=7, first_delay=0.5, longest_delay=5.0))
    assert [one.delay(unsent, jitter=0) for _ in range(7)] == [0.5, 1.0, 1.0, 1.0, 1.0, 1.0, None]
    budgets = RetryBudgets()
    assert budgets.budget_for(unsent) is None
    assert budgets.budget_for(TlsFailed("no TLS")) is None
    assert budgets.budget_for(LOST) is not None


def test_next_address_is_asked_at_once_and_a_round_of_them_waits() -> None:
    one = attempts(addresses=3, policy=RetryPolicy(attempts=9, first_delay=0.1, longest_delay=10.0))
    assert [one.delay(LOST, jitter=0) for _ in range(6)] == [
        0.0,
        0.0,
        pytest.approx(0.4),
        0.0,
        0.0,
        pytest.approx(3.2),
    ]


def test_remaining_time_is_that_of_the_deadline() -> None:
    assert attempts().remaining(45.0) == 15.0


@pytest.mark.parametrize(
    "wrong", [{"attempts": 0}, {"first_delay": -1.0}, {"first_delay": 2.0, "longest_delay": 1.0}]
)
def test_policy_that_cannot_work_is_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="retry policy"):
        RetryPolicy(**wrong)  # type: ignore[arg-type]


def test_budget_lets_a_burst_through_and_then_a_trickle() -> None:
    budget = RetryBudget(capacity=3, per_second=2, per_success=0.5)
    for _ in range(3):
        assert budget.wait(10.0) == 0
        budget.take()
    assert budget.wait(10.0) == 0.5
    budget.take()
    assert budget.wait(10.0) == 1.0  # Behind the one that waits already.
    assert budget.wait(11.0) == 0.0


def test_success_pays_for_retries_but_never_beyond_the_capacity() -> None:
    budget = RetryBudget(capacity=2, per_second=0.5, per_success=0.5)
    for _ in range(100):
        budget.succeeded()
    for _ in range(2):
        budget.take()
    assert budget.wait(0.0) == 2.0
    budget.succeeded()
    assert budget.wait(0.0) == 1.0


def test_addresses_are_parsed() -> None:
    assert parse("a:1, b:2") == ("a:1", "b:2")
    assert parse("mesh.example.org") == ("mesh.example.org:50051",)
    assert parse("[::1]") == ("[::1]:50051",)
    assert parse("dns:///router:50051,unix:/run/shoal") == (
        "dns:///router:50051",
        "unix:/run/shoal",
    )
    for wrong in ("", "a:1,", ","):
        with pytest.raises(ValueError, match="host:port"):
            parse(wrong)


def test_loopback_addresses_are_local() -> None:
    assert all(
        is_local(address)
        for address in ("localhost:1", "127.0.0.1:5", "127.9.0.1:5", "[::1]:5", "unix:/x")
    )
    assert not any(
        is_local(address)
        for address in ("10.0.0.1:5", "localhost.example.org:5", "dns:///localhost:1")
    )


def test_failed_address_is_left_once() -> None:
    addresses = RouterAddresses(("a", "b", "c"), start=1)
    assert addresses.current == "b"
    addresses.failed("b")
    addresses.failed("b")  # Another request in flight learned the same.
    assert addresses.current == "c"
    addresses.failed("c")
    assert addresses.current == "a"
