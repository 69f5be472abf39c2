"""Clients of an overloaded mesh: they retry after the given delay, and together stay within a
budget.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import pairwise

import grpc
import pytest
import shoal
from google.protobuf.message import Message
from shoal.calls.retry import RetryBudgets
from shoal.errors import CannotConnect, QueueFull, RateLimited

from tests.api.fake_router import MODEL, FakeRouter, Refusal, refuse, serving

RETRY_SECONDS = 0.2


@dataclass
class FakeFullRouter(FakeRouter):
    """Admits every fifth request and refuses the others with a short retry delay."""

    tries: Counter[str] = field(default_factory=Counter)
    times: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    lock: threading.Lock = field(default_factory=threading.Lock)

    def begin_call(self, method: str, request: Message, context: grpc.ServicerContext) -> int:
        name = str(dict(context.invocation_metadata())["x-request-id"])
        with self.lock:
            self.tries[name] += 1
            self.times[name].append(time.monotonic())
            number = self.tries.total()
        if number % 5:
            reason = "QUEUE_FULL" if number % 2 else "RATE_LIMITED"
            refuse(
                context,
                Refusal(grpc.StatusCode.RESOURCE_EXHAUSTED, reason, retry_after=RETRY_SECONDS),
            )
        return number


@pytest.fixture
def full() -> Iterator[FakeFullRouter]:
    with serving(FakeFullRouter()) as running:
        assert isinstance(running, FakeFullRouter)
        yield running


def test_retries_of_many_clients_stay_within_the_budget(
    full: FakeFullRouter,
) -> None:
    """Four clients ask 60 times each at 20 a second, and each request might be tried for a
    minute.
    """

    def one_client(seed: int) -> Counter[str]:
        outcomes: Counter[str] = Counter()

        def one_request() -> None:
            try:
                client.encode(MODEL, "text", timeout=2.0)
            except shoal.ShoalError as error:
                outcomes[error.reason] += 1
            else:
                outcomes["OK"] += 1

        with shoal.Client(full.address) as client, ThreadPoolExecutor(60) as pool:
            begin = time.monotonic()
            for number in range(60):
                time.sleep(max(0.0, begin + number / 20 - time.monotonic()))
                pool.submit(one_request)
        return outcomes

    began = time.monotonic()
    with ThreadPoolExecutor(4) as clients:
        outcomes = sum(clients.map(one_client, range(4)), Counter[str]())
    seconds = time.monotonic() - began
    assert outcomes.total() == 240
    assert set(outcomes) <= {"OK", "QUEUE_FULL", "RATE_LIMITED", "DEADLINE_PASSED"}
    # On a busy machine the time of a request may pass before it arrives, or after it was admitted.
    late = outcomes["DEADLINE_PASSED"]
    assert 240 - late <= len(full.tries) <= 240
    assert outcomes["OK"] >= full.tries.total() // 5 - late
    # The requests take 5 s; for each second more, the budgets of four clients get 0.5 tokens each.
    allowed = 240 / 5 + 4 * 0.5 * max(0.0, seconds - 5.0)
    assert 0 < full.tries.total() - len(full.tries) <= allowed
    pauses = [
        later - earlier for times in full.times.values() for earlier, later in pairwise(times)
    ]
    assert min(pauses) >= RETRY_SECONDS, "no client returns before Retry-After"


def test_refused_calls_have_a_small_retry_budget_and_failover_has_another() -> None:
    budgets = RetryBudgets()
    overload, failover = (
        budgets.budget_for(QueueFull("full")),
        budgets.budget_for(CannotConnect("gone")),
    )
    assert overload is not None
    assert failover is not None
    assert budgets.budget_for(RateLimited("slower")) is overload is not failover
    free = 0
    while overload.wait(0.0) == 0:
        overload.take()
        free += 1
    assert free == 5
    assert overload.wait(0.0) == pytest.approx(2.0)
    assert failover.wait(0.0) == 0
    for _ in range(11):
        budgets.succeeded()
    assert overload.wait(0.0) == 0
