"""The models of this worker: loads them on order or first demand, evicts them for others, reports
them.

Not on the request path: `puller.py` reads which models are resident and passes on models that
routers offer; `heartbeat.py` reports them. `loading.py` supervises one load, `adapters.py` loads
adapters, and `space.py` decides which models are resident, warm or evicted, using `budget.py`.
Event loop only.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from functools import partial
from typing import Final

from shoal.v1 import worker_pb2

from libs.errors import ModelBroken, ShoalError
from libs.eviction import Policy, cost_aware
from libs.eviction.choose import MIN_RESIDENT_SECONDS
from libs.telemetry import metrics
from libs.telemetry.logs import Value, fields
from services.worker.machine.device import Device
from services.worker.machine.tasks import Tasks
from services.worker.machine.threads import in_thread
from services.worker.memory import report
from services.worker.memory.adapters import MAX_ADAPTERS, AdapterLoader
from services.worker.memory.budget import ModelSize
from services.worker.memory.decoding import DecodingMemory
from services.worker.memory.files import ModelFiles, OnDisk
from services.worker.memory.graphs import GraphMemory
from services.worker.memory.loading import Loader, Loading
from services.worker.memory.resident import REPORT_FAILURE_SECONDS, Failed, Resident
from services.worker.memory.space import Space

log = logging.getLogger(__name__)

MAX_LOADS: Final = 2
MAX_DOWNLOADS: Final = 4
"""Limits on concurrency. A download does not count as a load: it is slow, but does not use the
device.
"""

LOAD_SECONDS: Final = 300.0
RESCAN_SECONDS: Final = 30.0


class Residency:
    """The worker's models and their adapters.

    Args:
        clock: Monotonic seconds.
        changed: Called whenever a model or an adapter changes its state.
        load_seconds: Time limit of a load.
        adapters: Maximum loaded adapters per model.
        image_cache_bytes: Maximum size of cached image outputs; 0 disables the cache.
    """

    def __init__(
        self,
        files: ModelFiles,
        device: Device,
        tasks: asyncio.TaskGroup,
        *,
        clock: Callable[[], float],
        changed: Callable[[], None],
        policy: Policy = cost_aware,
        load_seconds: float = LOAD_SECONDS,
        adapters: int = MAX_ADAPTERS,
        image_cache_bytes: int = 0,
    ) -> None:
        self._files = files
        self._trim = device.trim
        self._tasks = Tasks(tasks)
        self._clock = clock
        self._changed = changed
        self._stopped = asyncio.Event()
        self._accepts_loads = True
        self._space = Space(
            device,
            self._tasks,
            policy=policy,
            wait_seconds=load_seconds,
            clock=clock,
            changed=changed,
            image_cache_bytes=image_cache_bytes,
        )
        self._loader = Loader(
            files,
            device,
            self._space,
            self._tasks,
            load_seconds=load_seconds,
            clock=clock,
            changed=changed,
        )
        self._adapters = AdapterLoader(
            files.find_adapter,
            files.adapter_digest,
            self._claim,
            self._tasks,
            clock=clock,
            changed=changed,
            limit=adapters,
        )
        # Mutable state. A name is in at most one of `_loading` and `_failed`, and loads again only
        # after it has left the device.
        self._cold: dict[str, OnDisk] = {}
        self._loading: dict[str, Loading] = {}
        self._failed: dict[str, Failed] = {}

    @property
    def decoding(self) -> DecodingMemory:
        """Memory for decoding the images of jobs."""
        return self._space.decoding

    @property
    def graphs(self) -> GraphMemory:
        """CUDA graphs, which the device thread captures while no batch waits."""
        return self._space.graphs

    def watch_device(self, is_computing: Callable[[str], bool]) -> None:
        """Keep models on the device while `is_computing` says that it has a batch of them."""
        self._space.is_computing = is_computing

    # Serving

    def lanes(self) -> list[str]:
        """Return the models to pull for: least-served first (in device time), then least recently
        used.
        """
        serving = [
            entry.resident for entry in self._space.models.values() if not entry.resident.leaving
        ]
        return [one.name for one in sorted(serving, key=lambda one: (one.turn, one.last_used))]

    def serving(self, model: str) -> Resident | None:
        """Return the resident model, if it takes new work."""
        entry = self._space.models.get(model)
        return None if entry is None or entry.resident.leaving else entry.resident

    def hold(self, resident: Resident, jobs: int, tokens: float = 0.0) -> None:
        """Count newly pulled jobs of the model, of about `tokens` tokens in total."""
        if jobs:
            resident.drained.clear()
        resident.held_jobs += jobs
        resident.held_tokens += tokens
        self._space.record_use(resident, jobs)

    def release(self, resident: Resident) -> None:
        """Count one job of the model as no longer held."""
        resident.held_tokens *= (resident.held_jobs - 1) / resident.held_jobs
        resident.held_jobs -= 1
        resident.last_used = self._clock()
        if resident.held_jobs == 0:
            resident.drained.set()
            self._space.wake_loads()

    # Orders

    def load(self, model: str) -> None:
        """Start loading a model, unless it is resident or loading."""
        if self._accepts_loads and model not in self._loading and self.serving(model) is None:
            self._failed.pop(model, None)
            self._loading[model] = Loading(model, requested_at=self._clock())
            self._tasks.start(self._supervise(self._loading[model]))
        self._changed()

    def take_offer(self, model: str, adapter: str = "") -> None:
        """Load a model that a router offers, and then its adapter, unless they are loaded."""
        resident = self.serving(model)
        if resident is None:
            self.load(model)
            if adapter:
                self._adapters.load_later(model, adapter)
        elif adapter:
            self._adapters.load(resident, adapter)

    def evict(self, model: str, *, by_plan: bool = False) -> None:
        """Unload a model after its last job, and stop pulling for it. Drop a warm model from host
        memory.

        An operator's order overrides a pin. A plan (`by_plan`) does not evict a model that is
        pinned or has work.
        """
        resident = self.serving(model)
        if resident is None:
            self._space.host.drop(model)
        elif not by_plan or not (
            resident.pinned or resident.held_jobs or self._space.backlog.get(model)
        ):
            self._space.evict(resident)

    def pin(self, model: str, pinned: bool) -> None:
        entry = self._space.models.get(model)
        if entry is not None:
            entry.resident.pinned = pinned
            self._space.wake_loads()
            self._changed()

    def set_backlog(self, queued_tokens: Mapping[str, int]) -> None:
        """Set the tokens queued in lanes, by model; 0 for models that are not named."""
        self._space.backlog = queued_tokens
        self._space.wake_loads()

    async def relieve(self, keep: str) -> bool:
        """Free memory when the device is out of it. Return whether anything was freed.

        Drops all CUDA graphs or, if none exist, evicts one idle, unpinned model other than `keep`,
        and waits until the memory is free.
        """
        return await self._space.relieve(keep)

    def refuse_loads(self) -> None:
        """Start no further loads, because the machine is about to be preempted. Current loads
        continue.
        """
        self._accepts_loads = False
        self._changed()

    def stop(self) -> None:
        """Take no more orders, and cancel loads and evictions in progress."""
        self._accepts_loads = False
        self._stopped.set()
        self._tasks.cancel()

    def can_load(self) -> bool:
        """Return whether a router may offer one more model.

        1. Not while a load waits for a busy model to become evictable: a further load would only
           queue behind it.
        2. If a tenth of the memory is free.
        3. If an unpinned model is idle or has been resident for MIN_RESIDENT_SECONDS.
        """
        fetching = sum(not one.is_fetched for one in self._loading.values())
        if not self._accepts_loads or self._space.is_crowded:
            return False
        if len(self._loading) - fetching >= MAX_LOADS or fetching >= MAX_DOWNLOADS:
            return False
        since = self._clock() - MIN_RESIDENT_SECONDS
        residents = [entry.resident for entry in self._space.models.values()]
        evictable = [one for one in residents if not one.pinned and not one.leaving]
        memory = self._space.device_memory
        ample = memory.free_bytes + self._space.reclaimable_bytes >= memory.limit_bytes // 10
        return ample or any(one.held_jobs == 0 or one.loaded_at < since for one in evictable)

    # Reports

    @property
    def used_bytes(self) -> int:
        """Device memory taken by weights and reserved by loads."""
        return self._space.device_memory.used_bytes - self._space.reclaimable_bytes

    @property
    def peak_bytes(self) -> int:
        """The highest use of device memory so far, activations included."""
        return self._space.device_memory.peak_bytes

    @property
    def host_bytes(self) -> int:
        """The limit of host memory for warm models."""
        return self._space.host.limit_bytes

    @property
    def host_used_bytes(self) -> int:
        return self._space.host.used_bytes - self._space.reclaimable_host_bytes

    @property
    def can_fetch(self) -> bool:
        """True if models that are not on disk can be fetched from a store."""
        return self._files.can_fetch

    @property
    def image_cache_bytes(self) -> int:
        """Bytes of cached image outputs. Any thread."""
        return self._space.images.used_bytes

    def residents(self) -> list[Resident]:
        """Return the models on the device. Any thread."""
        return [entry.resident for entry in list(self._space.models.values())]

    @property
    def on_disk(self) -> Mapping[str, OnDisk]:
        """The models on disk, by name: another mapping after every change."""
        return self._cold

    def report(self) -> list[worker_pb2.WorkerModel]:
        """Return an entry for each model that is downloading, loading, warm, resident, or failed
        within the last minute.
        """
        now = self._clock()
        self._failed = {
            name: failed
            for name, failed in self._failed.items()
            if now - failed.at < REPORT_FAILURE_SECONDS
        }
        lines = {name: report.failed(name, failed.error) for name, failed in self._failed.items()}
        lines |= {name: report.loading(one) for name, one in self._loading.items()}
        for name, warm in self._space.host.models.items():
            measured = self._loader.measured.get(name)
            rate = 0.0 if measured is None else measured.activation_bytes_per_token
            card = self._cold[name].card if name in self._cold else None
            lines[name] = report.warm(warm, card, self._space.meter(name), rate, now)
            if name in self._failed:
                # It did not fit on the device: until that is forgotten, refuse callers rather than
                # offer the model to them again.
                lines[name].MergeFrom(report.failed(name, self._failed[name].error))
        for name, entry in self._space.models.items():
            if name not in self._loading:
                lines[name] = report.resident(entry, self._files.item_bytes, now)
        return [lines[name] for name in sorted(lines)]

    async def list_disk(self) -> None:
        """Refresh the list of models on disk."""
        known = self._cold
        found = await in_thread(partial(self._files.listing, known))
        if found.keys() != known.keys():
            self._cold = found
            self._changed()

    async def run(self) -> None:
        """Refresh the list of models on disk every RESCAN_SECONDS until `stop`."""
        while not self._stopped.is_set():
            try:
                async with asyncio.timeout(RESCAN_SECONDS):
                    await self._stopped.wait()
            except TimeoutError:
                await self.list_disk()

    # Loading

    async def _supervise(self, loading: Loading) -> None:
        """Supervise a load, which ends with the model resident or a failure that heartbeats
        report.
        """
        model = loading.model
        try:
            resident = await self._loader.load(loading)
        except ShoalError as error:
            self._fail(model, error)
            await in_thread(self._trim)
        except Exception as error:
            log.exception(
                "a model load failed unexpectedly",
                extra=fields({"model": model}),
            )
            self._fail(
                model, ModelBroken(f"{model} failed to load: {type(error).__name__}: {error}")
            )
            error.__traceback__ = None
            await in_thread(self._trim)
        else:
            del self._loading[model]
            seconds = self._clock() - loading.requested_at
            metrics.LOADS.labels("OK").inc()
            metrics.SWAP_SECONDS.labels("host" if loading.is_from_host else "disk").observe(seconds)
            outcome: dict[str, Value] = {
                "model": model,
                "bytes": resident.model.bytes,
                "seconds": seconds,
                "used_bytes": self.used_bytes,
                "peak_bytes": self.peak_bytes,
                "host_used_bytes": self.host_used_bytes,
            }
            log.info("model loaded", extra=fields(outcome))
            self._adapters.load_wanted(resident)
        self._space.wake_loads()
        self._changed()

    def _fail(self, model: str, error: ShoalError) -> None:
        del self._loading[model]
        # The traceback and the chained exceptions hold references to the weights read so far.
        error.__traceback__ = error.__cause__ = error.__context__ = None
        self._failed[model] = Failed(self._clock(), error)
        metrics.LOADS.labels(error.reason).inc()
        log.warning(
            "a model could not be loaded",
            extra=fields({"model": model, "reason": error.reason, "error": error.message}),
        )

    def _claim(self, name: str, size: int) -> Callable[[], None] | None:
        """Reserve device memory for an adapter. Return a function that releases it, or None if it
        is not free.
        """
        self._space.free_memory(ModelSize(size))
        claim = self._space.device_memory.claim(name, ModelSize(size))
        return None if claim is None else partial(self._space.release, claim)
