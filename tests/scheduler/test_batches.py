"""A batch of OpenAI's API scales a pool from zero and back: a whole edge, router and scheduler with
a real Redis.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from types import MappingProxyType

import grpc
import pytest

from libs.catalog.pools import Pools, PoolSpec
from libs.serving.watched import Watched
from services.edge.batches.settings import BatchSettings
from services.scheduler import demand
from tests.edge.batches.parts import line, retrieve, serving_edge, start, wait_for
from tests.router.parts import MODEL, FakeWorker, card, router, until
from tests.scheduler.test_scaling import REFERENCE, ready, scheduler, value
from tests.support.keda_wire import method
from tests.support.redis import RedisServer

REQUESTS = 40
POOLS = Pools(
    "l4-spot",
    MappingProxyType({"l4-spot": PoolSpec("l4-spot", max_workers=7, keep_warm_seconds=0.0)}),
)


async def is_active(channel: grpc.aio.Channel) -> bool:
    return bool((await method(channel, "IsActive")(REFERENCE)).result)


async def is_value(channel: grpc.aio.Channel, wanted: int) -> bool:
    return await value(channel) == wanted


async def test_batch_requests_workers_until_its_last_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Workers that a scheduler finds at its start are kept for minutes; this one starts for the
    # batch.
    monkeypatch.setattr(demand, "FIND_SECONDS", 0.0)
    content = b"".join(
        line(f"id-{number}", "", body={"model": MODEL, "input": f"text {number}"})
        for number in range(REQUESTS)
    )
    with RedisServer() as server:
        async with (
            scheduler(server, Watched.fixed(POOLS)) as addresses,
            grpc.aio.insecure_channel(addresses.grpc) as channel,
            router(server.url, pools=POOLS) as client,
            serving_edge(client.address, BatchSettings(url=str(tmp_path / "files"))) as http,
        ):
            await ready(channel)
            assert (await value(channel), await is_active(channel)) == (0, False)
            batch = await start(http, content)
            await until(partial(is_active, channel), "the pool to be active", 120.0)
            assert await value(channel) >= 1
            assert (await retrieve(http, batch))["request_counts"]["completed"] == 0
            worker = FakeWorker(client.address, models=[card()], pool="l4-spot")
            async with worker.working():
                found = await wait_for(http, batch, ["completed"])
                assert found["request_counts"]["completed"] == REQUESTS

                async def is_idle() -> bool:
                    return not await is_active(channel)

                await until(is_idle, "the pool to be idle", 120.0)
                await worker.hold_beats()
                await worker.beat(leaving=True)  # KEDA removes the worker once the pool is idle
            await until(partial(is_value, channel, 0), "no worker to be wanted", 120.0)
            assert not await is_active(channel)
