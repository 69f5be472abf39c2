"""Retries, failover and deadlines of both clients, against real gRPC servers."""

from __future__ import annotations

import asyncio
import signal
import sys

import grpc
import pytest
import shoal
from google.protobuf.message import Message
from shoal import errors
from shoal.calls.retry import RetryBudget, RetryBudgets

from services.local.settings import free_port
from tests.api.conftest import Connect
from tests.api.fake_router import MODEL, FakeRouter, Refusal, serving
from tests.api.test_client import QUICK, held
from tests.support.waiting import wait_until

FULL = Refusal(
    grpc.StatusCode.RESOURCE_EXHAUSTED, "QUEUE_FULL", "the lane is full", retry_after=0.2
)


async def test_retry_info_is_honoured_with_the_same_request_id(
    connect: Connect, router: FakeRouter
) -> None:
    router.refusals = [FULL, FULL]
    loop = asyncio.get_running_loop()
    began = loop.time()
    await connect(router.address, retry=QUICK).do("encode", MODEL, "x")
    assert loop.time() - began >= 0.4  # A lower bound: it waited for Retry-After twice.
    assert len(router.calls) == 3
    assert len({call.request_id for call in router.calls}) == 1


async def test_deadline_shrinks_over_retries(connect: Connect, router: FakeRouter) -> None:
    router.refusals = [Refusal(grpc.StatusCode.RESOURCE_EXHAUSTED, "QUEUE_FULL", retry_after=0.5)]
    await connect(router.address, retry=QUICK, timeout=9.0).do("encode", MODEL, "x")
    first, second = (call.seconds_left for call in router.calls)
    assert second <= first - 0.3  # 0.5 s, and what gRPC rounds.


@pytest.mark.parametrize(
    "refusal",
    [
        Refusal(grpc.StatusCode.INVALID_ARGUMENT, "INVALID_INPUT", field="items"),
        Refusal(grpc.StatusCode.UNAVAILABLE, "WORKER_LOST"),
        Refusal(grpc.StatusCode.FAILED_PRECONDITION, "MODEL_LOAD_FAILED"),
        Refusal(grpc.StatusCode.INTERNAL, "INTERNAL"),
        Refusal(grpc.StatusCode.RESOURCE_EXHAUSTED),
    ],
    ids=lambda refusal: refusal.reason or refusal.code.name,
)
async def test_unmarked_error_is_not_retried(
    connect: Connect, router: FakeRouter, refusal: Refusal
) -> None:
    router.refusals = [refusal]
    with pytest.raises(errors.ShoalError) as caught:
        await connect(router.address, retry=QUICK).do("encode", MODEL, "x")
    assert len(router.calls) == 1
    assert caught.value.request_id == router.calls[0].request_id
    assert caught.value.code == refusal.code.name


async def test_tries_are_bounded(connect: Connect, router: FakeRouter) -> None:
    router.refusals = [
        Refusal(grpc.StatusCode.UNAVAILABLE, "NO_CAPACITY", "no worker", retry_after=0.0)
    ] * 10
    policy = shoal.RetryPolicy(attempts=3, first_delay=0.01, longest_delay=0.02)
    with pytest.raises(errors.NoCapacity, match="no worker"):
        await connect(router.address, retry=policy).do("encode", MODEL, "x")
    assert len(router.calls) == 3


async def test_wait_beyond_the_deadline_is_not_begun(connect: Connect, router: FakeRouter) -> None:
    router.refusals = [
        Refusal(grpc.StatusCode.RESOURCE_EXHAUSTED, "QUEUE_FULL", "full", retry_after=500.0)
    ]
    with pytest.raises(errors.QueueFull):
        await asyncio.wait_for(connect(router.address, timeout=200.0).do("encode", MODEL, "x"), 60)
    assert len(router.calls) == 1


async def test_deadline_that_passes(connect: Connect, router: FakeRouter) -> None:
    client = connect(router.address)
    await client.do("encode", MODEL, "x")
    router.gate.clear()
    # The connection exists, so that the call arrives within the timeout on a busy machine, too.
    with pytest.raises(errors.DeadlinePassed, match="within the timeout"):
        await client.do("encode", MODEL, "x", timeout=3.0)
    assert len(router.calls) == 2


async def test_unreachable_router_is_reported_with_its_address(
    connect: Connect, nobody: str
) -> None:
    policy = shoal.RetryPolicy(attempts=3, first_delay=0.01, longest_delay=0.02)
    with pytest.raises(errors.CannotConnect, match=nobody):
        await connect(nobody, retry=policy).do("encode", MODEL, "x")


async def test_next_address_is_used_and_kept(
    connect: Connect, nobody: str, router: FakeRouter
) -> None:
    client = connect(f"{nobody},{router.address}", retry=shoal.RetryPolicy(attempts=2))
    for _ in range(5):
        await client.do("encode", MODEL, "x")
    assert len(router.calls) == 5


async def test_draining_moves_on(
    connect: Connect, router: FakeRouter, other_router: FakeRouter
) -> None:
    client = connect(f"{router.address},{other_router.address}", retry=QUICK)
    await client.do("encode", MODEL, "x")
    used, unused = (router, other_router) if router.calls else (other_router, router)
    used.refusals = [Refusal(grpc.StatusCode.UNAVAILABLE, "DRAINING", "stopping", retry_after=0.0)]
    await client.do("encode", MODEL, "x")
    assert len(used.calls) == 2
    assert [call.request_id for call in unused.calls] == [used.calls[-1].request_id]


async def test_router_that_dies_with_calls_in_flight(
    connect: Connect, router: FakeRouter, nobody: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SIGKILL while parts are held: each arrives at the other router under its own id, none is
    lost.
    """
    monkeypatch.setattr("shoal.verbs.base.random.randrange", lambda addresses: 0)
    arguments = (sys.executable, "-m", "tests.api.fake_router")
    doomed = await asyncio.create_subprocess_exec(*arguments, stdout=asyncio.subprocess.PIPE)
    assert doomed.stdout is not None
    try:
        address = (await doomed.stdout.readline()).decode().strip()
        # The second is dead already: going round must not stop there.
        client = connect(
            f"{address},{nobody},{router.address}", request_items=1, concurrency=16, retry=QUICK
        )
        work = asyncio.create_task(
            client.do("encode", MODEL, [f"text {number}" for number in range(16)])
        )
        held_id = (await asyncio.wait_for(doomed.stdout.readline(), 60)).decode().strip()
    finally:
        doomed.send_signal(signal.SIGKILL)
        await doomed.wait()
    result = await asyncio.wait_for(work, 60)
    assert result.dense[:, 0].tolist() == [6.0] * 10 + [7.0] * 6
    assert held_id in {call.request_id for call in router.calls}


async def test_restarted_router_is_found_again(connect: Connect) -> None:
    port = free_port()
    with serving(FakeRouter(), port=port) as first:
        client = connect(first.address)
        await client.do("encode", MODEL, "x")
    work = asyncio.create_task(client.do("encode", MODEL, "x"))
    await asyncio.sleep(0)
    with serving(FakeRouter(), port=port) as second:
        await asyncio.wait_for(work, 60)
        assert len(second.calls) == 1


class Spent(RetryBudgets):
    """One retry, and never another."""

    def __init__(self) -> None:
        super().__init__()
        self._failover = RetryBudget(capacity=1, per_second=1e-6, per_success=0)


async def test_waiting_calls_resume_when_the_router_restarts(
    connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No budget of retries holds it up: no router has heard of any of it."""
    monkeypatch.setattr("shoal.calls.caller.RetryBudgets", Spent)
    port = free_port()
    with serving(FakeRouter(), port=port) as first:
        address = first.address
    # The router may take seconds to start, in which a call is tried many times.
    patient = shoal.RetryPolicy(attempts=10_000, first_delay=0.01, longest_delay=0.05)
    client = connect(address, retry=patient)
    work = [asyncio.create_task(client.do("encode", MODEL, "x")) for _ in range(30)]
    await asyncio.sleep(0.3)
    with serving(FakeRouter(), port=port) as second:
        await asyncio.wait_for(asyncio.gather(*work), 60)
        assert len(second.calls) == 30


async def test_leaving_cancels_the_calls(router: FakeRouter) -> None:
    async with shoal.AsyncClient(router.address, request_items=1) as client:
        router.gate.clear()
        work = asyncio.create_task(client.encode(MODEL, ["a"] * 20))
        await held(router, 4)
        work.cancel()
        with pytest.raises(asyncio.CancelledError):
            await work
        await asyncio.to_thread(wait_until, lambda: router.active == 0)
    assert len(router.calls) == 4


async def test_deadline_that_passes_in_a_later_try_brings_why_there_was_one(
    connect: Connect, router: FakeRouter
) -> None:
    client = connect(router.address, retry=QUICK)
    await client.do("encode", MODEL, "x")
    router.refusals = [
        Refusal(grpc.StatusCode.UNAVAILABLE, "NO_CAPACITY", "no worker", retry_after=0.0)
    ]
    original = FakeRouter.begin_call

    def hold_after_refusal(
        self: FakeRouter, method: str, request: Message, context: grpc.ServicerContext
    ) -> int:
        if not self.refusals:
            self.gate.clear()
        return original(self, method, request, context)

    router.begin_call = hold_after_refusal.__get__(router)  # type: ignore[method-assign]
    with pytest.raises(errors.DeadlinePassed) as caught:
        await client.do("encode", MODEL, "x", timeout=3.0)
    assert isinstance(caught.value.earlier, errors.NoCapacity)
    assert len(router.calls) == 3
