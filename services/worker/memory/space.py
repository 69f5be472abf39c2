"""What is resident on the device and what is warm in host memory: grants room to loads, and evicts
models for them.

Not on the request path; used by `residency.py`: `loading.py` reserves room here and registers what
it has loaded; `host.py` keeps the warm models. A model is evicted in two steps, so that nothing in
flight is lost: first it takes no new work (`leaving`), then it leaves the device once its last job
has been answered. Event loop only.
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
from services.worker.machine.device import Device
from services.worker.machine.tasks import Tasks
from services.worker.machine.threads import in_thread
from services.worker.memory.budget import (
    Claim,
    Holding,
    Ledger,
    Size,
    never_fits,
    seconds_of,
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

_LOOK_AGAIN_SECONDS: Final = 0.05
"""How often a load that waits for room checks again when only its waiting time, on which eviction
depends too, has changed.
"""

_COMPUTING_SECONDS: Final = 0.002
"""How often an eviction checks whether the last batch of a model without jobs is over."""

_PATIENCE_SECONDS: Final = 60.0
"""A load that has waited so long for room may evict any model that is not pinned, however much work
that model has.
"""


@dataclass(frozen=True, slots=True)
class RoomRequest:
    """A request for room on the device for one model. `requested_at`: seconds of the worker's
    monotonic clock.
    """

    name: str
    size: Size
    requested_at: float


@dataclass(slots=True, eq=False)
class Place:
    """A resident model and what it holds: its claim on the device, that of its host copy if any,
    and its directory on disk.
    """

    resident: Resident
    copy: Copy
    device: Claim
    host: Claim | None = None


class Space:
    """Device and host memory. Where `device` shares the host's memory, a warm model is a resident
    one that is not served.

    `changed` is called when a model changes its state. `wait_seconds`: how long a load may wait for
    room once it is first in the queue. `clock` is monotonic (seconds).
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
        # Mutable state. A name is in at most one of `places` and `host.models`, in none while it is
        # loaded.
        self.places: dict[str, Place] = {}
        self.unloading: dict[str, asyncio.Task[None]] = {}
        self.meters: dict[str, Meter] = {}  # of models that have left, too
        self._going: list[Holding] = []  # have left `places`, and their memory is being given back
        self.backlog: Mapping[str, int] = {}
        """Tokens queued in lanes, by model."""
        self.is_computing: Callable[[str], bool] = _computes_nothing
        """Whether the device has a batch of the model: after its last job was cancelled, it may
        have one for a moment.
        """
        self.is_crowded = False
        """A load waits, and the rules forbid enough evictions for now."""
        self._floor = 0.0
        self._turn = asyncio.Lock()
        self.graphs = GraphMemory(
            device, self.device_memory, may_grow=lambda: not self._turn.locked()
        )
        self._wake = asyncio.Event()
        # Outputs are in host memory, of whichever device.
        ledger = self.device_memory if device.shares_memory else self.host.ledger
        self.images = ImageCache(
            ledger, image_cache_bytes, may_grow=lambda: not self._turn.locked(), clock=clock
        )
        allowance = ALLOWANCE_BYTES if device.shares_memory else ACCELERATOR_ALLOWANCE_BYTES
        self.decoding = DecodingMemory(
            ledger, allowance, make_room=self._make_decoding_room, clock=clock
        )
        if not device.shares_memory:
            self.host.give_back = self.images.give_back

    def make_room(self, size: Size, without: Collection[Claim] = ()) -> bool:
        """Frees device memory that needs no eviction of a model, as far as a claim of that size
        lacks it. Whether it freed some.
        """
        return self._shares_memory and self.images.give_back(
            self.device_memory.missing(size, without)
        )

    def _make_decoding_room(self, needed: int) -> None:
        """Frees host memory for decoding an image of `needed` bytes, in the order in which that
        costs least: kept outputs, a warm model, an idle model where models are in host memory. One
        model at a time; the image asks again."""
        ledger = self.device_memory if self._shares_memory else self.host.ledger
        if ledger.missing(Size(needed)) <= 0 or self.images.give_back(ledger.missing(Size(needed))):
            return
        if not self._shares_memory:
            self.host.drop_cheapest()
            return
        idle = [one for one in map(self.candidate, self.places.values()) if _is_idle(one)]
        if idle and not self.unloading:
            self.evict(self.places[min(idle, key=self._policy).name].resident, to_host=False)

    @property
    def reclaimable_bytes(self) -> int:
        """Claimed device memory that `make_room` can free."""
        return self.images.granted_bytes if self._shares_memory else 0

    @property
    def reclaimable_host_bytes(self) -> int:
        """Claimed host memory that is given back before a warm model is dropped."""
        return 0 if self._shares_memory else self.images.granted_bytes

    # What policies see

    def candidate(self, place: Place) -> Candidate:
        """A resident model as the eviction policies and rules see it."""
        one, now = place.resident, self._clock()
        return Candidate(
            one.name,
            bytes=place.device.size.bytes + one.adapters.bytes,
            load_seconds=self._reload_seconds(place),
            idle_seconds=0.0 if one.held_jobs else now - one.last_used,
            uses=max(1, one.uses),
            floor=one.floor,
            pinned=one.pinned,
            leaving=one.leaving,
            is_busy=one.held_jobs > 0,
            waiting_seconds=self._waiting_seconds(one.name, one.held_tokens),
            resident_seconds=now - one.loaded_at,
        )

    def _reload_seconds(self, place: Place) -> float:
        """Seconds to reload the model: from host memory if that is possible and measured, else from
        disk.
        """
        resume_seconds = self.host.resume_seconds(
            place.device.size.bytes - place.resident.graph_bytes
        )
        return (
            place.resident.load_seconds
            if resume_seconds is None
            else min(place.resident.load_seconds, resume_seconds)
        )

    def _waiting_seconds(self, model: str, held_tokens: float = 0.0) -> float:
        meter = self.meters.get(model)
        return seconds_of(
            self.backlog.get(model, 0) + held_tokens,
            0.0 if meter is None else meter.tokens_per_second,
        )

    def meter(self, model: str) -> Meter:
        return self.meters.setdefault(model, Meter())

    def record_use(self, resident: Resident, jobs: int) -> None:
        """Records newly pulled jobs of the model for the eviction policies."""
        resident.last_used = self._clock()
        resident.uses += jobs
        resident.floor = self._floor

    def wake_loads(self) -> None:
        """Wakes a load that waits for room, because something has changed."""
        self._wake.set()

    # Room for loads

    async def reserve(self, request: RoomRequest, warm: Warm | None = None) -> Claim:
        """Evicts models until the request fits, and reserves the room. Requests are served first
        come, first served.

        `warm`: the model's copy in host memory, if it has one. Raises ModelBroken with the numbers
        if the request can never fit, and NoCapacity if there is no room within `wait_seconds`.
        """
        async with self._turn:
            until = self._clock() + self._wait_seconds
            try:
                while True:
                    self.make_room(request.size)
                    if self.device_memory.missing(request.size) > 0:
                        await self.graphs.shed()
                    self._check_fits(request)
                    if warm is not None and self._shares_memory:
                        # Once there is room the model counts on the device, which is the same
                        # memory, and models evicted for it may take its place in host memory.
                        self.host.release_of(warm)
                    claim = self.device_memory.claim(request.name, request.size)
                    if claim is not None:
                        return claim
                    if self._clock() > until:
                        waited = f"{self._wait_seconds:g} seconds"
                        raise NoCapacity(
                            f"{request.name} found no room on the device within {waited}: no model may be evicted"
                        )
                    self.is_crowded = not self._start_evictions(request)
                    self._wake.clear()
                    with suppress(TimeoutError):
                        async with asyncio.timeout(_LOOK_AGAIN_SECONDS):
                            await self._wake.wait()
            finally:
                self.is_crowded = False

    async def grow(self, claim: Claim, request: RoomRequest) -> bool:
        """Resizes a claim to the request's size, evicting models if need be. False: no eviction is
        in progress, and a load that holds memory must not wait for anything else, or two loads
        could deadlock. Raises ModelBroken as `reserve` does."""
        while not self.device_memory.resize(claim, request.size):
            if self.make_room(request.size, [claim]):
                continue
            if await self.graphs.shed():
                continue
            self._check_fits(request, claim)
            self._start_evictions(request, claim)
            if not self.unloading:
                return False
            await asyncio.wait(self.unloading.values(), return_when=asyncio.FIRST_COMPLETED)
        return True

    def release(self, claim: Claim) -> None:
        """Releases the claim of a load that failed, or of an adapter."""
        self.device_memory.release(claim)
        self.wake_loads()

    def _check_fits(self, request: RoomRequest, own: Claim | None = None) -> None:
        places = [
            place
            for place in self.places.values()
            if place.resident.pinned and not place.resident.leaving
        ]
        pinned = [place.device for place in places]
        adapters = sum(place.resident.adapters.bytes for place in places)
        if not never_fits(self.device_memory, pinned, request.size, own, more_bytes=adapters):
            return
        size, memory = request.size, self.device_memory
        batch = f" and {size.activation_bytes:,} for a batch" if size.activation_bytes else ""
        stuck = sum(claim.size.bytes for claim in memory.stuck)
        hung = f", {stuck:,} are held by loads that hang" if stuck else ""
        raise ModelBroken(
            f"{request.name} needs {size.bytes:,} bytes{batch}; this worker has {memory.limit_bytes:,}, of which "
            f"{sum(claim.size.bytes for claim in pinned) + adapters:,} are pinned{hung} and {max(0, memory.free_bytes):,} free"
        )

    def _start_evictions(self, request: RoomRequest, own: Claim | None = None) -> bool:
        """Starts the evictions that the request needs; False if the rules forbid enough of them for
        now.
        """
        holdings = [
            Holding(self.candidate(place), place.device, place.resident.adapters.bytes)
            for place in self.places.values()
        ]
        holdings += self._going
        waiting = self._clock() - request.requested_at
        waiting = (
            math.inf
            if waiting > _PATIENCE_SECONDS
            else max(waiting, self._waiting_seconds(request.name))
        )
        challenger = Challenger(request.name, request.size.bytes, waiting)
        chosen = victims(self.device_memory, holdings, request.size, self._policy, challenger, own)
        for one in chosen or ():
            self._floor = max(self._floor, self._policy(one))
            self.evict(self.places[one.name].resident)
        return chosen is not None

    # Eviction

    def evict(self, resident: Resident, *, to_host: bool = True) -> asyncio.Task[None]:
        """Starts to evict a model: it takes no new work, and leaves the device when none of its
        jobs is held, for host memory if there is room and `to_host`."""
        resident.leaving = True
        task = self._tasks.start(self._unload(resident.name, resident.drained, to_host=to_host))
        self.unloading[resident.name] = task
        self._changed()
        return task

    async def _unload(self, model: str, drained: asyncio.Event, *, to_host: bool) -> None:
        await drained.wait()
        while self.is_computing(model):  # noqa: ASYNC110  # the device thread sets no event: this is rare and over in milliseconds
            await asyncio.sleep(_COMPUTING_SECONDS)
        self.places[model].resident.adapters.clear()
        self.images.forget(model, self.places[model].resident.model)
        size = self.places[model].device.size.bytes
        warm = await self._park(self.places[model]) if to_host else None
        # From here on this task holds no reference to the model, so that dropping it frees its
        # memory.
        place = self.places.pop(model)
        self.graphs.forget(model)
        claim = place.device
        if warm is None:
            if place.host is not None:
                self.host.release(place.host)
            place.copy.close()
            going = Holding(self.candidate(place), claim)
            del place
            self._going.append(going)
            await in_thread(self._trim)
            self._going.remove(going)
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

    async def _park(self, place: Place) -> Warm | None:
        """Moves the model to host memory. None if that has no room, or only by dropping warm models
        that are worth more.
        """
        one = place.resident
        host = place.host or self.host.reserve(one.name, one.model.bytes, one)
        if host is None:
            return None
        try:
            parked = await in_thread(one.model.park)
        except Exception:
            log.exception(
                "a model could not be moved to host memory", extra=fields({"model": one.name})
            )
            if place.host is None:
                self.host.release(host)
            return None
        place.host = host
        return Warm(
            one.name,
            parked,
            place.copy,
            place.device.size,
            host,
            one.load_seconds,
            one.last_used,
            one.uses,
            one.floor,
        )

    async def relieve(self, keep: str) -> bool:
        """Frees the memory of all CUDA graphs, or else of one model: a warm one where memory is
        shared, else one that is idle and not pinned, other than `keep`. False if there is none."""
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
            for one in map(self.candidate, self.places.values())
            if one.name != keep and _is_idle(one) and not self.is_computing(one.name)
        ]
        if not idle:
            return False
        victim = min(idle, key=self._policy).name
        await asyncio.wait(
            [self.evict(self.places[victim].resident, to_host=not self._shares_memory)]
        )
        return True

    # Admission

    async def admit(
        self, model: Model, claim: Claim, copy: Copy, *, load_seconds: float, activation: float
    ) -> Resident:
        """Makes a loaded model resident."""
        resident = self._resident(claim.name, model, load_seconds, activation)
        place = Place(resident, copy, claim)
        if model.host_bytes:
            place.host = self.host.reserve(claim.name, model.host_bytes, resident)
            if place.host is None:
                await in_thread(model.drop_host_copy)
        self.places[claim.name] = place
        self.graphs.keep(resident, claim)
        return resident

    def readmit(
        self, warm: Warm, model: Model, claim: Claim, *, seconds: float, activation: float
    ) -> Resident:
        """Makes a model that was warm resident again. `seconds`: how long resuming it took."""
        self.host.resumed(warm, seconds)
        resident = self._resident(warm.name, model, warm.load_seconds, activation)
        if not model.host_bytes:
            self.host.release_of(warm)
        self.places[warm.name] = Place(resident, warm.copy, claim, warm.host)
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
    """`Space.is_computing` while nothing computes."""
    return False


def _is_idle(one: Candidate) -> bool:
    """Whether a model may be evicted at once."""
    return not (one.pinned or one.leaving or one.is_busy)
