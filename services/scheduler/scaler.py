"""KEDA's external scaler: answers from memory how many workers a pool should have (`demand.py`).
Reasons: docs/scaling.md.

1. No call waits, and none fails because Redis is unavailable: the last answer holds for a minute,
   and after that it is at least the number of workers that were present.
2. Streams end by returning, when the process stops and every five minutes, because KEDA reconnects
   slowly after any other end.
"""

from __future__ import annotations

import asyncio
import math
import random
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Final, NoReturn, TypeAlias

import grpc

from libs.errors import InvalidInput, NotReady
from libs.serving import Service
from libs.serving.calls.decode import SMALL_REQUEST_BYTES
from services.scheduler.demand import Demand, DemandOptions, PoolDemand
from services.scheduler.externalscaler import externalscaler_pb2 as pb
from services.scheduler.externalscaler import externalscaler_pb2_grpc
from services.scheduler.view import SchedulerView

METRIC: Final = "desired-workers"
STALE_SECONDS: Final = 60.0
"""Answers from an older snapshot do not scale down."""
REPEAT_SECONDS: Final = 10.0
"""Interval for repeating the push for a pool's first worker, because KEDA may lose it."""
STREAM_SECONDS: Final = 300.0
STREAM_JITTER: Final = 0.1
_EPSILON_SECONDS: Final = 1e-3

_METRIC_NAME: Final = re.compile(rf"(s\d+-)?{METRIC}")
_KEYS: Final = ("pool", "minWarm", "drainSeconds", "targetUtilization")
_FROM_ENV: Final = "FromEnv"

_Active: TypeAlias = grpc.aio.ServicerContext[pb.ScaledObjectRef, pb.IsActiveResponse]
_Spec: TypeAlias = grpc.aio.ServicerContext[pb.ScaledObjectRef, pb.GetMetricSpecResponse]
_Metrics: TypeAlias = grpc.aio.ServicerContext[pb.GetMetricsRequest, pb.GetMetricsResponse]


class Scaler(externalscaler_pb2_grpc.ExternalScalerServicer):
    """KEDA's external scaler."""

    def __init__(
        self,
        demand: Demand,
        view: SchedulerView,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        chance: Callable[[], float] = random.random,
    ) -> None:
        """
        Args:
            clock: The clock of `MeshSnapshot.at`, in seconds.
            sleep: Waits by that clock.
            chance: Draws from 0..1 to spread the ends of streams.
        """
        self._demand = demand
        self._view = view
        self._clock = clock
        self._sleep = sleep
        self._chance = chance
        # The state: whether streams are to end.
        self._closing = asyncio.Event()

    def service(self) -> Service:
        """Return the service for `serving`. Internal: it answers until the process ends, and its
        many calls are not logged one by one.
        """
        add_to = partial(externalscaler_pb2_grpc.add_ExternalScalerServicer_to_server, self)
        return Service(
            "externalscaler.ExternalScaler",
            add_to,
            is_internal=True,
            request_bytes=SMALL_REQUEST_BYTES,
        )

    def close(self) -> None:
        """End all streams gracefully; call it before the server stops."""
        self._closing.set()

    @property
    def age_seconds(self) -> float:
        """Return the age of the snapshot behind the answers; infinite before the first one."""
        return math.inf if self._demand.at is None else self._clock() - self._demand.at

    def demand_for(self, pool: str, options: DemandOptions) -> PoolDemand:
        """Return the current answer. Raises InvalidInput for an unknown pool, NotReady before the
        first snapshot.
        """
        decision = self._known(pool, options)
        if decision is None:
            raise NotReady("the scheduler has not seen the mesh yet")
        return self._held(decision)

    def all_demands(self) -> list[PoolDemand]:
        """Return the current answers for every pool to callers without options; empty before the
        first snapshot.
        """
        return [self._held(demand) for demand in self._demand.demands.values()]

    async def IsActive(self, request: pb.ScaledObjectRef, context: _Active) -> pb.IsActiveResponse:
        return pb.IsActiveResponse(result=self.demand_for(*_asked(request)).active)

    async def GetMetricSpec(
        self, request: pb.ScaledObjectRef, context: _Spec
    ) -> pb.GetMetricSpecResponse:
        self._known(*_asked(request))
        return _SPEC

    async def GetMetrics(
        self, request: pb.GetMetricsRequest, context: _Metrics
    ) -> pb.GetMetricsResponse:
        if request.metricName and not _METRIC_NAME.fullmatch(request.metricName):
            raise InvalidInput(
                f"metricName must be {METRIC}, not {request.metricName!r}", field="metricName"
            )
        desired = self.demand_for(*_asked(request.scaledObjectRef)).desired
        # KEDA sums several values, and old versions read only the integer.
        value = pb.MetricValue(
            metricName=METRIC, metricValue=desired, metricValueFloat=float(desired)
        )
        return pb.GetMetricsResponse(metricValues=[value])

    async def StreamIsActive(
        self, request: pb.ScaledObjectRef, context: _Active
    ) -> AsyncIterator[pb.IsActiveResponse]:
        """Send the current state; then true when the pool becomes active, and again while it has
        work and no worker.

        False is not sent: KEDA ignores it and polls. Nor is the true of a stale answer, which is
        not new.
        """
        pool, options = _asked(request)
        ends_at = self._end_of_stream()
        while (demand := self._known(pool, options)) is None:
            if not await self._next(ends_at, ends_at):
                return
        yield pb.IsActiveResponse(result=self._held(demand).active)
        repeat_at = self._clock() + REPEAT_SECONDS
        was_active = demand.active
        while await self._next(
            min(ends_at, repeat_at) if demand.waits_for_first else ends_at, ends_at
        ):
            demand = self._demand.demand_for(pool, options) or demand
            is_due = demand.waits_for_first and self._is_reached(repeat_at)
            if demand.active and (is_due or not was_active):
                yield pb.IsActiveResponse(result=True)
                repeat_at = self._clock() + REPEAT_SECONDS
            was_active = demand.active

    async def StreamMetricSpec(
        self, request: pb.ScaledObjectRef, context: _Spec
    ) -> AsyncIterator[pb.GetMetricSpecResponse]:
        """Send the specification, which never changes, and then nothing until the stream's end."""
        self._known(*_asked(request))
        yield _SPEC
        ends_at = self._end_of_stream()
        while await self._next(ends_at, ends_at):
            pass

    def _known(self, pool: str, options: DemandOptions) -> PoolDemand | None:
        """Return the last snapshot's answer; None before the first. Raises InvalidInput for an
        unknown pool.
        """
        if not self._demand.knows(pool):
            _refuse("pool", f"names no pool of this mesh: {pool[:100]!r}")
        return self._demand.demand_for(pool, options)

    def _held(self, decision: PoolDemand) -> PoolDemand:
        """Return the answer; if it is too old, without scale-down."""
        if self.age_seconds < STALE_SECONDS:
            return decision
        return replace(decision, desired=max(decision.desired, decision.live), active=True)

    def _end_of_stream(self) -> float:
        return self._clock() + STREAM_SECONDS * (1 + STREAM_JITTER * (2 * self._chance() - 1))

    def _is_reached(self, moment: float) -> bool:
        return self._clock() >= moment - _EPSILON_SECONDS

    async def _next(self, until: float, ends_at: float) -> bool:
        """Return at the next snapshot or at `until`. False: the stream must end."""
        waits = [
            asyncio.ensure_future(wait)
            for wait in (
                self._view.changed(),
                self._sleep(max(0.0, until - self._clock())),
                self._closing.wait(),
            )
        ]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
        return not (self._closing.is_set() or self._is_reached(ends_at))


_SPEC: Final = pb.GetMetricSpecResponse(
    metricSpecs=[pb.MetricSpec(metricName=METRIC, targetSize=1, targetSizeFloat=1.0)]
)


def _asked(reference: pb.ScaledObjectRef) -> tuple[str, DemandOptions]:
    """Parse the pool and the options of a trigger's metadata. Raises InvalidInput naming the
    key.
    """
    given = {
        key.removesuffix(_FROM_ENV): value
        for key, value in sorted(reference.scalerMetadata.items(), reverse=True)
    }
    for key in given:
        for known in _KEYS:
            if key != known and key.lower() == known.lower():
                _refuse(key, f"is not a key; {known} is")
    pool = given.get("pool", "")
    if not pool:
        _refuse("pool", "is required: the pool to scale")
    return pool, DemandOptions(
        min_warm=_whole(given, "minWarm"),
        drain_seconds=_number(given, "drainSeconds", 1.0, 86_400.0),
        target_utilization=_number(given, "targetUtilization", 0.05, 1.0),
    )


def _whole(given: Mapping[str, str], key: str) -> int | None:
    text = given.get(key, "")
    if text and not re.fullmatch(r"[0-9]{1,6}", text):
        _refuse(key, f"must be a whole number of workers, not {text[:100]!r}")
    return int(text) if text else None


def _number(given: Mapping[str, str], key: str, least: float, most: float) -> float | None:
    text = given.get(key, "")
    if not text:
        return None
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not least <= value <= most:
        _refuse(key, f"must be a number in {least:g}..{most:g}, not {text[:100]!r}")
    return value


def _refuse(key: str, why: str) -> NoReturn:
    raise InvalidInput(f"scalerMetadata.{key} {why}", field=f"scalerMetadata.{key}")
