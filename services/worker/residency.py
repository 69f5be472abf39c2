"""Which models are on the device: fetches and loads them on order or first demand, unloads when no job needs them, keeps within the
memory budget.

Beside the way of a request: `intake.py` asks what is resident and passes on what routers want loaded; `heartbeat.py` reports it.
Event loop only; files are read and models built in threads of their own, so that other models are served meanwhile.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Collection, Coroutine
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Final, TypeVar

from shoal.v1 import models_pb2, worker_pb2

from libs.catalog import read_card
from libs.catalog.card import Card
from libs.catalog.overrides import Catalog
from libs.errors import ModelBroken, ModelNotFound, ShoalError
from libs.store import Copy, Progress, Store
from libs.telemetry.logs import fields
from services.worker import codec, disk
from services.worker.held import Load, Resident

log = logging.getLogger(__name__)

DATA_TYPES: Final = {2: "bfloat16", 4: "float32"}
ITEM_BYTES: Final = {"float32": 4, "bfloat16": 2, "float16": 2}

MAX_LOADS: Final = 2
MAX_DOWNLOADS: Final = 4
"""At the same time. A download does not count as a load: it takes long, and neither the device nor its memory."""

MIN_RESIDENT_SECONDS: Final = 10.0
"""A model in use stays at least so long before one that nobody told us to load may take its place."""

REPORT_FAILURE_SECONDS: Final = 60.0
RESCAN_SECONDS: Final = 30.0

_Answer = TypeVar("_Answer")


async def in_thread(function: Callable[[], _Answer]) -> _Answer:
    """Runs on a thread of its own: a daemon, because a load cannot be interrupted and must not hold up the end of the process."""
    future: Future[_Answer] = Future()
    future.set_running_or_notify_cancel()  # so that who stops waiting for it does not take its result's place

    def run() -> None:
        try:
            future.set_result(function())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name="load", daemon=True).start()
    return await asyncio.wrap_future(future)


@dataclass(frozen=True, slots=True)
class Failed:
    """A model that could not be loaded, when (rising clock), and why."""

    at: float
    error: ShoalError


def to_evict(residents: Collection[Resident], needed_bytes: int) -> list[Resident]:
    """The models to unload until `needed_bytes` are free: idle ones first, then the least recently used. Never a pinned one."""
    candidates = [one for one in residents if not one.pinned and not one.leaving]
    chosen: list[Resident] = []
    for resident in sorted(candidates, key=lambda one: (one.held_jobs > 0, one.last_used)):
        if needed_bytes <= 0:
            break
        chosen.append(resident)
        needed_bytes -= resident.model.bytes
    return chosen


class Residency:
    """The worker's models.

    `item_bytes` is the size of a weight on the device where `catalog` has no other, `clock` rises (seconds), `changed` is called
    whenever a model changes its state, `trim` gives freed device memory back.
    """

    def __init__(
        self,
        shelves: tuple[disk.Shelf, ...],
        store: Store | None,
        memory_bytes: int,
        item_bytes: int,
        load: Load,
        tasks: asyncio.TaskGroup,
        *,
        clock: Callable[[], float],
        changed: Callable[[], None],
        trim: Callable[[], None],
        catalog: Catalog | None = None,
    ) -> None:
        self.memory_bytes = memory_bytes
        self._shelves = shelves
        self._store = store
        self._item_bytes = item_bytes
        self._catalog = catalog or Catalog()
        self._load_model = load
        self._tasks = tasks
        self._changed = changed
        self._trim = trim
        self._clock = clock
        self._loop = asyncio.get_running_loop()
        self._stopped = asyncio.Event()
        # Mutable state. A name is in at most one of `_loading`, `_residents` and `_failed`, but for one that loads after it leaves.
        self._cold: dict[str, Card | None] = {}
        self._loading: dict[str, int] = {}  # bytes set aside
        self._downloads: dict[str, Progress | None] = {}  # of those in `_loading` for which the store is asked; None: not begun
        self._copies: dict[str, Copy] = {}  # of those in `_residents`
        self._residents: dict[str, Resident] = {}
        self._failed: dict[str, Failed] = {}
        self._running: set[asyncio.Task[None]] = set()
        self._loads: dict[str, asyncio.Task[None]] = {}  # of those in `_loading`
        self._unloading: dict[str, asyncio.Task[None]] = {}

    # What is served

    def lanes(self) -> list[str]:
        """Models to pull for, the least recently served first: under load they take turns."""
        serving = [one for one in self._residents.values() if not one.leaving]
        return [one.name for one in sorted(serving, key=lambda one: one.last_used)]

    def serving(self, model: str) -> Resident | None:
        """The model, if it takes work."""
        resident = self._residents.get(model)
        return None if resident is None or resident.leaving else resident

    def hold(self, resident: Resident, jobs: int) -> None:
        """Jobs were taken in for it."""
        if jobs:
            resident.drained.clear()
        resident.held_jobs += jobs
        resident.last_used = self._clock()

    def let_go(self, resident: Resident) -> None:
        """One of its jobs is no longer held."""
        resident.held_jobs -= 1
        resident.last_used = self._clock()
        if resident.held_jobs == 0:
            resident.drained.set()

    # Orders

    def load(self, model: str) -> None:
        """Make a model resident, if it is not."""
        resident = self._residents.get(model)
        if model not in self._loading and not self._stopped.is_set() and (resident is None or resident.leaving):
            self._failed.pop(model, None)
            self._loading[model] = 0
            self._loads[model] = self._start(self._bring(model))
        self._changed()

    def evict(self, model: str) -> None:
        """Unload a model once no job needs it; it is not pulled for from now on. An order outranks a pin."""
        resident = self.serving(model)
        if resident is not None:
            self._leave(resident)

    def pin(self, model: str, pinned: bool) -> None:
        resident = self._residents.get(model)
        if resident is not None:
            resident.pinned = pinned
            self._changed()

    def stop(self) -> None:
        """Take no more orders, and give up those under way."""
        self._stopped.set()
        for task in self._running:
            task.cancel()

    def can_load(self) -> bool:
        """Whether a router may offer one more model: a tenth of the memory is free, or some model has had its time."""
        loads = len(self._loading) - len(self._downloads)
        if self._stopped.is_set() or loads >= MAX_LOADS or len(self._downloads) >= MAX_DOWNLOADS:
            return False
        since = self._clock() - MIN_RESIDENT_SECONDS
        may_go = [one for one in self._residents.values() if not one.pinned and not one.leaving]
        return self._free_bytes() >= self.memory_bytes // 10 or any(one.held_jobs == 0 or one.loaded_at < since for one in may_go)

    # What is reported

    @property
    def used_bytes(self) -> int:
        return sum(one.model.bytes for one in self._residents.values()) + sum(self._loading.values())

    def report(self) -> list[worker_pb2.WorkerModel]:
        """Every model that is on disk, on its way there, loading, resident, or failed within the last minute."""
        now = self._clock()
        self._failed = {name: failed for name, failed in self._failed.items() if now - failed.at < REPORT_FAILURE_SECONDS}
        lines = {name: worker_pb2.WorkerModel(model=name, state=models_pb2.MODEL_STATE_COLD) for name in self._cold}
        for name, failed in self._failed.items():
            failure = codec.failure_of(failed.error)
            lines[name] = worker_pb2.WorkerModel(model=name, state=models_pb2.MODEL_STATE_FAILED, failure=failure)
        for name, size in self._loading.items():
            lines[name] = _coming(name, size, self._downloads.get(name))
        for name, card in self._cold.items():
            if card is not None:
                lines[name].card.CopyFrom(codec.to_card(card))
        lines.update({one.name: self._line(one, now) for one in self._residents.values() if one.name not in self._loading})
        return [lines[name] for name in sorted(lines)]

    def _line(self, one: Resident, now: float) -> worker_pb2.WorkerModel:
        meter, size = one.meter, one.model.bytes
        own = one.model.card.dtype
        data_type = DATA_TYPES[self._item_bytes] if own == "auto" else own
        return worker_pb2.WorkerModel(
            model=one.name,
            state=models_pb2.MODEL_STATE_RESIDENT,
            bytes=size,
            load_seconds=one.load_seconds,
            tokens_per_second=meter.tokens_per_second,
            idle_seconds=0.0 if one.held_jobs else now - one.last_used,
            pinned=one.pinned,
            card=codec.to_card(one.model.card, stored_bytes=size, data_type=data_type, tokens_per_byte=meter.tokens_per_byte),
        )

    async def run(self) -> None:
        """Keeps the list of models on disk fresh, until `stop`."""
        shelves = self._shelves if self._store is None else (*self._shelves, disk.Shelf(self._store.models))
        while not self._stopped.is_set():
            known = self._cold
            found = await in_thread(partial(_read_cards, shelves, known, self._catalog))
            if found.keys() != known.keys():
                self._cold = found
                self._changed()
            with suppress(TimeoutError):
                async with asyncio.timeout(RESCAN_SECONDS):
                    await self._stopped.wait()

    # Loading and unloading

    def _start(self, work: Coroutine[object, object, None]) -> asyncio.Task[None]:
        task = self._tasks.create_task(work)
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        return task

    async def _bring(self, model: str) -> None:
        """Supervises one load: it ends with the model resident or with a failure that the heartbeat reports."""
        try:
            resident = await self._loaded(model)
        except ShoalError as error:
            self._fail(model, error)
        except Exception as error:
            log.exception("loading failed", extra=fields({"model": model}))
            self._fail(model, ModelBroken(f"{model} could not be loaded: {type(error).__name__}: {error}"))
        else:
            del self._loading[model], self._loads[model]
            self._residents[model] = resident
            size = resident.model.bytes
            log.info("model loaded", extra=fields({"model": model, "bytes": size, "seconds": resident.load_seconds}))
        self._changed()

    def _fail(self, model: str, error: ShoalError) -> None:
        del self._loading[model], self._loads[model]
        self._failed[model] = Failed(self._clock(), error)
        log.warning("model failed", extra=fields({"model": model, "reason": error.reason, "error": error.message}))

    async def _loaded(self, model: str) -> Resident:
        if model in self._unloading:
            await asyncio.wait([self._unloading[model]])
        copy = await self._on_disk(model)
        try:
            started = self._clock()
            needed = await in_thread(partial(disk.weight_bytes, copy.directory, self._item_bytes_of(model)))
            await self._set_aside(model, needed)
            loaded = await in_thread(partial(self._load_model, copy.directory, model))
            if loaded.bytes > needed:
                await self._set_aside(model, loaded.bytes)
        except BaseException:
            copy.close()
            raise
        self._copies[model] = copy
        now = self._clock()
        return Resident(model, loaded, load_seconds=now - started, loaded_at=now, last_used=now, pinned=loaded.card.pinned)

    def _item_bytes_of(self, model: str) -> int:
        said = self._catalog.of(model)
        return ITEM_BYTES.get((said and said.dtype) or "", self._item_bytes)

    async def _on_disk(self, model: str) -> Copy:
        """Its directory: in a folder, else in the store, which fetches it if need be."""
        try:
            return Copy(await in_thread(partial(disk.find, self._shelves, model)))
        except ModelNotFound:
            if self._store is None:
                raise
        self._downloads[model] = None
        try:
            return await in_thread(partial(self._store.get, self._catalog.pinned_id(model), partial(self._downloading, model)))
        finally:
            del self._downloads[model]
            self._changed()

    def _downloading(self, model: str, progress: Progress) -> None:
        """On a thread of the store."""
        is_news = self._downloads.get(model) is None
        self._downloads[model] = progress
        if is_news:
            self._loop.call_soon_threadsafe(self._changed)

    async def _set_aside(self, model: str, needed: int) -> None:
        """Unload others until `needed` bytes are free, and reserve them. Raises ModelBroken with the numbers if they cannot be.

        Between the last look at what is free and the reservation nothing else runs, so loads need no lock against each other.
        """
        own = self._loading[model]
        while needed > (free := self._free_bytes() + own):
            pinned = sum(one.model.bytes for one in self._residents.values() if one.pinned)
            numbers = f"this worker has {self.memory_bytes:,}, of which {pinned:,} are pinned and {free:,} free"
            if needed > self.memory_bytes - pinned:
                raise ModelBroken(f"{model} needs {needed:,} bytes; {numbers}")
            soon = sum(one.model.bytes for one in self._residents.values() if one.leaving)
            for resident in to_evict(self._residents.values(), needed - free - soon):
                self._leave(resident)
            # What holds a reservation waits for unloads only, so that two loads never wait for each other.
            loads = [] if own else [self._loads[name] for name, size in self._loading.items() if size]
            under_way = [*loads, *self._unloading.values()]
            if not under_way:
                raise ModelBroken(f"{model} needs {needed:,} bytes; {numbers}")
            await asyncio.wait(under_way, return_when=asyncio.FIRST_COMPLETED)
        self._loading[model] = needed

    def _free_bytes(self) -> int:
        return self.memory_bytes - self.used_bytes

    def _leave(self, resident: Resident) -> None:
        """First phase of unloading: no new work."""
        resident.leaving = True
        self._unloading[resident.name] = self._start(self._unload(resident.name, resident.drained))
        self._changed()

    async def _unload(self, model: str, drained: asyncio.Event) -> None:
        """Second phase: gone when no job is held any more."""
        await drained.wait()
        size = self._residents.pop(model).model.bytes
        self._copies.pop(model).close()
        await in_thread(self._trim)
        del self._unloading[model]
        log.info("model unloaded", extra=fields({"model": model, "bytes": size}))
        self._changed()


def _coming(model: str, size: int, progress: Progress | None) -> worker_pb2.WorkerModel:
    if progress is None:
        return worker_pb2.WorkerModel(model=model, state=models_pb2.MODEL_STATE_LOADING, bytes=size)
    return worker_pb2.WorkerModel(
        model=model,
        state=models_pb2.MODEL_STATE_DOWNLOADING,
        downloaded_bytes=progress.done,
        download_bytes=progress.total,
    )


def _read_cards(shelves: tuple[disk.Shelf, ...], known: dict[str, Card | None], catalog: Catalog) -> dict[str, Card | None]:
    """The models on disk with their cards; None for a broken one, which says why when somebody wants it."""
    cards: dict[str, Card | None] = {}
    for model, directory in disk.listing(shelves).items():
        if model in known:
            cards[model] = known[model]
            continue
        try:
            cards[model] = read_card(directory, model, catalog.of(model))
        except (ShoalError, OSError) as error:  # OSError: the store has just evicted it
            log.warning("a model on disk cannot be read", extra=fields({"model": model, "error": str(error)}))
            cards[model] = None
    return cards
