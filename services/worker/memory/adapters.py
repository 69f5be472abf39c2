"""The LoRA adapters of resident models: loaded when a router asks, bounded in number, idle ones
evicted first.

Not on the request path: `residency.py` passes on the adapters that routers offer and reports the
loaded ones; `puller.py` pulls for these. Event loop only; files are read in threads. An adapter is
evicted in two steps, as models are: first it takes no new work, then it is removed once its last
job has been answered, so that nothing in flight is lost.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Final, Protocol, runtime_checkable

from libs.errors import InvalidInput, ModelBroken, NoCapacity, ShoalError
from libs.names import is_own_adapter
from libs.store import Copy
from libs.telemetry.logs import fields
from services.worker.machine.tasks import Tasks
from services.worker.machine.threads import in_thread
from services.worker.memory.resident import UNUSED_SECONDS, Entry, Failed, Resident

log = logging.getLogger(__name__)

MAX_ADAPTERS: Final = 32

WANTED_SECONDS: Final = 60.0
"""How long a request for an adapter is remembered while its model is loading."""


@runtime_checkable
class TakesAdapters(Protocol):
    """A model that adapters can be added to while it serves. Both block and may be called on any
    thread.
    """

    def add_adapter(self, name: str, directory: Path) -> int:
        """Returns its bytes on the device. Raises ShoalError."""

    def remove_adapter(self, name: str) -> None: ...


Claim = Callable[[str, int], Callable[[], None] | None]
"""Reserves bytes of device memory under a name. Returns the function that releases them, or None if
there is no room.
"""


class AdapterLoader:
    """Loads adapters into resident models. At most `limit` a model.

    `find`: adapter id -> its directory, fetched if need be; blocking. `claim` reserves device
    memory. `changed` is called when an adapter was loaded, removed or failed to load.
    """

    def __init__(
        self,
        find: Callable[[str], Copy],
        claim: Claim,
        tasks: Tasks,
        *,
        clock: Callable[[], float],
        changed: Callable[[], None],
        limit: int = MAX_ADAPTERS,
    ) -> None:
        self._find = find
        self._claim = claim
        self._tasks = tasks
        self._clock = clock
        self._changed = changed
        self._limit = limit
        # Mutable state: adapters of models that are not resident yet, with the time they were asked
        # for.
        self._wanted: dict[tuple[str, str], float] = {}

    def load_later(self, model: str, adapter: str) -> None:
        """Loads the adapter as soon as the model is resident."""
        self._wanted[model, adapter] = self._clock()

    def load_wanted(self, resident: Resident) -> None:
        """Begins the loads that were waiting for this model."""
        since = self._clock() - WANTED_SECONDS
        wanted = {pair: at for pair, at in self._wanted.items() if at > since}
        ready = [adapter for model, adapter in wanted if model == resident.name]
        self._wanted = {pair: at for pair, at in wanted.items() if pair[0] != resident.name}
        for adapter in ready:
            self.load(resident, adapter)

    def load(self, resident: Resident, adapter: str) -> None:
        """Starts to load the adapter, unless it is loaded or loading already."""
        cache = resident.adapters
        if adapter in cache.entries or adapter in cache.loading:
            return
        cache.failed.pop(adapter, None)
        cache.loading.add(adapter)
        self._tasks.start(self._supervise(resident, adapter))

    async def _supervise(self, resident: Resident, adapter: str) -> None:
        """Supervises one load: it ends with the adapter loaded or with a failure that the heartbeat
        reports.
        """
        cache, names = resident.adapters, {"model": resident.name, "adapter": adapter}
        started = self._clock()
        try:
            size = await self._read(resident, adapter)
        except ShoalError as error:
            self._fail(resident, adapter, error)
        except Exception as error:
            log.exception(
                "an adapter could not be loaded: its load failed with an unexpected error",
                extra=fields(names),
            )
            self._fail(
                resident,
                adapter,
                ModelBroken(f"{adapter} could not be loaded: {type(error).__name__}: {error}"),
            )
        else:
            log.info(
                "adapter loaded",
                extra=fields({**names, "bytes": size, "seconds": self._clock() - started}),
            )
        finally:
            cache.loading.discard(adapter)
        self._changed()

    def _fail(self, resident: Resident, adapter: str, error: ShoalError) -> None:
        error.__traceback__ = error.__cause__ = error.__context__ = None
        resident.adapters.failed[adapter] = Failed(self._clock(), error)
        failure = {
            "model": resident.name,
            "adapter": adapter,
            "reason": error.reason,
            "error": error.message,
        }
        log.warning("an adapter could not be loaded", extra=fields(failure))

    async def _read(self, resident: Resident, adapter: str) -> int:
        model = resident.model
        if not isinstance(model, TakesAdapters):
            raise ModelBroken(f"{resident.name} takes no adapters")
        if is_own_adapter(adapter):
            self._admit_own(resident, adapter)
            return 0
        copy = await in_thread(partial(self._find, adapter))
        try:
            await self._make_room(resident)
            resident.adapters.arriving += 1
            try:
                size = await in_thread(partial(model.add_adapter, adapter, copy.directory))
                self._admit(resident, adapter, size)
            except BaseException:
                model.remove_adapter(adapter)
                raise
            finally:
                resident.adapters.arriving -= 1
                resident.adapters.changed.set()
        finally:
            copy.close()
        return size

    def _admit_own(self, resident: Resident, adapter: str) -> None:
        """Admit an adapter that is part of the model. Raise InvalidInput for one that the model
        does not have.
        """
        own = resident.model.card.own_adapters
        if adapter not in own:
            raise InvalidInput(
                f"{resident.name} has no adapter or task {adapter!r} of its own; it has {', '.join(own) or 'none'}. Other adapters "
                "are called `org/name`",
                field="adapter",
            )
        now = self._clock()
        resident.adapters.entries[adapter] = Entry(0, now, now, _release_nothing, is_own=True)

    def _admit(self, resident: Resident, adapter: str, size: int) -> None:
        if resident.leaving:
            raise NoCapacity(
                f"{resident.name} left the device while its adapter {adapter} was loaded"
            )
        release = self._claim(f"{resident.name} + {adapter}", size)
        if release is None:
            raise NoCapacity(
                f"{adapter} needs {size:,} bytes beside {resident.name}, which are not free on this worker now"
            )
        now = self._clock()
        resident.adapters.entries[adapter] = Entry(size, now, now, release)

    async def _make_room(self, resident: Resident) -> None:
        """Evicts adapters until the model has fewer than the limit. Each check and the action that
        follows from it are one step of the event loop, so concurrent loads need no lock."""
        cache = resident.adapters
        while cache.loaded + cache.arriving >= self._limit and not resident.leaving:
            victim = cache.victim(self._clock())
            if victim is not None:
                victim.leaving = True
                if victim.held_jobs == 0:
                    self._drop(resident, victim)
                    continue
            cache.changed.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(UNUSED_SECONDS):
                    await cache.changed.wait()

    def _drop(self, resident: Resident, victim: Entry) -> None:
        adapter = next(name for name, entry in resident.adapters.entries.items() if entry is victim)
        resident.adapters.forget(adapter)
        if isinstance(resident.model, TakesAdapters):
            resident.model.remove_adapter(adapter)
        log.info(
            "adapter unloaded",
            extra=fields({"model": resident.name, "adapter": adapter, "bytes": victim.bytes}),
        )
        self._changed()


def _release_nothing() -> None:
    """Release the memory of an adapter that is part of its model."""
