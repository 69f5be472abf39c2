"""The LoRA adapters of resident models: loaded when a router asks, limited in number, idle ones
evicted first.

Not on the request path: `residency.py` passes on the adapters that routers offer and reports the
loaded ones, which `puller.py` pulls for. Event loop only; files are read in threads. Like models,
adapters are evicted in two steps, so that no job in flight is lost: an adapter first stops taking
new work and is removed after its last job.
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
from libs.store.digests import FilesDigest
from libs.telemetry.logs import fields
from services.worker.machine.tasks import Tasks
from services.worker.machine.threads import in_thread
from services.worker.memory.resident import UNUSED_SECONDS, Failed, LoadedAdapter, Resident

log = logging.getLogger(__name__)

MAX_ADAPTERS: Final = 32

WANTED_SECONDS: Final = 60.0
"""Time for which a request for an adapter is remembered while its model is loading."""


@runtime_checkable
class TakesAdapters(Protocol):
    """A model that accepts adapters while it serves. Both methods block and may be called on any
    thread.
    """

    def add_adapter(self, name: str, directory: Path) -> int:
        """Add an adapter and return its bytes on the device. Raises ShoalError."""

    def remove_adapter(self, name: str) -> None: ...


Claim = Callable[[str, int], Callable[[], None] | None]
"""Reserves bytes of device memory under a name. Returns a function that releases them, or None if
they are not free.
"""


class AdapterLoader:
    """Loads adapters into resident models.

    Args:
        find: Returns an adapter's directory, which it fetches if necessary. Blocking.
        digest: Returns the digest of an adapter's files. Blocking.
        claim: Reserves device memory.
        changed: Called when an adapter was loaded, removed or failed to load.
        limit: Maximum adapters per model.
    """

    def __init__(
        self,
        find: Callable[[str], Copy],
        digest: Callable[[Path], FilesDigest],
        claim: Claim,
        tasks: Tasks,
        *,
        clock: Callable[[], float],
        changed: Callable[[], None],
        limit: int = MAX_ADAPTERS,
    ) -> None:
        self._find = find
        self._digest = digest
        self._claim = claim
        self._tasks = tasks
        self._clock = clock
        self._changed = changed
        self._limit = limit
        # Mutable state: adapters of models that are not resident yet, with their request times.
        self._wanted: dict[tuple[str, str], float] = {}

    def load_later(self, model: str, adapter: str) -> None:
        """Load the adapter as soon as the model is resident."""
        self._wanted[model, adapter] = self._clock()

    def load_wanted(self, resident: Resident) -> None:
        """Begin the loads that were waiting for this model."""
        since = self._clock() - WANTED_SECONDS
        wanted = {pair: at for pair, at in self._wanted.items() if at > since}
        ready = [adapter for model, adapter in wanted if model == resident.name]
        self._wanted = {pair: at for pair, at in wanted.items() if pair[0] != resident.name}
        for adapter in ready:
            self.load(resident, adapter)

    def load(self, resident: Resident, adapter: str) -> None:
        """Start loading the adapter, unless it is loaded or loading."""
        cache = resident.adapters
        if adapter in cache.entries or adapter in cache.loading:
            return
        cache.failed.pop(adapter, None)
        cache.loading.add(adapter)
        self._tasks.start(self._supervise(resident, adapter))

    async def _supervise(self, resident: Resident, adapter: str) -> None:
        """Supervise a load, which ends with the adapter loaded or a failure that heartbeats
        report.
        """
        cache, names = resident.adapters, {"model": resident.name, "adapter": adapter}
        started = self._clock()
        try:
            size = await self._read(resident, adapter)
        except ShoalError as error:
            self._fail(resident, adapter, error)
        except Exception as error:
            log.exception(
                "an adapter load failed unexpectedly",
                extra=fields(names),
            )
            self._fail(
                resident,
                adapter,
                ModelBroken(f"{adapter} failed to load: {type(error).__name__}: {error}"),
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
            raise ModelBroken(f"{resident.name} does not support adapters")
        if is_own_adapter(adapter):
            self._admit_own(resident, adapter)
            return 0
        copy = await in_thread(partial(self._find, adapter))
        try:
            await self._evict_to_limit(resident)
            resident.adapters.arriving += 1
            try:
                digest = await in_thread(partial(self._digest, copy.directory))
                size = await in_thread(partial(model.add_adapter, adapter, copy.directory))
                if not await in_thread(digest.is_current):
                    raise NoCapacity(f"the files of {adapter} changed while it was loaded")
                self._admit(resident, adapter, size, digest.hex)
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
        """Admit an adapter that is part of the model. Raise InvalidInput for an unknown one."""
        own = resident.model.card.own_adapters
        if adapter not in own:
            raise InvalidInput(
                f"{resident.name} has no built-in adapter or task {adapter!r}; it has "
                f"{', '.join(own) or 'none'}. Other adapters are named `org/name`",
                field="adapter",
            )
        now = self._clock()
        resident.adapters.entries[adapter] = LoadedAdapter(
            0, now, now, _release_nothing, is_own=True
        )

    def _admit(self, resident: Resident, adapter: str, size: int, files: str) -> None:
        if resident.leaving:
            raise NoCapacity(f"{resident.name} was evicted while its adapter {adapter} was loading")
        release = self._claim(f"{resident.name} + {adapter}", size)
        if release is None:
            raise NoCapacity(
                f"{adapter} needs {size:,} bytes in addition to {resident.name}, "
                "which are not free on this worker"
            )
        now = self._clock()
        resident.adapters.entries[adapter] = LoadedAdapter(size, now, now, release, files=files)

    async def _evict_to_limit(self, resident: Resident) -> None:
        """Evict adapters until the model has fewer than the limit. Each check and its action are
        one step of the event loop, so concurrent loads need no lock.
        """
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

    def _drop(self, resident: Resident, victim: LoadedAdapter) -> None:
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
