"""Which models are on the device: loads them on order or first demand, unloads them when others need the room more, reports them.

Beside the way of a request: `intake.py` asks what is resident and passes on what routers want loaded; `heartbeat.py` reports it.
`loading.py` supervises one load, `space.py` decides who stays where, by `budget.py`. Event loop only.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Final

from shoal.v1 import worker_pb2

from libs.catalog import read_card
from libs.catalog.card import Card
from libs.catalog.overrides import Catalog
from libs.errors import ModelBroken, ShoalError
from libs.eviction import Policy, cost_aware
from libs.eviction.choose import MIN_RESIDENT_SECONDS
from libs.store import Store
from libs.telemetry import metrics
from libs.telemetry.logs import fields
from services.worker.machine import disk
from services.worker.machine.device import Load
from services.worker.machine.threads import in_thread
from services.worker.memory import report
from services.worker.memory.budget import Size
from services.worker.memory.loading import ITEM_BYTES, Loader, Loading
from services.worker.memory.resident import Resident
from services.worker.memory.space import Space
from services.worker.mesh import codec

log = logging.getLogger(__name__)

MAX_LOADS: Final = 2
MAX_DOWNLOADS: Final = 4
"""At the same time. A download does not count as a load: it takes long, and neither the device nor its memory."""

REPORT_FAILURE_SECONDS: Final = 60.0
RESCAN_SECONDS: Final = 30.0


@dataclass(frozen=True, slots=True)
class OnDisk:
    """What a model's files say: its card, and the bytes that its weights would take on the device. None and 0 of a broken one."""

    card: Card | None = None
    bytes: int = 0


@dataclass(frozen=True, slots=True)
class Failed:
    """A model that could not be loaded, when (rising clock), and why."""

    at: float
    error: ShoalError


@dataclass(frozen=True, slots=True)
class Budget:
    """`memory_bytes`: of the device, for weights and one batch's activations. `host_bytes`: of host memory, for warm models.

    `shares_memory`: both are the same memory. `batch_tokens`: of the largest batch. `load_seconds`: how long a load may take.
    """

    memory_bytes: int
    host_bytes: int = 0
    shares_memory: bool = True
    batch_tokens: int = 0
    load_seconds: float = 300.0
    policy: Policy = cost_aware


class Residency:
    """The worker's models.

    `item_bytes` is the size of a weight on the device where `catalog` has no other, `clock` rises (seconds), `changed` is called
    whenever a model changes its state, `trim` gives freed memory back.
    """

    def __init__(
        self,
        shelves: tuple[disk.Shelf, ...],
        store: Store | None,
        budget: Budget,
        item_bytes: int,
        load: Load,
        tasks: asyncio.TaskGroup,
        *,
        clock: Callable[[], float],
        changed: Callable[[], None],
        trim: Callable[[], None],
        catalog: Catalog | None = None,
    ) -> None:
        self._shelves = shelves
        self._store = store
        self._item_bytes = item_bytes
        self._catalog = catalog or Catalog()
        self._tasks = tasks
        self._changed = changed
        self._clock = clock
        self._stopped = asyncio.Event()
        self._takes_more = True
        self._space = Space(
            budget.memory_bytes,
            budget.host_bytes,
            budget.policy,
            shares_memory=budget.shares_memory,
            clock=clock,
            changed=changed,
            trim=trim,
            start=self._start,
            wait_seconds=budget.load_seconds,
        )
        self._loader = Loader(
            shelves,
            store,
            self._catalog,
            self._space,
            load,
            item_bytes=item_bytes,
            batch_tokens=budget.batch_tokens,
            load_seconds=budget.load_seconds,
            clock=clock,
            changed=changed,
            trim=trim,
            start=self._start,
        )
        self._trim = trim
        # Mutable state. A name is in at most one of `_loading` and `_failed`, and loads again only once it has left the device.
        self._cold: dict[str, OnDisk] = {}
        self._loading: dict[str, Loading] = {}
        self._failed: dict[str, Failed] = {}
        self._running: set[asyncio.Task[None]] = set()

    # What is served

    def lanes(self) -> list[str]:
        """Models to pull for, those first that have had least of the device, then the least recently served."""
        serving = [place.resident for place in self._space.places.values() if not place.resident.leaving]
        return [one.name for one in sorted(serving, key=lambda one: (one.turn, one.last_used))]

    def serving(self, model: str) -> Resident | None:
        """The model, if it takes work."""
        place = self._space.places.get(model)
        return None if place is None or place.resident.leaving else place.resident

    def hold(self, resident: Resident, jobs: int, tokens: float = 0.0) -> None:
        """Jobs were taken in for it, of about so many tokens in all."""
        if jobs:
            resident.drained.clear()
        resident.held_jobs += jobs
        resident.held_tokens += tokens
        self._space.used(resident, jobs)

    def let_go(self, resident: Resident) -> None:
        """One of its jobs is no longer held."""
        resident.held_tokens *= (resident.held_jobs - 1) / resident.held_jobs
        resident.held_jobs -= 1
        resident.last_used = self._clock()
        if resident.held_jobs == 0:
            resident.drained.set()
            self._space.tell()

    # Orders

    def load(self, model: str) -> None:
        """Make a model resident, if it is not."""
        if self._takes_more and model not in self._loading and self.serving(model) is None:
            self._failed.pop(model, None)
            self._loading[model] = Loading(model, asked_at=self._clock())
            self._start(self._bring(self._loading[model]))
        self._changed()

    def evict(self, model: str, *, by_plan: bool = False) -> None:
        """Unload a model once no job needs it; it is not pulled for from now on. A warm one leaves host memory.

        An operator's order outranks a pin; a plan leaves alone what is pinned or has work.
        """
        resident = self.serving(model)
        if resident is None:
            self._space.drop_warm(model)
        elif not by_plan or not (resident.pinned or resident.held_jobs or self._space.backlog.get(model)):
            self._space.leave(resident)

    def pin(self, model: str, pinned: bool) -> None:
        place = self._space.places.get(model)
        if place is not None:
            place.resident.pinned = pinned
            self._space.tell()
            self._changed()

    def hear_backlog(self, queued_tokens: Mapping[str, int]) -> None:
        """Tokens that wait in lanes, by model; 0 for those that are not named."""
        self._space.backlog = queued_tokens
        self._space.tell()

    def claim(self, name: str, size: int) -> Callable[[], None] | None:
        """Takes bytes of the device beside its models: what gives them back, or None if they are not free."""
        claim = self._space.device.claim(name, Size(size))
        return None if claim is None else partial(self._space.release, claim)

    async def relieve(self, keep: str) -> bool:
        """For a device that is out of memory: let one model go that is idle and not pinned, other than `keep`, and wait until its
        memory is back. False if there is none."""
        return await self._space.relieve(keep)

    def take_no_more(self) -> None:
        """Load nothing from now on but what is loading: the machine will be taken away."""
        self._takes_more = False
        self._changed()

    def stop(self) -> None:
        """Take no more orders, and give up those under way."""
        self._takes_more = False
        self._stopped.set()
        for task in self._running:
            task.cancel()

    def can_load(self) -> bool:
        """Whether a router may offer one more model: a tenth of the memory is free, or some model is idle or has had its time.

        Not while a load waits for a model in use to give in: a further one would only wait behind it.
        """
        fetching = sum(not one.is_fetched for one in self._loading.values())
        if not self._takes_more or self._space.is_crowded:
            return False
        if len(self._loading) - fetching >= MAX_LOADS or fetching >= MAX_DOWNLOADS:
            return False
        since = self._clock() - MIN_RESIDENT_SECONDS
        residents = [place.resident for place in self._space.places.values()]
        may_go = [one for one in residents if not one.pinned and not one.leaving]
        ample = self._space.device.free_bytes >= self._space.device.limit_bytes // 10
        return ample or any(one.held_jobs == 0 or one.loaded_at < since for one in may_go)

    # What is reported

    @property
    def used_bytes(self) -> int:
        """Of the device: weights, and what loads have set aside."""
        return self._space.device.used_bytes

    @property
    def peak_bytes(self) -> int:
        """The most that was ever taken of the device, activations included."""
        return self._space.device.peak_bytes

    @property
    def host_bytes(self) -> int:
        """That warm models may take."""
        return self._space.host.limit_bytes

    @property
    def host_used_bytes(self) -> int:
        return self._space.host.used_bytes

    def residents(self) -> list[Resident]:
        """Those on the device. From any thread."""
        return [place.resident for place in list(self._space.places.values())]

    def report(self) -> list[worker_pb2.WorkerModel]:
        """Every model that is on disk, on its way there, loading, resident, or failed within the last minute."""
        now = self._clock()
        self._failed = {name: failed for name, failed in self._failed.items() if now - failed.at < REPORT_FAILURE_SECONDS}
        lines = {name: report.cold(name, found.bytes) for name, found in self._cold.items()}
        lines |= {name: report.failed(name, failed.error) for name, failed in self._failed.items()}
        lines |= {name: report.coming(one) for name, one in self._loading.items()}
        for name, found in self._cold.items():
            if found.card is not None:
                lines[name].card.CopyFrom(codec.to_card(found.card))
        for name, warm in self._space.warm.items():
            measured = self._loader.measured.get(name)
            rate = 0.0 if measured is None else measured.activation_bytes_per_token
            card = self._cold[name].card if name in self._cold else None
            lines[name] = report.warm(warm, card, self._space.meter(name), rate, now)
        for name, place in self._space.places.items():
            if name not in self._loading:
                lines[name] = report.resident(place, self._item_bytes, now)
        return [lines[name] for name in sorted(lines)]

    async def run(self) -> None:
        """Keeps the list of models on disk fresh, until `stop`."""
        shelves = self._shelves if self._store is None else (*self._shelves, disk.Shelf(self._store.models))
        while not self._stopped.is_set():
            known = self._cold
            found = await in_thread(partial(_read_cards, shelves, known, self._catalog, self._item_bytes))
            if found.keys() != known.keys():
                self._cold = found
                self._changed()
            with suppress(TimeoutError):
                async with asyncio.timeout(RESCAN_SECONDS):
                    await self._stopped.wait()

    # Loading

    def _start(self, work: Coroutine[object, object, None]) -> asyncio.Task[None]:
        task = self._tasks.create_task(work)
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        return task

    async def _bring(self, loading: Loading) -> None:
        """Supervises one load: it ends with the model resident or with a failure that the heartbeat reports."""
        model = loading.model
        try:
            resident = await self._loader.bring(loading)
        except ShoalError as error:
            self._fail(model, error)
            await in_thread(self._trim)
        except Exception as error:
            log.exception("loading failed", extra=fields({"model": model}))
            self._fail(model, ModelBroken(f"{model} could not be loaded: {type(error).__name__}: {error}"))
            error.__traceback__ = None
            await in_thread(self._trim)
        else:
            del self._loading[model]
            seconds = self._clock() - loading.asked_at
            metrics.LOADS.labels("OK").inc()
            metrics.SWAP_SECONDS.labels("host" if loading.is_from_host else "disk").observe(seconds)
            told = fields(
                {
                    "model": model,
                    "bytes": resident.model.bytes,
                    "seconds": seconds,
                    "used_bytes": self.used_bytes,
                    "peak_bytes": self.peak_bytes,
                    "host_used_bytes": self.host_used_bytes,
                }
            )
            log.info("model loaded", extra=told)
        self._space.tell()
        self._changed()

    def _fail(self, model: str, error: ShoalError) -> None:
        del self._loading[model]
        # What led to it refers to all that was read by then.
        error.__traceback__ = error.__cause__ = error.__context__ = None
        self._failed[model] = Failed(self._clock(), error)
        metrics.LOADS.labels(error.reason).inc()
        log.warning("model failed", extra=fields({"model": model, "reason": error.reason, "error": error.message}))


def _read_cards(shelves: tuple[disk.Shelf, ...], known: dict[str, OnDisk], catalog: Catalog, item_bytes: int) -> dict[str, OnDisk]:
    """The models on disk; a broken one says why when somebody wants it."""
    cards: dict[str, OnDisk] = {}
    for model, directory in disk.listing(shelves).items():
        if model in known:
            cards[model] = known[model]
            continue
        try:
            card = read_card(directory, model, catalog.of(model))
            cards[model] = OnDisk(card, disk.weight_bytes(directory, ITEM_BYTES.get(card.dtype, item_bytes)))
        except (ShoalError, OSError) as error:  # OSError: the store has just evicted it
            log.warning("a model on disk cannot be read", extra=fields({"model": model, "error": str(error)}))
            cards[model] = OnDisk()
        except Exception:  # whatever one directory holds, the others are served
            log.exception("a model on disk cannot be read", extra=fields({"model": model}))
            cards[model] = OnDisk()
    return cards
