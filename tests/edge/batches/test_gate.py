"""The limits of requests in flight, and of answers that are put together."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Iterator

from services.edge import asgi
from services.edge.batches.gate import Gate
from services.edge.messages.names import AliasNames
from services.edge.routers import Routers
from tests.router.parts import until


async def test_gate_adapts_to_refusals() -> None:
    gate, running_now, most, sender = Gate(8), 0, 0, ("red", "model")

    async def send(status: int) -> None:
        nonlocal running_now, most
        async with gate.enter(sender):
            running_now += 1
            most = max(most, running_now)
            try:
                await asyncio.sleep(0)
            finally:
                running_now -= 1
            gate.report(sender, status, 1.0, 2.0)

    await asyncio.gather(*(send(200) for _ in range(100)))
    assert (gate.limit(sender), most) == (8, 8)
    await asyncio.gather(*(send(429) for _ in range(8)))
    assert gate.limit(sender) == 4
    assert gate.limit(("blue", "model")) == gate.limit(("red", "other")) == 2
    waiting = [asyncio.create_task(send(200)) for _ in range(20)]
    await asyncio.sleep(0)
    for task in waiting[::2]:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    most = 0
    await asyncio.gather(*(send(200) for _ in range(40)))
    assert (running_now, most <= 8) == (0, True)


async def test_requests_of_many_senders_leave_nothing_behind() -> None:
    gate, running_now, most, done = Gate(4), 0, 0, 0

    async def send(tenant: str, model: str) -> None:
        nonlocal running_now, most, done
        async with gate.enter((tenant, model)):
            running_now += 1
            most = max(most, running_now)
            await asyncio.sleep(0)
            running_now -= 1
            done += 1

    senders = [(f"tenant {number % 4}", f"model {number % 16}") for number in range(400)]
    tasks = [asyncio.create_task(send(*one)) for one in senders]
    await asyncio.sleep(0)
    for task in tasks[100:200]:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert (most, done) == (4, 300)
    assert (gate._total, gate._running, gate._tenants, gate._waiting) == (0, {}, {}, {})


async def test_free_places_go_to_the_tenant_with_the_fewest_requests() -> None:
    gate, order = Gate(4), list[str]()
    free = {tenant: asyncio.Event() for tenant in ("red", "blue")}

    async def send(tenant: str) -> None:
        async with gate.enter((tenant, "model")):
            order.append(tenant)
            await free[tenant].wait()
            gate.report((tenant, "model"), 200, 1.0, 2.0)

    free["red"].set()
    await asyncio.gather(*(send("red") for _ in range(20)))
    assert gate.limit(("red", "model")) == 4
    free["red"].clear()
    order.clear()
    tasks = [asyncio.create_task(send("red")) for _ in range(10)]
    await asyncio.sleep(0)
    tasks += [asyncio.create_task(send("blue")) for _ in range(2)]
    await asyncio.sleep(0)
    assert order == ["red"] * 4
    free["red"].set()
    for _ in range(20):
        await asyncio.sleep(0)
    assert order[4:6] == ["blue", "blue"]
    free["blue"].set()
    await asyncio.gather(*tasks)
    assert Counter(order) == {"red": 10, "blue": 2}


async def test_few_answers_are_put_together_at_a_time() -> None:
    """The bound also holds if their requests are cancelled."""
    application = asgi.Application(
        Routers(("127.0.0.1:1",), None), lambda: AliasNames({}), asgi.State()
    )
    lock, may_end = threading.Lock(), threading.Event()
    loop, is_full = asyncio.get_running_loop(), asyncio.Event()
    running_now = most = 0

    def pieces() -> Iterator[bytes]:
        nonlocal running_now, most
        with lock:
            running_now += 1
            most = max(most, running_now)
        if most == asgi.JOIN_THREADS:
            loop.call_soon_threadsafe(is_full.set)
        yield b"a"
        may_end.wait(120.0)
        with lock:
            running_now -= 1
        yield b"b"

    cancelled = [asyncio.create_task(application._join(pieces())) for _ in range(3)]
    await asyncio.wait_for(is_full.wait(), 60.0)
    for task in cancelled:
        task.cancel()
    await asyncio.gather(*cancelled, return_exceptions=True)
    joins = [asyncio.create_task(application._join(pieces())) for _ in range(4)]
    await asyncio.sleep(0.1)
    may_end.set()
    assert await asyncio.gather(*joins) == [b"ab"] * 4
    await until(lambda: running_now == 0)
    assert most == asgi.JOIN_THREADS
    assert await application._join(b"whole") == b"whole"
