"""Reserves memory for models on the device and for warm ones in host memory, and evicts models.

Not on the request path; used by `residency.py`. `loading.py` reserves memory here and registers the
models it has loaded; `host.py` keeps the warm models. Models are evicted in two steps, so that no
job in flight is lost: a model first stops taking new work (`leaving`), then leaves the device after
its last job. Event loop only.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

from libs.errors import ModelBroken, NoCapacity
from libs.eviction import Candidate, Challenger, Policy
from libs.models import Model
from libs.store import Copy
from libs.telemetry import metrics
from libs.telemetry.logs import fields
from libs.work_estimate import assumed_speed, work_seconds
from services.worker.machine.device import Device
from services.worker.machine.tasks import Tasks
from services.worker.machine.threads import in_thread
from services.worker.memory.budget import (
    Holding,
    Ledger,
    LedgerClaim,
    ModelSize,
    never_fits,
    victims,
)
from services.worker.memory.decoding import (
    ACCELERATOR_ALLOWANCE_BYTES,
    ALLOWANCE_BYTES,
    DecodingMemory,
)
from services.worker.memory.graphs import GraphMemory
from services.worker.memory.host import HostMemory, Warm
from services.worker.memory.images import ImageCache
from services.worker.memory.resident import Resident
from services.worker.scheduling.meter import Meter

log = logging.getLogger(__name__)

_RECHECK_SECONDS: Final = 0.05
"""Interval at which a waiting load checks again whether it may evict models: the permission also
depends on its waiting time.
"""

_COMPUTING_SECONDS: Final = 0.002
"""Interval at which an eviction checks whether the last batch of a model without jobs has ended."""

_PATIENCE_SECONDS: Final = 60.0
"""A load that has waited this long may evict any unpinned model, however much work that model
has.
"""


@dataclass(frozen=True, slots=True)
class MemoryRequest:
    """A request for device memory for one model. `requested_at` is in seconds of the worker's
    monotonic clock.
    """

    name: str
    size: ModelSize
    requested_at: float


@dataclass(slots=True, eq=False)
class ResidentModel:
    """A resident model with its reservations and its directory on disk."""

    resident: Resident
    copy: Copy
    device: LedgerClaim
    """Its claim on the device."""
    host: LedgerClaim | None = None
    """The claim of its host copy, if any."""


class Space:
    """Device and host memory. If `device` shares the host's memory (a CPU), a warm model stays
    where it is and is only not served.

    Args:
        policy: Values models; those of the lowest value are evicted first.
        wait_seconds: The maximum time that a load waits for memory after it is first in the queue.
        clock: Returns monotonic seconds.
        changed: Called when a model changes its state.
        image_cache_bytes: Maximum bytes of cached outputs of images; 0: no cache.
    """

    def __init__(
        self,
        device: Device,
        tasks: Tasks,
        *,
        policy: Policy,
        wait_seconds: float,
        clock: Callable[[], float],
        changed: Callable[[], None],
        image_cache_bytes: int = 0,
    ) -> None:
        self.device_memory = Ledger(device.memory_bytes)
        self.host = HostMemory(device, tasks, policy=policy, clock=clock, changed=changed)
        self._shares_memory = device.shares_memory
        self._trim = device.trim
        self._tasks = tasks
        self._policy = policy
        self._wait_seconds = wait_seconds
        self._clock = clock
        self._changed = changed
        # Mutable state. A name is in at most one of `models` and `host.models`, in neither while it
        # loads.
        self.models: dict[str, ResidentModel] = {}
        self.unloading: dict[str, asyncio.Task[None]] = {}
        self.meters: dict[str, Meter] = {}  # also of models that have left
        self._freeing: list[Holding] = []  # left `models`; their memory is being freed
        self.backlog: Mapping[str, int] = {}
        """Tokens queued in lanes, by model."""
        self.is_computing: Callable[[str], bool] = _computes_nothing
        """Returns whether the device has a batch of the model. It may briefly have one after the
        model's last job was cancelled.
        """
        self.is_crowded = False
        """A load waits, and the rules forbid enough evictions for now."""
        self._floor = 0.0
        self._turn = asyncio.Lock()
        self.graphs = GraphMemory(
            device, self.device_memory, may_grow=lambda: not self._turn.locked()
        )
        self._wake = asyncio.Event()
        # Image outputs are in host memory, whatever the device.
        ledger = self.device_memory if device.shares_memory else self.host.ledger
        self.images = ImageCache(
            ledger, image_cache_bytes, may_grow=lambda: not self._turn.locked(), clock=clock
        )
        allowance = ALLOWANCE_BYTES if device.shares_memory else ACCELERATOR_ALLOWANCE_BYTES
        self.decoding = DecodingMemory(
            ledger, allowance, free_memory=self._make_decoding_room, clock=clock
        )
        if not device.shares_memory:
            self.host.give_back = self.images.give_back

    def free_memory(self, size: ModelSize, without: Collection[LedgerClaim] = ()) -> bool:
        """Free device memory for a claim of `size` as far as possible without evicting models.
        Return whether any was freed.
        """
        return self._shares_memory and self.images.give_back(
            self.device_memory.missing(size, without)
        )

    def _make_decoding_room(self, needed: int) -> None:
        """Free host memory for decoding an image that needs `needed` bytes, the cheapest first:

        1. cached outputs of images;
        2. with an accelerator, the warm model of the lowest value;
        3. without one, the idle model of the lowest value.

        At most one model is freed by a call, because a waiting image calls this again.
        """
        ledger = self.device_memory if self._shares_memory else self.host.ledger
        if ledger.missing(ModelSize(needed)) <= 0 or self.images.give_back(
            ledger.missing(ModelSize(needed))
        ):
            return
        if not self._shares_memory:
            self.host.drop_cheapest()
            return
        idle = [one for one in map(self.candidate, self.models.values()) if _is_idle(one)]
        if idle and not self.unloading:
            self.evict(self.models[min(idle, key=self._policy).name].resident, to_host=False)

    @property
    def reclaimable_bytes(self) -> int:
        """Return the bytes of claimed device memory that `free_memory` can free."""
        return self.images.granted_bytes if self._shares_memory else 0

    @property
    def reclaimable_host_bytes(self) -> int:
        """Return the bytes of claimed host memory that are freed before a warm model is dropped."""
        return 0 if self._shares_memory else self.images.granted_bytes

    # Input of the eviction policies

    def candidate(self, entry: ResidentModel) -> Candidate:
        """Return the properties of a resident model that eviction policies and rules use."""
        one, now = entry.resident, self._clock()
        return Candidate(
            one.name,
            bytes=entry.device.size.bytes + one.adapters.bytes,
            load_seconds=self._reload_seconds(entry),
            idle_seconds=0.0 if one.held_jobs else now - one.last_used,
            uses=max(1, one.uses),
            floor=one.floor,
            pinned=one.pinned,
            leaving=one.leaving,
            is_busy=one.held_jobs > 0,
            waiting_seconds=self._waiting_seconds(
                one.name, entry.device.size.bytes, one.held_tokens
            ),
            resident_seconds=now - one.loaded_at,
        )

    def _reload_seconds(self, entry: ResidentModel) -> float:
        """Return the seconds to reload the model: from host memory if possible and measured, else
        from disk.
        """
        resume_seconds = self.host.resume_seconds(
            entry.device.size.bytes - entry.resident.graph_bytes
        )
        return (
            entry.resident.load_seconds
            if resume_seconds is None
            else min(entry.resident.load_seconds, resume_seconds)
        )

    def _waiting_seconds(self, model: str, size: int, held_tokens: float = 0.0) -> float:
        """Return the seconds that the device needs for the queued tokens of a model of `size` bytes
        and for `held_tokens`.
        """
        tokens = self.backlog.get(model, 0) + held_tokens
        meter = self.meters.get(model)
        speed = 0.0 if meter is None else meter.tokens_per_second
        return work_seconds(tokens, speed or self._assumed_speed(size))

    def _assumed_speed(self, size: int) -> float:
        peers = (meter.tokens_per_second for meter in self.meters.values())
        return assumed_speed("cpu" if self._shares_memory else "cuda", size, peers)

    def meter(self, model: str) -> Meter:
        return self.meters.setdefault(model, Meter())

    def record_use(self, resident: Resident, jobs: int) -> None:
        """Record newly pulled jobs of the model for the eviction policies."""
        resident.last_used = self._clock()
        resident.uses += jobs
        resident.floor = self._floor

    def wake_loads(self) -> None:
        """Wake a load that waits for memory, because something has changed."""
        self._wake.set()

    # Memory for loads

    async def reserve(self, request: MemoryRequest, warm: Warm | None = None) -> LedgerClaim:
        """Evict models until the request fits, and reserve its memory. Requests wait in their
        order.

        Raises ModelBroken if the request can never fit, and NoCapacity if it does not fit within
        `wait_seconds`.

        Args:
            warm: The model's copy in host memory, if it has one.
        """
        async with self._turn:
            until = self._clock() + self._wait_seconds
            try:
                while True:
                    self.free_memory(request.size)
                    if self.device_memory.missing(request.size) > 0:
                        await self.graphs.shed()
                    self._check_fits(request)
                    if warm is not None and self._shares_memory:
                        # The claim on the device covers the same memory, so models evicted for this
                        # one may use the memory of its former claim.
                        self.host.release_warm(warm)
                    claim = self.device_memory.claim(request.name, request.size)
                    if claim is not None:
                        return claim
                    if self._clock() > until:
                        seconds = f"{self._wait_seconds:g} seconds"
                        raise NoCapacity(
                            f"{request.name} did not fit on the device within {seconds}: "
                            "no model can be evicted"
                        )
                    self.is_crowded = not self._start_evictions(request)
                    self._wake.clear()
                    with suppress(TimeoutError):
                        async with asyncio.timeout(_RECHECK_SECONDS):
                            await self._wake.wait()
            finally:
                self.is_crowded = False

    async def grow(self, claim: LedgerClaim, request: MemoryRequest) -> bool:
        """Resize a claim to the request's size, evicting models if necessary.

        Return False if no eviction is in progress: a load that holds memory must not wait for
        anything else, or two loads could deadlock. Raises ModelBroken as `reserve` does.
        """
        while not self.device_memory.resize(claim, request.size):
            if self.free_memory(request.size, [claim]):
                continue
            if await self.graphs.shed():
                continue
            self._check_fits(request, claim)
            self._start_evictions(request, claim)
            if not self.unloading:
                return False
            await asyncio.wait(self.unloading.values(), return_when=asyncio.FIRST_COMPLETED)
        return True

    def release(self, claim: LedgerClaim) -> None:
        """Release the claim of a failed load or of an adapter."""
        self.device_memory.release(claim)
        self.wake_loads()

    def _check_fits(self, request: MemoryRequest, own: LedgerClaim | None = None) -> None:
        models = [
            entry
            for entry in self.models.values()
            if entry.resident.pinned and not entry.resident.leaving
        ]
        pinned = [entry.device for entry in models]
        adapters = sum(entry.resident.adapters.bytes for entry in models)
        if not never_fits(self.device_memory, pinned, request.size, own, more_bytes=adapters):
            return
        size, memory = request.size, self.device_memory
        batch = f" and {size.activation_bytes:,} for a batch" if size.activation_bytes else ""
        pinned_bytes = sum(claim.size.bytes for claim in pinned) + adapters
        stuck = sum(claim.size.bytes for claim in memory.stuck)
        hung = f", {stuck:,} are held by hanging loads" if stuck else ""
        raise ModelBroken(
            f"{request.name} needs {size.bytes:,} bytes{batch}; this worker has "
            f"{memory.limit_bytes:,}, of which {pinned_bytes:,} are pinned"
            f"{hung} and {max(0, memory.free_bytes):,} free"
        )

    def _start_evictions(self, request: MemoryRequest, own: LedgerClaim | None = None) -> bool:
        """Start the evictions that the request needs. Return False if the rules forbid enough of
        them now.
        """
        holdings = [
            Holding(self.candidate(entry), entry.device, entry.resident.adapters.bytes)
            for entry in self.models.values()
        ]
        holdings += self._freeing
        waiting = self._clock() - request.requested_at
        waiting = (
            math.inf
            if waiting > _PATIENCE_SECONDS
            else max(waiting, self._waiting_seconds(request.name, request.size.bytes))
        )
        challenger = Challenger(request.name, request.size.bytes, waiting)
        chosen = victims(self.device_memory, holdings, request.size, self._policy, challenger, own)
        for one in chosen or ():
            self._floor = max(self._floor, self._policy(one))
            self.evict(self.models[one.name].resident)
        return chosen is not None

    # Eviction

    def evict(self, resident: Resident, *, to_host: bool = True) -> asyncio.Task[None]:
        """Start evicting a model, and return the task. The model takes no new work and leaves the
        device after its last job. With `to_host` it moves to host memory if that has space.
        """
        resident.leaving = True
        task = self._tasks.start(self._unload(resident.name, resident.drained, to_host=to_host))
        self.unloading[resident.name] = task
        self._changed()
        return task

    async def _unload(self, model: str, drained: asyncio.Event, *, to_host: bool) -> None:
        await drained.wait()
        while self.is_computing(model):  # noqa: ASYNC110  # the device thread has no event; rare and brief
            await asyncio.sleep(_COMPUTING_SECONDS)
        self.models[model].resident.adapters.clear()
        self.images.forget(model, self.models[model].resident.model)
        size = self.models[model].device.size.bytes
        warm = await self._park(self.models[model]) if to_host else None
        # This task must hold no reference to the model from here on, so that its memory is freed.
        entry = self.models.pop(model)
        self.graphs.forget(model)
        claim = entry.device
        if warm is None:
            if entry.host is not None:
                self.host.release(entry.host)
            entry.copy.close()
            freeing = Holding(self.candidate(entry), claim)
            del entry
            self._freeing.append(freeing)
            await in_thread(self._trim)
            self._freeing.remove(freeing)
        else:
            self.host.models[model] = warm
        self.device_memory.release(claim)
        del self.unloading[model]
        metrics.EVICTIONS.labels("cold" if warm is None else "warm").inc()
        log.info(
            "model unloaded",
            extra=fields({"model": model, "bytes": size, "to_host": warm is not None}),
        )
        self.wake_loads()
        self._changed()

    async def _park(self, entry: ResidentModel) -> Warm | None:
        """Move the model to host memory. Return None if it does not fit without dropping warm
        models of higher value.
        """
        one = entry.resident
        host = entry.host or self.host.reserve(one.name, one.model.bytes, one)
        if host is None:
            return None
        try:
            parked = await in_thread(one.model.park)
        except Exception:
            log.exception("moving a model to host memory failed", extra=fields({"model": one.name}))
            if entry.host is None:
                self.host.release(host)
            return None
        entry.host = host
        return Warm(
            one.name,
            parked,
            entry.copy,
            entry.device.size,
            host,
            one.load_seconds,
            one.last_used,
            one.uses,
            one.floor,
            one.identity,
        )

    async def relieve(self, keep: str) -> bool:
        """Free device memory after an allocation failed. Return whether anything was freed.

        The first of these that exists is freed:

        1. all CUDA graphs;
        2. if the device shares the host's memory: cached outputs, or a warm model;
        3. an idle, unpinned model other than `keep`.
        """
        if await self.graphs.shed():
            return True
        if (
            self._shares_memory
            and self.images.used_bytes
            and self.images.give_back(self.images.granted_bytes)
        ):
            await in_thread(self._trim)
            return True
        if self._shares_memory and self.host.drop_cheapest():
            await in_thread(self._trim)
            return True
        idle = [
            one
            for one in map(self.candidate, self.models.values())
            if one.name != keep and _is_idle(one) and not self.is_computing(one.name)
        ]
        if not idle:
            return False
        victim = min(idle, key=self._policy).name
        await asyncio.wait(
            [self.evict(self.models[victim].resident, to_host=not self._shares_memory)]
        )
        return True

    # Admission

    async def admit(
        self,
        model: Model,
        claim: LedgerClaim,
        copy: Copy,
        *,
        load_seconds: float,
        activation: float,
    ) -> Resident:
        """Make a loaded model resident.

        Args:
            claim: The memory reserved for it.
            load_seconds: Duration of its load.
            activation: Activation bytes per token of a forward pass.
        """
        resident = self._resident(claim.name, model, load_seconds, activation)
        entry = ResidentModel(resident, copy, claim)
        if model.host_bytes:
            entry.host = self.host.reserve(claim.name, model.host_bytes, resident)
            if entry.host is None:
                await in_thread(model.drop_host_copy)
        self.models[claim.name] = entry
        self.graphs.keep(resident, claim)
        return resident

    def readmit(
        self, warm: Warm, model: Model, claim: LedgerClaim, *, seconds: float, activation: float
    ) -> Resident:
        """Make a warm model resident again. `seconds` is the time that its return to the device
        took; the other arguments are as in `admit`.
        """
        self.host.add_resume(warm, seconds)
        resident = self._resident(warm.name, model, warm.load_seconds, activation)
        if not model.host_bytes:
            self.host.release_warm(warm)
        self.models[warm.name] = ResidentModel(resident, warm.copy, claim, warm.host)
        resident.identity = warm.identity
        self.graphs.keep(resident, claim)
        return resident

    def _resident(
        self, name: str, model: Model, load_seconds: float, activation: float
    ) -> Resident:
        now = self._clock()
        return Resident(
            name,
            model,
            load_seconds=load_seconds,
            loaded_at=now,
            last_used=now,
            pinned=model.card.pinned,
            floor=self._floor,
            activation_bytes_per_token=activation,
            meter=self.meter(name),
            images=self.images.serve(name, model),
        )


def _computes_nothing(model: str) -> bool:
    """The default of `Space.is_computing`, before `Residency.watch_device` sets it."""
    return False


def _is_idle(one: Candidate) -> bool:
    """Return whether a model can be evicted without delaying any work."""
    return not (one.pinned or one.leaving or one.is_busy)
