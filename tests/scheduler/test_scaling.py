"""A whole scheduler with a real Redis: work that arrives for a pool without workers reaches KEDA
and Prometheus.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from types import MappingProxyType

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from shoal.v1 import models_pb2, worker_pb2

from libs.catalog.pools import Pools, PoolSpec, read_pools
from libs.fleet import Fleet
from libs.queue import LaneKey, Lanes, QueuedJob, connect
from libs.serving.watched import Watched
from services.scheduler.app import SchedulerAddresses, running
from services.scheduler.settings import Settings
from tests.router.parts import until
from tests.scheduler.test_metrics import scrape
from tests.support.keda_wire import method, metrics_request, reference
from tests.support.redis import RedisServer

LANE = LaneKey("l4-spot", "org/model")
POOLS = Pools(
    "l4-spot", MappingProxyType({"l4-spot": PoolSpec("l4-spot", max_workers=7, drain_seconds=1.0)})
)
REFERENCE = reference("worker-l4-spot", "mesh", {"pool": "l4-spot"})


@asynccontextmanager
async def scheduler(
    redis: RedisServer, pools: Watched[Pools] | None = None
) -> AsyncIterator[SchedulerAddresses]:
    settings = Settings(
        "scheduler",
        address="127.0.0.1:0",
        metrics_address="127.0.0.1:0",
        redis_url=redis.url,
        pools=pools or Watched.fixed(POOLS),
    )
    async with running(settings) as addresses:
        yield addresses


async def value(channel: grpc.aio.Channel) -> int:
    (metric,) = (
        await method(channel, "GetMetrics")(metrics_request(REFERENCE, "desired-workers"))
    ).metricValues
    return int(metric.metricValue)


async def ready(channel: grpc.aio.Channel) -> None:
    stub = health_pb2_grpc.HealthStub(channel)
    async with asyncio.timeout(60):
        async for status in stub.Watch(health_pb2.HealthCheckRequest(service="readiness")):
            if status.status == health_pb2.HealthCheckResponse.SERVING:
                return


async def test_from_a_job_to_a_push_and_the_same_number_everywhere() -> None:
    with RedisServer() as server:
        redis = connect(server.url)
        lanes = Lanes(redis, router_id="router", dead_result=b"")
        async with (
            scheduler(server) as addresses,
            grpc.aio.insecure_channel(addresses.grpc) as channel,
        ):
            await ready(channel)
            assert await value(channel) == 0
            stream = method(channel, "StreamIsActive")(REFERENCE)
            assert not (await stream.read()).result
            deadline_ms = int(time.time() * 1000) + 600_000
            jobs = [
                QueuedJob(f"job-{number}", "tenant", 1.0, 1 << 30, deadline_ms, "bulk", b"x")
                for number in range(2)
            ]
            assert await lanes.enqueue(LANE, [jobs], max_tokens=1 << 40, notify=True) == [True]
            assert (await asyncio.wait_for(stream.read(), 60)).result
            # In one step, to as many as there may be.
            assert await value(channel) == 7
            assert (await scrape(addresses.metrics))["shoal_desired_workers", "l4-spot"] == 7

            report = worker_pb2.HeartbeatRequest(
                worker_id="a", epoch="1", pool="l4-spot", device="cuda", memory_bytes=1 << 30
            )
            report.models.add(model=LANE.model, state=models_pb2.MODEL_STATE_LOADING)
            async with asyncio.timeout(60):
                while (await scrape(addresses.metrics))["shoal_live_workers", "l4-spot"] != 1:
                    await Fleet(redis).report(report)  # again, or it would count as silent
            server.kill()  # the last answers stay available
            assert await value(channel) == 7
            assert (await method(channel, "IsActive")(REFERENCE)).result
            stream.cancel()
        await redis.aclose()


async def _is(channel: grpc.aio.Channel, wanted: int) -> bool:
    return await value(channel) == wanted


async def test_changed_file_of_pools_counts_without_a_restart(tmp_path: Path) -> None:
    file = tmp_path / "pools.yaml"
    file.write_text("pools: {l4-spot: {device: cuda, min_workers: 2}}\n")
    watched = Watched([file], partial(read_pools, file))
    with RedisServer() as server:
        async with (
            scheduler(server, watched) as addresses,
            grpc.aio.insecure_channel(addresses.grpc) as channel,
        ):
            await ready(channel)
            assert await value(channel) == 2
            file.write_text("pools: {l4-spot: {device: cuda, min_workers: 3}}\n")
            await until(partial(_is, channel, 3), "the file to be read")
            file.write_text("pools: {l4-spot: {device: abacus}}\n")
            await asyncio.sleep(2.5)  # two looks
            assert await value(channel) == 3, "what was read before holds"
