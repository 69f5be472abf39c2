"""A resident model and its loaded adapters. Event loop only."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from libs.embedding_id import check_expected, is_expected
from libs.errors import NoCapacity, ShoalError
from libs.models import EncodeWork, Model
from libs.models.embedding_recipe import EmbeddingIdentity, VectorOptions
from services.worker.memory.images import ImageOutputs
from services.worker.scheduling.meter import Meter

REPORT_FAILURE_SECONDS: Final = 60.0
"""Time for which heartbeats report a failed load of an adapter."""

UNUSED_SECONDS: Final = 1.0
"""Time for which a newly loaded, unused adapter is protected from eviction. Otherwise two adapters
could evict each other forever (thrashing).
"""


@dataclass(slots=True, eq=False)
class LoadedAdapter:
    """A loaded LoRA adapter. Times are seconds of the worker's monotonic clock."""

    bytes: int
    loaded_at: float
    last_used: float
    release: Callable[[], None]
    """Releases its reserved memory."""
    held_jobs: int = 0
    is_used: bool = False
    leaving: bool = False
    is_own: bool = False
    """Part of the model (`Card.own_adapters`): takes no additional memory and is never evicted."""
    files: str = ""
    """SHA-256 digest of its files; empty if it is part of the model."""


@dataclass(frozen=True, slots=True)
class Failed:
    """A failed load of a model or adapter. `at` is in seconds of the monotonic clock."""

    at: float
    error: ShoalError


@dataclass(slots=True, eq=False)
class AdapterCache:
    """The adapters of one resident model."""

    entries: dict[str, LoadedAdapter] = field(default_factory=dict)
    loading: set[str] = field(default_factory=set)
    arriving: int = 0
    """Number of adapters of `loading` that have a slot and are being read from disk."""
    failed: dict[str, Failed] = field(default_factory=dict)
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when a change may let a waiting load of an adapter continue."""
    plain_used: float = 0.0
    """The time at which jobs without an adapter were last pulled."""

    @property
    def bytes(self) -> int:
        return sum(entry.bytes for entry in self.entries.values())

    @property
    def loaded(self) -> int:
        """Number of loaded adapters that are not part of the model."""
        return sum(not entry.is_own for entry in self.entries.values())

    def names(self) -> list[str]:
        """Return the names of the adapters that take new work, sorted."""
        return sorted(name for name, entry in self.entries.items() if not entry.leaving)

    def lanes(self) -> list[str]:
        """Return the adapters to pull for ("" for none), least recently used first, so that under
        load they take turns.
        """
        used = {"": self.plain_used} | {
            name: entry.last_used for name, entry in self.entries.items() if not entry.leaving
        }
        return sorted(used, key=lambda name: used[name])

    def serves(self, adapter: str) -> bool:
        """Return whether the adapter takes new work. "" is the model without an adapter."""
        entry = self.entries.get(adapter)
        return not adapter or (entry is not None and not entry.leaving)

    def hold(self, adapter: str, jobs: int, now: float) -> None:
        """Count newly pulled jobs of the adapter."""
        entry = self.entries.get(adapter)
        if entry is None:
            self.plain_used = now
        else:
            entry.held_jobs += jobs
            entry.last_used, entry.is_used = now, True

    def release(self, adapter: str) -> None:
        """Count one job of the adapter as no longer held."""
        entry = self.entries.get(adapter)
        if entry is not None:
            entry.held_jobs -= 1
            self.changed.set()

    def failures(self, now: float) -> dict[str, ShoalError]:
        """Return the failed loads of the last minute."""
        self.failed = {
            name: failed
            for name, failed in self.failed.items()
            if now - failed.at < REPORT_FAILURE_SECONDS
        }
        for failed in self.failed.values():
            if isinstance(failed.error, NoCapacity):
                # A retry before the failure is forgotten would be refused.
                failed.error.retry_after = REPORT_FAILURE_SECONDS - (now - failed.at)
        return {name: failed.error for name, failed in self.failed.items()}

    def victim(self, now: float) -> LoadedAdapter | None:
        """Choose an adapter to evict: one already leaving, else an idle one, else the least
        recently used. Return None if all are too new.
        """
        old = (
            one
            for one in self.entries.values()
            if one.is_used or now - one.loaded_at >= UNUSED_SECONDS
        )
        candidates = [one for one in old if not one.is_own]
        return min(
            candidates,
            key=lambda one: (not one.leaving, one.held_jobs > 0, one.last_used),
            default=None,
        )

    def forget(self, adapter: str) -> None:
        """Remove the adapter's entry and release its memory."""
        self.entries.pop(adapter).release()
        self.changed.set()

    def clear(self) -> None:
        """Forget all adapters, because the model leaves the device."""
        for adapter in list(self.entries):
            self.forget(adapter)


def _set() -> asyncio.Event:
    event = asyncio.Event()
    event.set()
    return event


@dataclass(slots=True, eq=False)
class Resident:
    """A model on the device. Times are seconds of the worker's monotonic clock."""

    name: str
    model: Model
    load_seconds: float
    loaded_at: float
    last_used: float
    pinned: bool = False
    leaving: bool = False
    """The model is being unloaded: it takes no new work, and leaves the device when `held_jobs` is
    0.
    """
    held_jobs: int = 0
    drained: asyncio.Event = field(default_factory=_set)
    """Set while no job is held."""
    held_tokens: float = 0.0
    """Estimated tokens of the held jobs."""
    uses: int = 0
    """Jobs since it became resident."""
    floor: float = 0.0
    """GDSF's ageing term: the highest value of any model that was evicted before this one's last
    use.
    """
    activation_bytes_per_token: float = 0.0
    graph_bytes: int = 0
    """Bytes of its CUDA graphs, a part of its claim on the device."""
    turn: float = 0.0
    """The model's virtual time in the batcher, in seconds of device time received. The model with
    the lowest virtual time is next.
    """
    meter: Meter = field(default_factory=Meter)
    adapters: AdapterCache = field(default_factory=AdapterCache)
    images: ImageOutputs | None = None
    """Cached outputs of its images; None if the cache is off."""
    identity: EmbeddingIdentity | None = None
    """Makes the ids of its vectors; None if its files were not hashed."""

    def embedding_id(self, work: EncodeWork, expected: str) -> str:
        """Return the id of the vectors of a job. Raises EmbeddingIdMismatch if `expected` is set
        and
        differs. Any thread may call this while a job of the adapter is held.
        """
        if self.identity is None:
            reason = (
                "the worker that answered could not hash the model's files, or not in time; its "
                "log has the error"
            )
            check_expected(expected, "", reason)
            return ""
        options = VectorOptions.from_work(work)
        entry = self.adapters.entries.get(work.adapter)
        found = self.identity.compute_id(options, "" if entry is None else entry.files)
        if not is_expected(expected, found):
            loaded = list(self.adapters.entries.items())
            self.identity.check(options, expected, {name: one.files for name, one in loaded})
        return found
