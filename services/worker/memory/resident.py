"""A model on the device, and the adapters that are loaded with it. Belongs to the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from libs.errors import NoCapacity, ShoalError
from libs.models import Model
from services.worker.scheduling.meter import Meter

REPORT_FAILURE_SECONDS: Final = 60.0

UNUSED_SECONDS: Final = 1.0
"""How long an adapter that was loaded for work is kept though none has come yet: else two could take turns and serve nobody."""


@dataclass(slots=True, eq=False)
class Entry:
    """A loaded adapter. Times are seconds of the worker's rising clock. `release` gives its memory's reservation back."""

    bytes: int
    loaded_at: float
    last_used: float
    release: Callable[[], None]
    held_jobs: int = 0
    is_used: bool = False
    leaving: bool = False


@dataclass(frozen=True, slots=True)
class Failed:
    """An adapter that could not be loaded, when, and why."""

    at: float
    error: ShoalError


@dataclass(slots=True, eq=False)
class AdapterCache:
    """The adapters of one resident model."""

    entries: dict[str, Entry] = field(default_factory=dict)
    loading: set[str] = field(default_factory=set)
    arriving: int = 0
    """Of those in `loading`, how many have their place and are read."""
    failed: dict[str, Failed] = field(default_factory=dict)
    news: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when something changes that a load may wait for."""
    plain_used: float = 0.0
    """When the model served without an adapter last."""

    @property
    def bytes(self) -> int:
        return sum(entry.bytes for entry in self.entries.values())

    def names(self) -> list[str]:
        """Those that are loaded and take work, sorted."""
        return sorted(name for name, entry in self.entries.items() if not entry.leaving)

    def lanes(self) -> list[str]:
        """Adapters to pull for, none (empty) among them, the least recently served first: under load they take turns."""
        used = {"": self.plain_used} | {name: entry.last_used for name, entry in self.entries.items() if not entry.leaving}
        return sorted(used, key=lambda name: used[name])

    def serves(self, adapter: str) -> bool:
        """Whether it takes work. The empty name is the model without an adapter."""
        entry = self.entries.get(adapter)
        return not adapter or (entry is not None and not entry.leaving)

    def hold(self, adapter: str, jobs: int, now: float) -> None:
        """Jobs were taken in for it."""
        entry = self.entries.get(adapter)
        if entry is None:
            self.plain_used = now
        else:
            entry.held_jobs += jobs
            entry.last_used, entry.is_used = now, True

    def let_go(self, adapter: str) -> None:
        """One of its jobs is no longer held."""
        entry = self.entries.get(adapter)
        if entry is not None:
            entry.held_jobs -= 1
            self.news.set()

    def failures(self, now: float) -> dict[str, ShoalError]:
        """Of the last minute."""
        self.failed = {name: failed for name, failed in self.failed.items() if now - failed.at < REPORT_FAILURE_SECONDS}
        for failed in self.failed.values():
            if isinstance(failed.error, NoCapacity):  # sooner than it is forgotten, a retry would be refused
                failed.error.retry_after = REPORT_FAILURE_SECONDS - (now - failed.at)
        return {name: failed.error for name, failed in self.failed.items()}

    def victim(self, now: float) -> Entry | None:
        """Who makes room: an idle one rather than one with work, then the least recently used. None: all are too new."""
        candidates = [one for one in self.entries.values() if one.is_used or now - one.loaded_at >= UNUSED_SECONDS]
        return min(candidates, key=lambda one: (not one.leaving, one.held_jobs > 0, one.last_used), default=None)

    def forget(self, adapter: str) -> None:
        """It is no longer on the device."""
        self.entries.pop(adapter).release()
        self.news.set()

    def clear(self) -> None:
        """The model leaves the device, and takes its adapters along."""
        for adapter in list(self.entries):
            self.forget(adapter)


def _set() -> asyncio.Event:
    event = asyncio.Event()
    event.set()
    return event


@dataclass(slots=True, eq=False)
class Resident:
    """A model on the device. Times are seconds of the worker's rising clock."""

    name: str
    model: Model
    load_seconds: float
    loaded_at: float
    last_used: float
    pinned: bool = False
    leaving: bool = False
    """It is being unloaded: it takes no new work, and goes when `held_jobs` is 0."""
    held_jobs: int = 0
    drained: asyncio.Event = field(default_factory=_set)
    """Set while no job is held."""
    held_tokens: float = 0.0
    """Of the jobs held, estimated."""
    uses: int = 0
    """Jobs since it became resident."""
    floor: float = 0.0
    """The value of the model that was evicted last before it was used last (GDSF)."""
    activation_bytes_per_token: float = 0.0
    turn: float = 0.0
    """What it has had of the device, as the batcher counts it: the lower, the sooner it is next."""
    meter: Meter = field(default_factory=Meter)
    adapters: AdapterCache = field(default_factory=AdapterCache)
