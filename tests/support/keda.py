"""`FakeKeda`: KEDA's operator with one ScaledObject, and the HPA it makes, against a real gRPC
server.

Stands for what cannot run here without a Kubernetes cluster. Does what KEDA 2.20's client does, as
read from its sources (pkg/scalers/external_scaler.go, pkg/scaling), the unhelpful things included:
no deadline, no keepalive, one immediate retry, a stream that waits up to 60 s before it reconnects.
Left out: several triggers, `idleReplicaCount`, pause annotations, `scalingModifiers`; our manifests
have none of them.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Final, Literal, Protocol, TypeVar

import grpc

from services.scheduler.simulate.hpa import DOWN, UP, Hpa, ScalingRules
from services.scheduler.simulate.keda import Executor
from tests.support import keda_wire
from tests.support.clock import Clock
from tests.support.waiting import end_tasks

PREFIX: Final = "s0-"
"""Prefix of metric names in the HPA: the trigger's index."""
SYNC_SECONDS: Final = 15.0
"""Time between two syncs of an HPA (--horizontal-pod-autoscaler-sync-period)."""
MIN_BACKOFF: Final = 2.0
MAX_BACKOFF: Final = 60.0
_CHANNEL: Final = (
    ("grpc.service_config", '{"loadBalancingConfig":[{"round_robin":{}}]}'),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_http_proxy", 0),
    # gRPC's backoff runs on the real clock, KEDA's on ours: one second for KEDA is an instant here.
    ("grpc.initial_reconnect_backoff_ms", 50),
    ("grpc.min_reconnect_backoff_ms", 50),
    ("grpc.max_reconnect_backoff_ms", 100),
)
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Fallback:
    """`spec.fallback`."""

    failure_threshold: int = 3
    replicas: int = 1
    behavior: Literal["static", "currentReplicas", "currentReplicasIfHigher"] = (
        "currentReplicasIfHigher"
    )


@dataclass(frozen=True, slots=True)
class ScaledObject:
    """`spec` of a ScaledObject with one trigger; the defaults are ours, not KEDA's. Times in
    seconds.
    """

    name: str
    metadata: Mapping[str, str]
    trigger: Literal["external", "external-push"] = "external-push"
    namespace: str = "default"
    polling_interval: float = 5.0
    cooldown_period: float = 600.0
    initial_cooldown_period: float = 120.0
    min_replicas: int = 0
    max_replicas: int = 20
    fallback: Fallback | None = Fallback()
    up: ScalingRules = UP
    down: ScalingRules = DOWN


class Target(Protocol):
    """The scaled object: a Deployment."""

    @property
    def replicas(self) -> int:
        """Return the number of requested replicas."""
        ...

    def scale(self, replicas: int) -> None: ...


@dataclass(frozen=True, slots=True)
class Change:
    """Replicas were changed at `at` seconds."""

    at: float
    before: int
    after: int
    by: Literal["keda", "hpa"]


class ScalerFailed(Exception):
    """The scaler did not answer, or not with what KEDA can use."""


class FakeKeda:
    """Scales `target` while its context is open, and reports each change to `about_to` beforehand.

    `poll` and `sync` run every 5 and every 15 s; with `running=False` only when a test calls them.
    """

    def __init__(
        self,
        address: str,
        scaled: ScaledObject,
        target: Target,
        clock: Clock,
        *,
        about_to: Callable[[Change], None] = lambda change: None,
        running: bool = True,
    ) -> None:
        self.scaled = scaled
        self.target = target
        self.clock = clock
        self.address = address
        self._about_to = about_to
        self._running = running
        self._hpa = Hpa(max(scaled.min_replicas, 1), scaled.max_replicas, scaled.up, scaled.down)
        self._scaling = asyncio.Lock()
        self._tasks: list[asyncio.Task[None]] = []
        self._executor = self._made_executor()
        self._target_size = 0
        self._metric_failures = 0
        # The ScaledObject's status, and records for tests.
        self.metric_names: list[str] = []
        self.changes: list[Change] = []
        self.values: list[tuple[float, int]] = []
        """(time, thousandths) as polled."""
        self.pushes: list[float] = []
        self.dropped_pushes = 0
        self.is_listening = False
        """The stream of pushes is open."""
        self.backoffs: list[float] = []
        self.rebuilds = 0
        """Scalers rebuilt after an error, before the one retry."""
        self.dropped_caches = 0
        self.failed_polls = 0
        self.failed_syncs = 0

    async def __aenter__(self) -> FakeKeda:
        self._channel = grpc.aio.insecure_channel(self.address, options=_CHANNEL)
        self._executor = self._made_executor()
        await self.discover()
        if self._running:
            self._tasks.append(
                self.clock.spawn(self._every(self.scaled.polling_interval, self.poll, at_once=True))
            )
            self._tasks.append(self.clock.spawn(self._every(SYNC_SECONDS, self.sync)))
            if self.scaled.trigger == "external-push":
                self._tasks.append(self.clock.spawn(self.listen()))
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await end_tasks(self._tasks)
        ended = await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._channel.close()
        for failure in ended:
            if (
                isinstance(failure, Exception)
                and not isinstance(failure, asyncio.CancelledError)
                and kind is None
            ):
                raise failure

    async def disconnected(self) -> None:
        """Returns once the loss of the server has been noticed."""
        while (state := self._channel.get_state()) is grpc.ChannelConnectivity.READY:
            await self._channel.wait_for_state_change(state)

    async def connected(self) -> None:
        """Returns once the server can be reached."""
        while (
            state := self._channel.get_state(try_to_connect=True)
        ) is not grpc.ChannelConnectivity.READY:
            await self._channel.wait_for_state_change(state)

    async def _every(
        self, seconds: float, act: Callable[[], Awaitable[None]], *, at_once: bool = False
    ) -> None:
        if not at_once:
            await self.clock.sleep(seconds)
        while True:
            await act()
            await self.clock.sleep(seconds)

    # The operator: discover the metrics to scale by.

    async def discover(self) -> None:
        """Reconciles the ScaledObject: asks for the metrics' names and targets, and makes the HPA
        of them.
        """
        try:
            self._learn(await self._specs())
        except ScalerFailed:
            self._drop_cache()  # later calls repair it (KEDA 2.20.2, #7777)

    def _learn(self, specs: list[Any]) -> None:
        self.metric_names = [PREFIX + spec.metricName for spec in specs]
        self._target_size = _milli(
            specs[0].targetSizeFloat if specs[0].targetSizeFloat > 0 else specs[0].targetSize
        )

    # The scale loop: to and from zero.

    async def poll(self) -> None:
        """Active or not? From and to zero replicas; the HPA does the rest."""
        async with self._scaling:
            active, failed = await self._state()
            self._scale(active, failed)

    async def _state(self) -> tuple[bool, bool]:
        try:
            specs = await self._specs()
            if not self.metric_names:
                self._learn(specs)
            active = False
            for spec in specs:
                values, is_active = await self._metrics_and_activity(PREFIX + spec.metricName)
                active = active or is_active
                self.values.append((self.clock.now(), sum(values)))
        except ScalerFailed:
            self.failed_polls += 1
            self._drop_cache()
            return False, True
        return active, False

    def _scale(self, active: bool, failed: bool) -> None:
        """`RequestScale` of KEDA's scale executor."""
        replicas, fallback = self.target.replicas, self.scaled.fallback
        if failed and not active and (fallback is None or fallback.replicas != 0):
            return  # the replicas stay; Ready becomes False
        wanted = self._executor.decide(self.clock.now(), replicas, active)
        if wanted != replicas:
            self._change(wanted, "keda")

    @property
    def last_active(self) -> float | None:
        return self._executor.last_active

    def _made_executor(self) -> Executor:
        return Executor(
            self.clock.now(),
            self.scaled.min_replicas,
            self.scaled.cooldown_period,
            self.scaled.initial_cooldown_period,
        )

    # Pushes.

    async def listen(self) -> None:
        """`StreamIsActive`, opened again whenever it ends."""
        backoff = MIN_BACKOFF
        while True:
            if await self._listen_once():
                backoff = MIN_BACKOFF
            self.backoffs.append(backoff)
            pause, backoff = backoff, min(2 * backoff, MAX_BACKOFF)
            await self.clock.sleep(pause)

    async def _listen_once(self) -> bool:
        """True if the server ended the stream by returning."""
        try:
            stream = keda_wire.method(self._channel, "StreamIsActive")(self._reference())
            self.is_listening = True
            while True:
                with self.clock.outside():
                    answer = await stream.read()
                if answer is grpc.aio.EOF:
                    return True
                if answer.result:
                    await self._pushed()
        except grpc.aio.AioRpcError:
            return False
        finally:
            self.is_listening = False

    async def _pushed(self) -> None:
        async with self._scaling:
            if not self.metric_names:
                self.dropped_pushes += 1  # "will retry on next activation"
                return
            self.pushes.append(self.clock.now())
            self._scale(active=True, failed=False)

    # The HPA: between one and many.

    async def sync(self) -> None:
        """One sync of the HPA. It is off at zero replicas, and without a metric (made while the
        scaler was down) it has no say.
        """
        replicas = self.target.replicas
        if replicas == 0 or not self.metric_names:
            return
        try:
            value = await self._external_metric(self.metric_names[0])
        except ScalerFailed:
            self.failed_syncs += 1
            return
        if self.target.replicas != replicas:
            return  # a conflict: KEDA has changed the replicas since they were read
        wanted = self._hpa.decide(self.clock.now(), replicas, value, self._target_size)
        if wanted != replicas:
            self._change(wanted, "hpa")
            self._hpa.scaled(self.clock.now(), replicas, wanted)

    async def _external_metric(self, name: str) -> int:
        """Return the value of KEDA's metrics server for the HPA: the sum of the values, or the
        fallback's value after failures.
        """
        try:
            specs = await self._specs()
        except ScalerFailed:
            self._drop_cache()  # and the fallback's counter does not move (#8056)
            raise
        if name not in [PREFIX + spec.metricName for spec in specs]:
            raise ScalerFailed(f"no matching metrics found for {name}")
        try:
            values, _ = await self._metrics_and_activity(name)
        except ScalerFailed:
            self._drop_cache()
            self._metric_failures += 1
            fallback = self.scaled.fallback
            if fallback is None or self._metric_failures <= fallback.failure_threshold:
                raise
            return self._target_size * self._fallen_back(fallback)
        self._metric_failures = 0
        if not values:
            raise ScalerFailed(f"no matching metrics found for {name}")
        return sum(values)

    def _fallen_back(self, fallback: Fallback) -> int:
        match fallback.behavior:
            case "static":
                return fallback.replicas
            case "currentReplicas":
                return self.target.replicas
            case "currentReplicasIfHigher":
                return max(fallback.replicas, self.target.replicas)

    # The scaler's client.

    async def _specs(self) -> list[Any]:
        async def ask() -> list[Any]:
            specs = list((await self._call("GetMetricSpec", self._reference())).metricSpecs)
            if not specs:
                raise ScalerFailed("error getting metrics spec")
            return specs

        return await self._retried(ask)

    async def _metrics_and_activity(self, name: str) -> tuple[list[int], bool]:
        """The values in thousandths, whatever names they carry, and whether the scaler is
        active.
        """

        async def ask() -> tuple[list[int], bool]:
            request = keda_wire.metrics_request(self._reference(), name.removeprefix(PREFIX))
            values = [
                _milli(one.metricValueFloat if one.metricValueFloat > 0 else one.metricValue)
                for one in (await self._call("GetMetrics", request)).metricValues
            ]
            return values, (await self._call("IsActive", self._reference())).result

        return await self._retried(ask)

    async def _retried(self, ask: Callable[[], Awaitable[T]]) -> T:
        try:
            return await ask()
        except ScalerFailed:
            self.rebuilds += 1
            return await ask()

    async def _call(self, method: str, request: Any) -> Any:
        try:
            return await keda_wire.method(self._channel, method)(request)
        except grpc.aio.AioRpcError as error:
            raise ScalerFailed(f"{method}: {error.code().name} {error.details()}") from error

    def _reference(self) -> Any:
        return keda_wire.reference(self.scaled.name, self.scaled.namespace, self.scaled.metadata)

    def _drop_cache(self) -> None:
        self.dropped_caches += 1

    def _change(self, replicas: int, by: Literal["keda", "hpa"]) -> None:
        change = Change(self.clock.now(), self.target.replicas, replicas, by)
        self._about_to(change)
        self.target.scale(replicas)
        self.changes.append(change)


def _milli(value: float) -> int:
    """Render a Kubernetes quantity with three decimals.

    NaN, infinite and negative values count as 0 (2.20.2, #7880).
    """
    return round(value * 1000) if math.isfinite(value) and value > 0 else 0
