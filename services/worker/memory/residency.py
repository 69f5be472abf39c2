"""The models of this worker: loads them on order or first demand, evicts them when others need the
room more, reports them.

Not on the request path: `puller.py` reads which models are resident and passes on the models that
routers offer; `heartbeat.py` reports them. `loading.py` supervises one load, `adapters.py` loads
adapters, `space.py` decides what is resident, warm or evicted, by `budget.py`. Event loop only.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from contextlib import suppress
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
from services.worker.memory.budget import Size
from services.worker.memory.decoding import DecodingMemory
from services.worker.memory.files import ModelFiles, OnDisk
from services.worker.memory.graphs import GraphMemory
from services.worker.memory.loading import Loader, Loading
from services.worker.memory.resident import REPORT_FAILURE_SECONDS, Failed, Resident
from services.worker.memory.space import Space
from services.worker.mesh import codec

log = logging.getLogger(__name__)

MAX_LOADS: Final = 2
MAX_DOWNLOADS: Final = 4
"""Limits on concurrency. A download does not count as a load: it takes long, but uses neither the
device nor its memory.
"""

LOAD_SECONDS: Final = 300.0
RESCAN_SECONDS: Final = 30.0


class Residency:
    """The worker's models and their adapters.

    `load_seconds`: how long a load may take. `adapters`: how many adapters a model may have loaded.
    `image_cache_bytes`: what kept outputs of images may take; 0: none are kept. `clock` is
    monotonic (seconds), `changed` is called whenever a model or an adapter changes its state.
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
            self._claim,
            self._tasks,
            clock=clock,
            changed=changed,
            limit=adapters,
        )
        # Mutable state. A name is in at most one of `_loading` and `_failed`, and loads again only
        # once it has left the device.
        self._cold: dict[str, OnDisk] = {}
        self._loading: dict[str, Loading] = {}
        self._failed: dict[str, Failed] = {}

    @property
    def decoding(self) -> DecodingMemory:
        """Memory for the images that jobs have."""
        return self._space.decoding

    @property
    def graphs(self) -> GraphMemory:
        """CUDA graphs, which the device thread captures while no batch waits."""
        return self._space.graphs

    def watch_device(self, is_computing: Callable[[str], bool]) -> None:
        """From now on a model leaves the device only while the device has no batch of it, as
        `is_computing` says.
        """
        self._space.is_computing = is_computing

    # What is served

    def lanes(self) -> list[str]:
        """Models to pull for: the least-served first (in device time), ties by least recently
        used.
        """
        serving = [
            place.resident for place in self._space.places.values() if not place.resident.leaving
        ]
        return [one.name for one in sorted(serving, key=lambda one: (one.turn, one.last_used))]

    def serving(self, model: str) -> Resident | None:
        """The resident model, if it takes new work."""
        place = self._space.places.get(model)
        return None if place is None or place.resident.leaving else place.resident

    def hold(self, resident: Resident, jobs: int, tokens: float = 0.0) -> None:
        """Counts newly pulled jobs of the model, of about `tokens` tokens in all."""
        if jobs:
            resident.drained.clear()
        resident.held_jobs += jobs
        resident.held_tokens += tokens
        self._space.record_use(resident, jobs)

    def release(self, resident: Resident) -> None:
        """Counts one job of the model as no longer held."""
        resident.held_tokens *= (resident.held_jobs - 1) / resident.held_jobs
        resident.held_jobs -= 1
        resident.last_used = self._clock()
        if resident.held_jobs == 0:
            resident.drained.set()
            self._space.wake_loads()

    # Orders

    def load(self, model: str) -> None:
        """Starts to load a model, unless it is resident or loading."""
        if self._accepts_loads and model not in self._loading and self.serving(model) is None:
            self._failed.pop(model, None)
            self._loading[model] = Loading(model, requested_at=self._clock())
            self._tasks.start(self._supervise(self._loading[model]))
        self._changed()

    def take_offer(self, model: str, adapter: str = "") -> None:
        """Loads the model that a router offers if it is not resident, and the adapter now or as
        soon as the model is.
        """
        resident = self.serving(model)
        if resident is None:
            self.load(model)
            if adapter:
                self._adapters.load_later(model, adapter)
        elif adapter:
            self._adapters.load(resident, adapter)

    def evict(self, model: str, *, by_plan: bool = False) -> None:
        """Unloads a model once no job needs it; it is not pulled for from now on. A warm model is
        dropped from host memory.

        An operator's order overrides a pin; a plan (`by_plan`) does not evict a model that is
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
        place = self._space.places.get(model)
        if place is not None:
            place.resident.pinned = pinned
            self._space.wake_loads()
            self._changed()

    def set_backlog(self, queued_tokens: Mapping[str, int]) -> None:
        """Takes note of the tokens queued in lanes, by model; 0 for models that are not named."""
        self._space.backlog = queued_tokens
        self._space.wake_loads()

    async def relieve(self, keep: str) -> bool:
        """For a device that is out of memory: drops all CUDA graphs or, if there are none, evicts
        one model that is idle and not pinned, other than `keep`, and waits until the memory is
        free. False if there is neither."""
        return await self._space.relieve(keep)

    def refuse_loads(self) -> None:
        """Starts no further loads (those in progress go on): the machine is about to be
        preempted.
        """
        self._accepts_loads = False
        self._changed()

    def stop(self) -> None:
        """Takes no more orders, and cancels loads and evictions in progress."""
        self._accepts_loads = False
        self._stopped.set()
        self._tasks.cancel()

    def can_load(self) -> bool:
        """Whether a router may offer one more model: a tenth of the memory is free, or some model
        that is not pinned is idle or has been resident for MIN_RESIDENT_SECONDS.

        Not while a load waits for a model in use to be evictable: a further load would only queue
        behind it.
        """
        fetching = sum(not one.is_fetched for one in self._loading.values())
        if not self._accepts_loads or self._space.is_crowded:
            return False
        if len(self._loading) - fetching >= MAX_LOADS or fetching >= MAX_DOWNLOADS:
            return False
        since = self._clock() - MIN_RESIDENT_SECONDS
        residents = [place.resident for place in self._space.places.values()]
        evictable = [one for one in residents if not one.pinned and not one.leaving]
        memory = self._space.device_memory
        ample = memory.free_bytes + self._space.reclaimable_bytes >= memory.limit_bytes // 10
        return ample or any(one.held_jobs == 0 or one.loaded_at < since for one in evictable)

    # What is reported

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
        """Whether models that are not on disk can be fetched from a store."""
        return self._files.can_fetch

    @property
    def image_cache_bytes(self) -> int:
        """What kept outputs of images take. Any thread."""
        return self._space.images.used_bytes

    def residents(self) -> list[Resident]:
        """The models on the device. May be called from any thread."""
        return [place.resident for place in list(self._space.places.values())]

    def report(self) -> list[worker_pb2.WorkerModel]:
        """One entry for each model that is on disk, downloading, loading, warm, resident, or failed
        within the last minute.
        """
        now = self._clock()
        self._failed = {
            name: failed
            for name, failed in self._failed.items()
            if now - failed.at < REPORT_FAILURE_SECONDS
        }
        lines = {name: report.cold(name, found.bytes) for name, found in self._cold.items()}
        lines |= {name: report.failed(name, failed.error) for name, failed in self._failed.items()}
        lines |= {name: report.loading(one) for name, one in self._loading.items()}
        for name, found in self._cold.items():
            if found.card is not None:
                lines[name].card.CopyFrom(codec.to_card(found.card))
        for name, warm in self._space.host.models.items():
            measured = self._loader.measured.get(name)
            rate = 0.0 if measured is None else measured.activation_bytes_per_token
            card = self._cold[name].card if name in self._cold else None
            lines[name] = report.warm(warm, card, self._space.meter(name), rate, now)
            if name in self._failed:
                # It found no room on the device: until that is forgotten, callers are refused
                # rather than offered to it again.
                lines[name].MergeFrom(report.failed(name, self._failed[name].error))
        for name, place in self._space.places.items():
            if name not in self._loading:
                lines[name] = report.resident(place, self._files.item_bytes, now)
        return [lines[name] for name in sorted(lines)]

    async def run(self) -> None:
        """Keeps the list of models on disk fresh, until `stop`."""
        while not self._stopped.is_set():
            known = self._cold
            found = await in_thread(partial(self._files.listing, known))
            if found.keys() != known.keys():
                self._cold = found
                self._changed()
            with suppress(TimeoutError):
                async with asyncio.timeout(RESCAN_SECONDS):
                    await self._stopped.wait()

    # Loading

    async def _supervise(self, loading: Loading) -> None:
        """Supervises one load: it ends with the model resident or with a failure that the heartbeat
        reports.
        """
        model = loading.model
        try:
            resident = await self._loader.load(loading)
        except ShoalError as error:
            self._fail(model, error)
            await in_thread(self._trim)
        except Exception as error:
            log.exception(
                "a model could not be loaded: its load failed with an unexpected error",
                extra=fields({"model": model}),
            )
            self._fail(
                model, ModelBroken(f"{model} could not be loaded: {type(error).__name__}: {error}")
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
        """Reserves device memory for an adapter. Returns the function that releases it, or None if
        so much is not free.
        """
        self._space.make_room(Size(size))
        claim = self._space.device_memory.claim(name, Size(size))
        return None if claim is None else partial(self._space.release, claim)
