"""The KEDA that our scaler is tested with does what KEDA does: each rule of its documentation and
code, against a small server.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import grpc
import pytest

from services.scheduler.simulate.hpa import Hpa, Policy, ScalingRules
from tests.router.parts import until
from tests.support.clock import FakeClock
from tests.support.keda import FakeKeda, Fallback, ScaledObject
from tests.support.keda_wire import CLASSES, METHODS, SERVICE

SCALED = ScaledObject(
    "workers",
    {"pool": "l4", "minWarm": "1"},
    trigger="external",
    cooldown_period=60,
    initial_cooldown_period=10,
)
NAN, INFINITE = float("nan"), float("inf")
METRICS = {"GetMetricSpec": 1, "GetMetrics": 1, "IsActive": 1}


@dataclass
class FakeScaler:
    """Gives prepared answers."""

    specs: list[tuple[str, int, float]] = field(default_factory=lambda: [("wanted", 1, 1.0)])
    values: list[tuple[str, int, float]] = field(default_factory=lambda: [("wanted", 0, 0.0)])
    active: bool = False
    failing: Counter[str] = field(default_factory=Counter)
    """Number of the next calls of a method that fail."""
    streams: list[list[bool | grpc.StatusCode]] = field(default_factory=list)
    """Messages of each opened stream before it ends by returning; an error ends it with that error;
    later streams stay open.
    """
    calls: list[tuple[str, Any]] = field(default_factory=list)
    deadlines: list[float | None] = field(default_factory=list)
    gate: asyncio.Event = field(default_factory=asyncio.Event)

    def counted(self) -> Counter[str]:
        return Counter(method for method, _ in self.calls)

    async def respond(
        self, method: str, request: Any, context: grpc.aio.ServicerContext[Any, Any]
    ) -> Any:
        self.calls.append((method, request))
        self.deadlines.append(context.time_remaining())
        await self.gate.wait()
        if self.failing[method] > 0:
            self.failing[method] -= 1
            await context.abort(grpc.StatusCode.INTERNAL, "requested by the test")
        match method:
            case "GetMetricSpec":
                kind = CLASSES["MetricSpec"]
                specs = [
                    kind(metricName=name, targetSize=size, targetSizeFloat=exact)
                    for name, size, exact in self.specs
                ]
                return CLASSES["GetMetricSpecResponse"](metricSpecs=specs)
            case "GetMetrics":
                kind = CLASSES["MetricValue"]
                values = [
                    kind(metricName=name, metricValue=value, metricValueFloat=exact)
                    for name, value, exact in self.values
                ]
                return CLASSES["GetMetricsResponse"](metricValues=values)
        return CLASSES["IsActiveResponse"](result=self.active)

    async def stream(
        self, request: Any, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[Any]:
        self.calls.append(("StreamIsActive", request))
        if not self.streams:
            await asyncio.Event().wait()
        for step in self.streams.pop(0):
            if isinstance(step, grpc.StatusCode):
                await context.abort(step, "requested by the test")
            yield CLASSES["IsActiveResponse"](result=step)

    def handlers(self) -> grpc.GenericRpcHandler:
        def unary(method: str) -> grpc.RpcMethodHandler[Any, Any]:
            async def handle(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
                return await self.respond(method, request, context)

            asked, answered, _ = METHODS[method]
            return grpc.unary_unary_rpc_method_handler(
                handle, CLASSES[asked].FromString, CLASSES[answered].SerializeToString
            )

        methods = {method: unary(method) for method in ("IsActive", "GetMetricSpec", "GetMetrics")}
        asked, answered, _ = METHODS["StreamIsActive"]
        methods["StreamIsActive"] = grpc.unary_stream_rpc_method_handler(
            self.stream, CLASSES[asked].FromString, CLASSES[answered].SerializeToString
        )
        return grpc.method_handlers_generic_handler(SERVICE, methods)


@dataclass
class Pods:
    replicas: int = 0

    def scale(self, replicas: int) -> None:
        self.replicas = replicas


@dataclass
class Stage:
    """The objects of a test: nothing happens without its calls, unless the clock runs a `running`
    KEDA.
    """

    scaler: FakeScaler
    server: grpc.aio.Server
    address: str
    clock: FakeClock
    pods: Pods
    scaled: ScaledObject = SCALED

    def keda(self, *, running: bool = False) -> FakeKeda:
        return FakeKeda(self.address, self.scaled, self.pods, self.clock, running=running)


@asynccontextmanager
async def serving(scaler: FakeScaler) -> AsyncIterator[tuple[grpc.aio.Server, str]]:
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((scaler.handlers(),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield server, f"127.0.0.1:{port}"
    finally:
        scaler.gate.set()
        await server.stop(None)


@pytest.fixture
async def stage() -> AsyncIterator[Stage]:
    scaler = FakeScaler()
    scaler.gate.set()
    async with serving(scaler) as (server, address):
        yield Stage(scaler, server, address, FakeClock(), Pods())


async def test_poll_asks_for_spec_then_unprefixed_metric_then_activity_without_deadline(
    stage: Stage,
) -> None:
    async with stage.keda() as keda:
        stage.scaler.calls.clear()
        await keda.poll()
        assert keda.metric_names == ["s0-wanted"]
    assert [method for method, _ in stage.scaler.calls] == [
        "GetMetricSpec",
        "GetMetrics",
        "IsActive",
    ]
    asked = stage.scaler.calls[1][1]
    assert asked.metricName == "wanted"
    assert (asked.scaledObjectRef.name, asked.scaledObjectRef.namespace) == ("workers", "default")
    assert {pair.key: pair.value for pair in asked.scaledObjectRef.scalerMetadata} == {
        "pool": "l4",
        "minWarm": "1",
    }
    assert set(stage.scaler.deadlines) == {None}


@pytest.mark.parametrize(
    ("value", "exact", "read"),
    [
        (3, 0.0, 3000),
        (3, 2.5, 2500),
        (3, -2.5, 3000),
        (3, NAN, 3000),
        (-3, 0.0, 0),
        (3, INFINITE, 0),
        (0, 1.23456, 1235),
        (0, 0.0, 0),
    ],
)
async def test_positive_float_counts_else_the_integer_and_nonsense_is_zero(
    stage: Stage, value: int, exact: float, read: int
) -> None:
    stage.scaler.values = [("wanted", value, exact)]
    async with stage.keda() as keda:
        await keda.poll()
        assert keda.values == [(0.0, read)]


async def test_values_are_summed_whatever_their_names(stage: Stage) -> None:
    stage.scaler.values = [("wanted", 2, 0.0), ("something else", 3, 3.0), ("", 1, 0.0)]
    stage.pods.replicas = 1
    async with stage.keda() as keda:
        await keda.sync()
    assert stage.pods.replicas == 6


async def test_target_is_the_float_if_positive_else_the_integer(stage: Stage) -> None:
    stage.scaler.specs, stage.scaler.values = [("wanted", 4, 0.0)], [("wanted", 10, 10.0)]
    stage.pods.replicas = 1
    async with stage.keda() as keda:
        await keda.sync()
        assert stage.pods.replicas == 3
    stage.scaler.specs = [("wanted", 4, 2.5)]
    async with stage.keda() as keda:
        await keda.sync()
    assert stage.pods.replicas == 4


async def test_no_values_are_an_error_to_the_hpa(stage: Stage) -> None:
    stage.scaler.values = []
    stage.pods.replicas = 3
    async with stage.keda() as keda:
        await keda.sync()
        assert keda.failed_syncs == 1
    assert stage.pods.replicas == 3


async def test_failed_call_is_tried_once_more_at_once_and_then_the_cache_is_dropped(
    stage: Stage,
) -> None:
    async with stage.keda() as keda:
        stage.scaler.failing["IsActive"] = 1
        stage.scaler.calls.clear()
        await keda.poll()
        assert (keda.rebuilds, keda.dropped_caches, keda.failed_polls) == (1, 0, 0)
        # Both calls again, because the scaler was built again.
        assert stage.scaler.counted() == {"GetMetricSpec": 1, "GetMetrics": 2, "IsActive": 2}
        stage.scaler.failing["GetMetricSpec"] = 2
        await keda.poll()
        assert (keda.rebuilds, keda.dropped_caches, keda.failed_polls) == (2, 1, 1)
        await keda.poll()
        assert keda.failed_polls == 1


async def test_no_specs_are_a_failure(stage: Stage) -> None:
    async with stage.keda() as keda:
        stage.scaler.specs = []
        await keda.poll()
        assert (keda.rebuilds, keda.failed_polls) == (1, 1)


async def test_every_5_seconds_a_poll_and_every_15_a_sync(stage: Stage) -> None:
    stage.scaler.active = True
    async with stage.keda(running=True):
        await stage.clock.run(59)
    # Once when the ScaledObject is made; at 0, 5 … 55 s; at 15, 30, 45 s.
    assert stage.scaler.counted() == {
        "GetMetricSpec": 1 + 12 + 3,
        "GetMetrics": 12 + 3,
        "IsActive": 12 + 3,
    }


async def test_hpa_is_off_at_zero_replicas(stage: Stage) -> None:
    stage.scaler.values = [("wanted", 5, 5.0)]
    async with stage.keda() as keda:
        await keda.sync()
    assert stage.pods.replicas == 0


@pytest.mark.parametrize(("least", "after"), [(0, 1), (3, 3)])
async def test_active_at_zero_replicas_scales_to_the_least_at_once(
    stage: Stage, least: int, after: int
) -> None:
    stage.scaler.active = True
    stage.scaled = replace(SCALED, min_replicas=least)
    async with stage.keda() as keda:
        await keda.poll()
        assert [(change.before, change.after, change.by) for change in keda.changes] == [
            (0, after, "keda")
        ]


async def test_active_with_replicas_only_refreshes_the_time_of_activity(stage: Stage) -> None:
    stage.scaler.active, stage.pods.replicas = True, 2
    async with stage.keda() as keda:
        await stage.clock.run(7)
        await keda.poll()
        assert (keda.last_active, keda.changes) == (7, [])


async def test_inactive_goes_to_zero_in_one_step_after_the_cooldown(stage: Stage) -> None:
    """Past the HPA's limits of going down, and counted from the last time it was active."""
    stage.scaler.active, stage.pods.replicas = True, 9
    stage.scaler.values = [("wanted", 9, 9.0)]
    async with stage.keda(running=True) as keda:
        await stage.clock.run(62)
        stage.scaler.active = False
        await stage.clock.run(57)
        assert stage.pods.replicas == 9
        await stage.clock.run(10)
        # Last active at 60 s; 60 s later have not passed at the poll of 120 s.
        assert [(change.at, change.before, change.after, change.by) for change in keda.changes] == [
            (125, 9, 0, "keda")
        ]


async def test_never_active_goes_to_zero_after_the_initial_cooldown(stage: Stage) -> None:
    stage.pods.replicas = 2
    async with stage.keda(running=True):
        await stage.clock.run(12)
        assert stage.pods.replicas > 0
        await stage.clock.run(4)
        assert stage.pods.replicas == 0


async def test_with_a_least_above_zero_inactivity_changes_nothing(stage: Stage) -> None:
    stage.pods.replicas = 2
    stage.scaled = replace(SCALED, min_replicas=2)
    async with stage.keda(running=True):
        await stage.clock.run(200)
    assert stage.pods.replicas == 2


@pytest.mark.parametrize(
    ("fallback", "left"),
    [
        (None, 4),
        (Fallback(replicas=2, behavior="currentReplicasIfHigher"), 4),
        (Fallback(replicas=0), 0),
    ],
)
async def test_replicas_stay_while_the_scaler_is_down_unless_the_fallback_is_zero(
    stage: Stage, fallback: Fallback | None, left: int
) -> None:
    stage.scaler.active, stage.scaler.values = True, [("wanted", 4, 4.0)]
    stage.pods.replicas = 4
    stage.scaled = replace(SCALED, fallback=fallback)
    async with stage.keda(running=True) as keda:
        await stage.clock.run(4)
        await stage.server.stop(None)
        await stage.clock.run(200)
        assert keda.failed_polls == 40
    assert stage.pods.replicas == left


async def test_fallback_counts_failures_of_the_metric(stage: Stage) -> None:
    """More than three in a row, each tried twice; a success starts the count again."""
    stage.scaler.active, stage.scaler.values = True, [("wanted", 1, 1.0)]
    stage.pods.replicas = 1
    stage.scaled = replace(
        SCALED, fallback=Fallback(failure_threshold=3, replicas=5, behavior="static")
    )
    async with stage.keda() as keda:
        for failures, after in ((3, 1), (0, 1), (3, 1), (1, 5)):
            stage.scaler.failing["GetMetrics"] = 2 * failures
            for _ in range(max(1, failures)):
                await keda.sync()
            assert stage.pods.replicas == after


async def test_fallback_never_fires_when_the_spec_cannot_be_had(stage: Stage) -> None:
    stage.pods.replicas = 1
    stage.scaled = replace(
        SCALED, fallback=Fallback(failure_threshold=1, replicas=5, behavior="static")
    )
    async with stage.keda() as keda:
        stage.scaler.failing["GetMetricSpec"] = 100
        for _ in range(10):
            await keda.sync()
        assert keda.failed_syncs == 10
    assert stage.pods.replicas == 1


async def test_scaler_that_is_down_at_creation_leaves_the_hpa_without_a_metric_until_it_answers(
    stage: Stage,
) -> None:
    stage.scaler.failing["GetMetricSpec"] = 2
    stage.scaler.values = [("wanted", 2, 2.0)]
    stage.pods.replicas = 1
    async with stage.keda() as keda:
        assert keda.metric_names == []
        await keda.sync()
        assert stage.pods.replicas == 1
        await keda.poll()
        await keda.sync()
        assert stage.pods.replicas == 2


async def test_call_that_hangs_holds_up_activation_by_push(stage: Stage) -> None:
    stage.scaled = replace(SCALED, trigger="external-push")
    stage.scaler.streams = [[True]]
    async with stage.keda() as keda:
        stage.scaler.gate.clear()
        poll = asyncio.create_task(keda.poll())
        await until(lambda: stage.scaler.counted()["GetMetricSpec"] == 2)
        listen = stage.clock.spawn(keda.listen())
        await until(lambda: stage.scaler.counted()["StreamIsActive"] == 1)
        await asyncio.sleep(0.05)
        assert (keda.pushes, stage.pods.replicas) == ([], 0)
        stage.scaler.gate.set()
        await until(lambda: keda.pushes)
        assert stage.pods.replicas == 1
        await poll
        listen.cancel()


async def test_external_never_opens_the_stream(stage: Stage) -> None:
    async with stage.keda(running=True):
        await stage.clock.run(10)
    assert stage.scaler.counted()["StreamIsActive"] == 0


async def test_of_pushes_only_true_matters(stage: Stage) -> None:
    """True activates at once and refreshes the time of activity; false does nothing."""
    stage.scaled = replace(SCALED, trigger="external-push")
    stage.scaler.streams = [[False, False]]
    async with stage.keda(running=True) as keda:
        await stage.clock.run(1)
        await until(lambda: keda.backoffs)
        assert (keda.pushes, stage.pods.replicas, keda.last_active) == ([], 0, None)
        stage.scaler.streams = [[True, False]]
        await stage.clock.run(3)
        await until(lambda: len(keda.backoffs) == 2)
        assert (stage.pods.replicas, keda.last_active) == (1, keda.pushes[0])


async def test_push_before_the_metrics_name_is_known_is_dropped(stage: Stage) -> None:
    stage.scaler.failing["GetMetricSpec"] = 2
    stage.scaler.streams = [[True]]
    async with stage.keda() as keda:
        listen = stage.clock.spawn(keda.listen())
        await until(lambda: keda.dropped_pushes)
        assert (keda.pushes, stage.pods.replicas) == ([], 0)
        listen.cancel()


def backed_off(keda: FakeKeda, times: int) -> bool:
    return len(keda.backoffs) == times


async def test_stream_reopens_after_2_to_60_seconds_and_sooner_only_after_a_clean_end(
    stage: Stage,
) -> None:
    """Any other end leaves the backoff where it was, however well the stream did."""
    broken: list[bool | grpc.StatusCode] = [True, grpc.StatusCode.UNAVAILABLE]
    stage.scaler.streams = [*[list(broken) for _ in range(7)], [True], list(broken), list(broken)]
    async with stage.keda() as keda:
        listen = stage.clock.spawn(keda.listen())
        for number in range(10):
            await until(partial(backed_off, keda, number + 1))
            await stage.clock.run(60)
        assert keda.backoffs == [2, 4, 8, 16, 32, 60, 60, 2, 4, 8]
        listen.cancel()


# The HPA.


def test_hpa_wants_the_value_over_the_target_rounded_up() -> None:
    assert Hpa(1, 20).decide(0, 1, 4_100, 1_000) == 5
    assert Hpa(1, 20).decide(0, 2, 14_000, 2_500) == 6


@pytest.mark.parametrize(
    ("value", "after"), [(22_000, 20), (22_001, 23), (18_000, 20), (17_999, 18)]
)
def test_tenth_more_or_less_is_left_alone(value: int, after: int) -> None:
    at_once = ScalingRules(0, (Policy("Pods", 8, 15),))
    assert Hpa(1, 100, at_once, at_once).decide(0, 20, value, 1_000) == after


def test_up_by_eight_pods_or_to_three_times_as_many_within_15_seconds() -> None:
    hpa, replicas, seen = Hpa(1, 100), 1, []
    for now in (0, 5, 15, 20, 30, 45):
        wanted = hpa.decide(now, replicas, 90_000, 1_000)
        if wanted != replicas:
            hpa.scaled(now, replicas, wanted)
        replicas = wanted
        seen.append(replicas)
    assert seen == [9, 9, 27, 27, 81, 90]


def test_down_only_to_the_most_wanted_in_60_seconds_and_by_a_third_or_one_pod_a_minute() -> None:
    hpa, replicas, seen = Hpa(1, 100), 10, []
    for now in range(0, 300, 15):
        wanted = hpa.decide(now, replicas, 1_000, 1_000)
        if wanted != replicas:
            hpa.scaled(now, replicas, wanted)
            seen.append((now, wanted))
        replicas = wanted
    # 34 % of 10, 6, 3, with the rest rounded down; then one pod.
    assert seen == [(60, 6), (120, 3), (180, 1)]


def test_dip_shorter_than_the_window_changes_nothing() -> None:
    hpa = Hpa(1, 100)
    assert [
        hpa.decide(now, 5, value, 1_000)
        for now, value in ((0, 5_000), (15, 1_000), (30, 1_000), (45, 5_000))
    ] == [5, 5, 5, 5]


def test_hpa_stays_between_least_and_most() -> None:
    assert Hpa(2, 4).decide(0, 3, 40_000, 1_000) == 4
    assert Hpa(2, 4).decide(0, 1, 0, 1_000) == 2
    assert Hpa(2, 4).decide(0, 9, 9_000, 1_000) == 4
    assert Hpa(1, 4).decide(0, 1, 0, 1_000) == 1


# The clock.


async def test_fake_clock_wakes_sleepers_in_order_and_waits_for_their_work() -> None:
    clock = FakeClock()
    seen: list[tuple[str, float]] = []

    async def work(name: str, seconds: float) -> None:
        for _ in range(2):
            await clock.sleep(seconds)
            await asyncio.sleep(0.001)  # something real, that the clock must not overtake
            seen.append((name, clock.now()))

    tasks = [clock.spawn(work("slow", 3)), clock.spawn(work("fast", 2))]
    await clock.run(5)
    assert (seen, clock.now()) == ([("fast", 2), ("slow", 3), ("fast", 4)], 5)
    await clock.run(1)
    assert seen.pop() == ("slow", 6)
    await asyncio.gather(*tasks)
