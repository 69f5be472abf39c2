"""The stub of a router that `make bench-edge` measures the edge with."""

from __future__ import annotations

import asyncio
import contextlib

from shoal import AsyncClient

from benchmarks.common.processes import LineProcess
from benchmarks.http.stub_router import DIMENSIONS


async def test_it_answers_concurrent_calls_on_a_stream() -> None:
    async with contextlib.AsyncExitStack() as stack:
        stub = await stack.enter_async_context(
            LineProcess.started("benchmarks.http.stub_router", [])
        )
        address = f"127.0.0.1:{stub.ready['port']}"
        client = await stack.enter_async_context(AsyncClient(address))
        results = await asyncio.gather(
            *(client.encode("stub/embedder", [f"text {number}"]) for number in range(64))
        )
    assert all(result.dense.shape == (1, DIMENSIONS) for result in results)
