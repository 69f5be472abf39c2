"""Prometheus metrics of the device and its models, read at each scrape (`libs/telemetry`). Other
series are counted where the events occur: `intake.py`, `runner.py`, `finisher.py`, `residency.py`,
`space.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol, runtime_checkable

from prometheus_client.core import Metric

from libs.telemetry import metrics
from services.worker.jobs.execution.device_time import DeviceTime
from services.worker.jobs.waste import Waste
from services.worker.machine.device import Device
from services.worker.memory.residency import Residency


@runtime_checkable
class ClaimsMemory(Protocol):
    """A model that claims part of its memory for its sequences."""

    @property
    def claimed_bytes(self) -> int: ...


class WorkerMetrics:
    """Metrics of one worker. `read` is called on the thread of a scrape."""

    def __init__(
        self, pool: str, device: Device, residency: Residency, waste: Waste, time: DeviceTime
    ) -> None:
        self._pool = (pool,)
        self._device = device
        self._residency = residency
        self._waste = waste
        self._time = time

    def read(self) -> Iterator[Metric]:
        yield metrics.DEVICE_BUSY_SECONDS.family({self._pool: self._waste.device_seconds})
        stalled = {
            "starved": self._time.starved_seconds,
            "turnaround": self._time.turnaround_seconds,
        }
        yield metrics.DEVICE_STALLED_SECONDS.family(
            {(*self._pool, cause): seconds for cause, seconds in stalled.items()}
        )
        yield metrics.DEVICE_CPU_SECONDS.family({self._pool: self._time.cpu_seconds})
        yield metrics.DEVICE_WASTED_SECONDS.family({self._pool: self._waste.wasted_seconds})
        yield metrics.DEVICE_MEMORY_BYTES.family({self._pool: self._device.memory_bytes})
        yield metrics.DEVICE_USED_BYTES.family({self._pool: self._residency.used_bytes})
        yield metrics.HOST_USED_BYTES.family({self._pool: self._residency.host_used_bytes})
        residents = self._residency.residents()
        yield metrics.RESIDENT_BYTES.family(
            {(*self._pool, one.name): one.model.bytes for one in residents}
        )
        yield metrics.GRAPH_BYTES.family(
            {(*self._pool, one.name): one.graph_bytes for one in residents}
        )
        writers = [
            (one.name, one.model) for one in residents if isinstance(one.model, ClaimsMemory)
        ]
        yield metrics.KEY_VALUE_BYTES.family(
            {(*self._pool, name): model.claimed_bytes for name, model in writers}
        )
        yield metrics.IMAGE_CACHE_BYTES.family({self._pool: self._residency.image_cache_bytes})
        yield metrics.MODEL_TOKENS_PER_SECOND.family(
            {(*self._pool, one.name): one.meter.tokens_per_second for one in residents}
        )
