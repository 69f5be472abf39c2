"""The scaler as KEDA calls it: real gRPC, KEDA's own messages written by hand, and a clock that the
test drives.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import MappingProxyType
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from libs.catalog.pools import Pools, PoolSpec
from libs.serving import serving
from services.scheduler.demand import Demand
from services.scheduler.scaler import Scaler
from services.scheduler.view import SchedulerView
from tests.scheduler.snapshots import MODEL, Mesh, holding
from tests.support.keda_wire import SERVICE, method, metrics_request, reference

POOLS = Pools(
    "cpu",
    MappingProxyType({"cpu": PoolSpec("cpu", max_workers=20), "gpu": PoolSpec("gpu", "cuda")}),
)
UNARY = ("IsActive", "GetMetricSpec", "GetMetrics")
STREAMS = ("StreamIsActive", "StreamMetricSpec")


class DrivenClock:
    """Time passes by `advance` only. `waits`: how often something has begun to wait."""

    def __init__(self) -> None:
        self.at = 1000.0
        self.waits = 0
        self._sleepers: list[tuple[float, asyncio.Future[None]]] = []

    def now(self) -> float:
        return self.at

    async def sleep(self, seconds: float) -> None:
        woken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._sleepers.append((self.at + seconds, woken))
        self.waits += 1
        await woken

    def advance(self, seconds: float) -> bool:
        """Advance the clock; return whether any sleeper was woken."""
        self.at += seconds
        due = [woken for at, woken in self._sleepers if at <= self.at and not woken.done()]
        self._sleepers = [
            (at, woken) for at, woken in self._sleepers if at > self.at and not woken.done()
        ]
        for woken in due:
            woken.set_result(None)
        return bool(due)


class Scene:
    """A scaler that serves, the mesh it sees, and KEDA's calls."""

    def __init__(self, pools: Pools) -> None:
        self.mesh = Mesh()
        self.clock = DrivenClock()
        self.view = SchedulerView()
        self.demand = Demand(pools)
        self.scaler = Scaler(
            self.demand, self.view, clock=self.clock.now, sleep=self.clock.sleep, chance=lambda: 0.5
        )
        self.channel: grpc.aio.Channel

    def snapshot(self, seconds: float = 0.0) -> None:
        """The scheduler looks at the mesh `seconds` later."""
        self.clock.advance(seconds)
        self.mesh.at = self.clock.at
        snapshot = self.mesh.snapshot()
        self.demand.update(snapshot)
        self.view.update(snapshot)

    async def call(self, name: str, metric: str = "desired-workers", /, **metadata: str) -> Any:
        """The answer, of a stream the first one."""
        request = reference("worker-cpu", "mesh", metadata)
        call = method(self.channel, name)(
            metrics_request(request, metric) if name == "GetMetrics" else request
        )
        return await (call.read() if name in STREAMS else call)

    async def is_active(self, **metadata: str) -> tuple[int, bool]:
        """Desired workers and whether the pool is active."""
        (value,) = (await self.call("GetMetrics", "desired-workers", **metadata)).metricValues
        assert value.metricValueFloat == value.metricValue
        return value.metricValue, (await self.call("IsActive", **metadata)).result

    @asynccontextmanager
    async def stream(self, name: str, **metadata: str) -> AsyncIterator[Stream]:
        call = method(self.channel, name)(reference("worker-cpu", "mesh", metadata))
        before = self.clock.waits
        stream = Stream(self, call)
        try:
            await stream.settled(before)
            yield stream
        finally:
            call.cancel()
            await stream.reader


class Stream:
    """A stream's messages so far. Every step returns once the handler waits again or has ended."""

    def __init__(self, scene: Scene, call: Any) -> None:
        self.messages: list[Any] = []
        self.scene = scene
        self.call = call
        self.reader = asyncio.create_task(self._read())

    async def _read(self) -> None:
        try:
            async for message in self.call:
                self.messages.append(message)
        except (grpc.aio.AioRpcError, asyncio.CancelledError):
            pass

    async def settled(self, before: int) -> None:
        async with asyncio.timeout(60):
            while self.scene.clock.waits == before and not self.reader.done():  # noqa: ASYNC110 - gRPC has no event for it
                await asyncio.sleep(0)

    async def snapshot(self, seconds: float = 0.5) -> None:
        before = self.scene.clock.waits
        self.scene.snapshot(seconds)
        await self.settled(before)

    async def advance(self, seconds: float) -> None:
        before = self.scene.clock.waits
        if self.scene.clock.advance(seconds):
            await self.settled(before)

    async def received(self, messages: int) -> None:
        """The handler may wait again before its message has crossed the connection."""
        async with asyncio.timeout(60):
            while len(self.messages) < messages and not self.reader.done():  # noqa: ASYNC110 - gRPC has no event for it
                await asyncio.sleep(0.001)

    async def ended(self) -> grpc.StatusCode:
        async with asyncio.timeout(60):
            return await self.call.code()

    async def results(self) -> list[bool]:
        """Return the messages of the stream, once it has ended in order."""
        assert await self.ended() == grpc.StatusCode.OK
        await self.reader
        return [message.result for message in self.messages]


@asynccontextmanager
async def serving_scaler(pools: Pools = POOLS) -> AsyncIterator[Scene]:
    scene = Scene(pools)
    async with (
        serving("127.0.0.1:0", [scene.scaler.service()], on_drained=scene.scaler.close) as server,
        grpc.aio.insecure_channel(server.address) as channel,
    ):
        scene.channel = channel
        yield scene


def violation(error: grpc.aio.AioRpcError) -> str:
    """The field of an INVALID_ARGUMENT."""
    assert error.code() == grpc.StatusCode.INVALID_ARGUMENT
    (details,) = [
        value for key, value in error.trailing_metadata() or () if key == "grpc-status-details-bin"
    ]
    assert isinstance(details, bytes)
    for part in status_pb2.Status.FromString(details).details:
        found = error_details_pb2.ErrorInfo()
        if part.Unpack(found):
            return found.metadata["field"]
    raise AssertionError("no ErrorInfo")


async def test_one_metric_and_its_target() -> None:
    async with serving_scaler() as scene:
        scene.snapshot()
        (spec,) = (await scene.call("GetMetricSpec", pool="cpu")).metricSpecs
        assert (spec.metricName, spec.targetSize, spec.targetSizeFloat) == (
            "desired-workers",
            1,
            1.0,
        )


@pytest.mark.parametrize(
    "metric", ["desired-workers", "s0-desired-workers", "s12-desired-workers", ""]
)
async def test_exactly_one_value_under_every_name_that_keda_uses(metric: str) -> None:
    async with serving_scaler() as scene:
        scene.mesh.worker("a", holding(speed=100.0))
        scene.snapshot()
        scene.mesh.lane(12_000, enqueued=0)
        scene.snapshot(0.5)
        (value,) = (await scene.call("GetMetrics", metric, pool="cpu")).metricValues
        assert (value.metricName, value.metricValue, value.metricValueFloat) == (
            "desired-workers",
            2,
            2.0,
        )


async def test_zero_is_zero_in_both_fields() -> None:
    async with serving_scaler() as scene:
        scene.snapshot()
        assert await scene.is_active(pool="cpu") == (0, False)


async def test_each_caller_has_its_own_options() -> None:
    async with serving_scaler() as scene:
        scene.mesh.worker("a", holding(speed=100.0))
        scene.snapshot()
        scene.mesh.lane(12_000, enqueued=0)
        scene.snapshot(0.5)
        # 120 s of work, 60 of them done before another worker arrives.
        assert await scene.is_active(pool="cpu", scalerAddress="elsewhere:50053") == (2, True)
        assert await scene.is_active(pool="cpu", drainSeconds="10") == (6, True)
        assert await scene.is_active(poolFromEnv="cpu", minWarmFromEnv="4") == (4, True)
        assert await scene.is_active(pool="gpu", minWarm="1") == (1, True)
        assert await scene.is_active(pool="gpu") == (0, False)


@pytest.mark.parametrize("name", [*UNARY, *STREAMS])
@pytest.mark.parametrize(
    ("metadata", "key"),
    [
        ({}, "pool"),
        ({"pool": "cqu"}, "pool"),
        ({"Pool": "cpu"}, "Pool"),
        ({"pool": "cpu", "minWarm": "1.5"}, "minWarm"),
        ({"pool": "cpu", "minWarm": "-1"}, "minWarm"),
        ({"pool": "cpu", "minwarm": "1"}, "minwarm"),
        ({"pool": "cpu", "drainSeconds": "0"}, "drainSeconds"),
        ({"pool": "cpu", "drainSeconds": "soon"}, "drainSeconds"),
        ({"pool": "cpu", "drainSeconds": "inf"}, "drainSeconds"),
        ({"pool": "cpu", "targetUtilization": "nan"}, "targetUtilization"),
        ({"pool": "cpu", "targetUtilization": "75"}, "targetUtilization"),
    ],
)
async def test_invalid_trigger_metadata_is_named(
    name: str, metadata: dict[str, str], key: str
) -> None:
    async with serving_scaler() as scene:
        scene.snapshot()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await scene.call(name, "desired-workers", **metadata)
        assert violation(caught.value) == f"scalerMetadata.{key}"
        assert key in str(caught.value.details())


async def test_metric_that_was_never_offered() -> None:
    async with serving_scaler() as scene:
        scene.snapshot()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await scene.call("GetMetrics", "queue-length", pool="cpu")
        assert violation(caught.value) == "metricName"


async def test_old_answers_hold_for_a_minute_and_then_let_nothing_shrink() -> None:
    async with serving_scaler() as scene:
        scene.snapshot()
        scene.snapshot(301.0)
        for worker in "abc":
            scene.mesh.worker(worker)
        scene.snapshot(1.0)
        assert await scene.is_active(pool="cpu") == (0, False)
        scene.clock.advance(59.0)
        assert await scene.is_active(pool="cpu") == (0, False)
        scene.clock.advance(1.0)
        assert await scene.is_active(pool="cpu") == (3, True)
        scene.clock.advance(100_000.0)
        assert await scene.is_active(pool="cpu") == (3, True)
        assert await scene.is_active(pool="cpu", minWarm="5") == (5, True)
        scene.snapshot()
        assert await scene.is_active(pool="cpu") == (0, False)


async def test_before_the_first_look_only_the_specification_is_known() -> None:
    async with serving_scaler() as scene:
        assert (await scene.call("GetMetricSpec", pool="cpu")).metricSpecs
        for name in ("IsActive", "GetMetrics"):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await scene.call(name, "desired-workers", pool="cpu")
            # KEDA keeps the replicas on an error; 0 would be wrong, and so would any other number.
            assert caught.value.code() == grpc.StatusCode.FAILED_PRECONDITION
        async with scene.stream("StreamIsActive", pool="cpu") as stream:
            assert stream.messages == []
            await stream.snapshot()
            scene.scaler.close()
            assert await stream.results() == [False]


async def test_push_when_a_pool_wakes_and_again_while_it_has_no_worker() -> None:
    async with serving_scaler() as scene:
        scene.snapshot()
        async with scene.stream("StreamIsActive", pool="cpu") as stream:
            await stream.snapshot()
            await stream.advance(9.0)  # nothing
            scene.mesh.lane(500, enqueued=0)
            await stream.snapshot()  # true
            await stream.snapshot()
            await stream.advance(9.0)
            await stream.advance(1.0)  # true
            await stream.snapshot(10.0)  # true
            scene.mesh.worker("a", holding(speed=100.0))
            await stream.snapshot(0.5)  # a worker is there: nothing more, for however long
            await stream.snapshot(30.0)
            await stream.advance(30.0)
            scene.mesh.lane(0, enqueued=0)
            await stream.snapshot()
            scene.scaler.close()
            assert await stream.results() == [False, True, True, True]


@pytest.mark.parametrize("workers", ["", "a"])
async def test_first_push_waits_for_nothing(workers: str) -> None:
    async with serving_scaler() as scene:
        scene.snapshot()
        scene.snapshot(301.0)
        for worker in workers:
            scene.mesh.worker(worker, holding(speed=100.0))
        scene.snapshot(0.5)
        async with scene.stream("StreamIsActive", pool="cpu") as stream:
            scene.mesh.lane(500, enqueued=0)
            await stream.snapshot()
            scene.scaler.close()
            assert await stream.results() == [False, True]


async def test_nothing_is_pushed_without_change() -> None:
    async with serving_scaler() as scene:
        scene.snapshot()
        async with scene.stream("StreamIsActive", pool="cpu") as stream:
            await stream.advance(120.0)
            assert await scene.is_active(pool="cpu") == (0, True)
            await stream.snapshot()
            scene.scaler.close()
            assert await stream.results() == [False]


async def test_stream_that_opens_in_the_middle_of_work_says_so() -> None:
    async with serving_scaler() as scene:
        scene.mesh.lane(500)
        scene.snapshot()
        async with scene.stream("StreamIsActive", pool="cpu") as stream:
            scene.scaler.close()
            assert await stream.results() == [True]


@pytest.mark.parametrize("name", STREAMS)
async def test_streams_end_in_order_after_about_five_minutes(name: str) -> None:
    async with serving_scaler() as scene:
        scene.snapshot()
        async with scene.stream(name, pool="cpu") as stream:
            await stream.snapshot(299.0)
            assert not stream.reader.done()
            await stream.advance(1.0)
            assert await stream.ended() == grpc.StatusCode.OK
            await stream.reader
            assert len(stream.messages) == 1


async def test_ends_of_streams_are_spread() -> None:
    view = SchedulerView()
    ends = [
        Scaler(
            Demand(POOLS),
            view,
            clock=lambda: 0.0,
            chance=lambda chance=chance: chance,  # type: ignore[misc]
        )._end_of_stream()
        for chance in (0.0, 0.5, 1.0)
    ]
    assert ends == pytest.approx([270.0, 300.0, 330.0])


async def test_specification_is_streamed_once_and_the_stream_kept() -> None:
    async with serving_scaler() as scene:
        scene.snapshot()
        async with scene.stream("StreamMetricSpec", pool="cpu") as stream:
            await stream.snapshot()
            await stream.snapshot(60.0)
            await stream.received(1)
            assert not stream.reader.done()
            scene.scaler.close()
            assert await stream.ended() == grpc.StatusCode.OK
            await stream.reader
            (message,) = stream.messages
            assert message == await scene.call("GetMetricSpec", pool="cpu")


async def test_server_that_stops_ends_streams_in_order_and_answers_until_then() -> None:
    scene = Scene(POOLS)
    serves = serving("127.0.0.1:0", [scene.scaler.service()], on_drained=scene.scaler.close)
    server = await serves.__aenter__()
    async with grpc.aio.insecure_channel(server.address) as channel:
        scene.channel = channel
        scene.snapshot()
        async with (
            scene.stream("StreamIsActive", pool="cpu") as active,
            scene.stream("StreamMetricSpec", pool="cpu") as specs,
        ):
            await server.drain(1.0)
            assert await scene.is_active(pool="cpu") == (0, False)
            await serves.__aexit__(None, None, None)
            assert await active.results() == [False]
            assert await specs.ended() == grpc.StatusCode.OK


async def test_pool_that_is_seen_later() -> None:
    async with serving_scaler(Pools()) as scene:
        scene.snapshot()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await scene.is_active(pool="gpu")
        assert violation(caught.value) == "scalerMetadata.pool"
        scene.mesh.lane(10, pool="gpu", model=MODEL)
        scene.snapshot(1.0)
        assert await scene.is_active(pool="gpu") == (1, True)


async def test_reflection_lists_the_service() -> None:
    async with serving_scaler() as scene:
        stub = reflection_pb2_grpc.ServerReflectionStub(scene.channel)
        asked = [
            reflection_pb2.ServerReflectionRequest(list_services=""),
            reflection_pb2.ServerReflectionRequest(file_containing_symbol=SERVICE),
        ]
        listed, described = [decision async for decision in stub.ServerReflectionInfo(iter(asked))]
        assert SERVICE in {service.name for service in listed.list_services_response.service}
        assert described.file_descriptor_response.file_descriptor_proto
