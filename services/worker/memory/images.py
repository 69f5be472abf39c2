"""A cache of image outputs, in a claim of the worker's memory that grows only into free memory.

Used by `space.py`, which takes the memory back before it evicts a model. Preparing threads look
outputs up, the device thread looks up and adds, and only the event loop changes the claim. Evicts
least recently used outputs first.
"""

from __future__ import annotations

import asyncio
import threading
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from typing import Final, Protocol, runtime_checkable

import numpy as np

from libs.models import GeneratedIds, Model, Output, SparseRow
from libs.models.interface.output_cache import CachedOutput, FindOutput
from libs.telemetry import metrics
from services.worker.memory.budget import Ledger, LedgerClaim, ModelSize

_NAME: Final = "outputs of images"

_ENTRY_BYTES: Final = 512
"""Size of an entry without its numbers: key, array, and dictionary slot."""

_ASK_AGAIN_SECONDS: Final = 1.0
"""Interval at which more memory is requested while there is too little."""


@runtime_checkable
class RecallsImages(Protocol):
    """A model that can look up outputs before it decodes an image."""

    def use_output_cache(self, find: FindOutput | None) -> bool: ...


class ImageOutputs:
    """The cached outputs of one model. Any thread."""

    def __init__(self, cache: ImageCache, model: str) -> None:
        self._cache, self._model = cache, model

    def find(self, key: bytes) -> CachedOutput | None:
        """Return the output cached under the key, if any."""
        return self._cache.find(self._model, key)

    def keep(self, key: bytes, output: Output, tokens: int) -> None:
        """Cache a copy if it fits. `tokens` is the length of the sequence."""
        self._cache.keep(self._model, key, output, tokens)


class ImageCache:
    """The cache for all models of a worker.

    Args:
        limit_bytes: Maximum size; 0 disables the cache.
        may_grow: Returns whether free memory may be taken now.
        clock: Monotonic seconds.
    """

    def __init__(
        self,
        ledger: Ledger,
        limit_bytes: int,
        *,
        may_grow: Callable[[], bool],
        clock: Callable[[], float],
    ) -> None:
        self._ledger = ledger
        self._limit = limit_bytes
        self._may_grow = may_grow
        self._clock = clock
        self._loop = asyncio.get_running_loop()
        # Mutable state of the event loop: the claim, and the models that are served.
        self._claim: LedgerClaim | None = None
        self._models: set[str] = set()
        # Mutable state that the lock guards. `_granted`: bytes of the claim.
        self._lock = threading.Lock()
        self._entries: OrderedDict[tuple[str, bytes], CachedOutput] = OrderedDict()
        self._used = 0
        self._granted = 0
        self._asked_at = -_ASK_AGAIN_SECONDS
        for event in ("hit", "shared", "miss", "evicted"):
            metrics.IMAGE_CACHE_EVENTS.labels(event)

    @property
    def granted_bytes(self) -> int:
        """Claimed bytes, which are given back on request."""
        return self._granted

    @property
    def used_bytes(self) -> int:
        return self._used

    # Of the event loop

    def serve(self, name: str, model: Model) -> ImageOutputs | None:
        """Let a resident model use the cache. Return None if it has no image outputs or the cache
        is off.
        """
        if (
            not self._limit
            or not isinstance(model, RecallsImages)
            or not model.use_output_cache(partial(self.find, name))
        ):
            return None
        self._models.add(name)
        self._ask()
        return ImageOutputs(self, name)

    def forget(self, name: str, model: Model) -> None:
        """Remove the outputs of a model that leaves the device."""
        if isinstance(model, RecallsImages):
            model.use_output_cache(None)
        self._models.discard(name)
        with self._lock:
            for key in [key for key in self._entries if key[0] == name]:
                self._drop(key)
        if not self._models:
            self.give_back(self._granted)

    def give_back(self, needed: int) -> bool:
        """Give back `needed` bytes of the claim, or all of it, dropping outputs that no longer fit.
        Return whether there was a claim.
        """
        if needed <= 0 or self._claim is None:
            return False
        with self._lock:
            self._granted = max(0, self._granted - needed)
            self._shrink(self._granted)
            self._asked_at = self._clock()
        if self._granted:
            self._ledger.resize(self._claim, ModelSize(self._granted))
        else:
            self._ledger.release(self._claim)
            self._claim = None
        return True

    def _ask(self) -> None:
        """Claim free memory, up to the limit."""
        self._asked_at = self._clock()
        more = min(self._limit - self._granted, self._ledger.free_bytes)
        if more <= 0 or not self._models or not self._may_grow():
            return
        size = ModelSize(self._granted + more)
        if self._claim is None:
            self._claim = self._ledger.claim(_NAME, size)
        elif not self._ledger.resize(self._claim, size):
            return
        with self._lock:
            self._granted = 0 if self._claim is None else size.bytes

    # Of any thread

    def find(self, model: str, key: bytes) -> CachedOutput | None:
        with self._lock:
            kept = self._entries.get((model, key))
            if kept is not None:
                self._entries.move_to_end((model, key))
            return kept

    def keep(self, model: str, key: bytes, output: Output, tokens: int) -> None:
        size = _bytes(output) + _ENTRY_BYTES
        if size > self._limit:
            return
        with self._lock:
            if self._used + size > self._granted:
                self._ask_soon()
            if size > self._granted or (model, key) in self._entries:
                return
            self._shrink(self._granted - size)
            self._entries[model, key] = CachedOutput(_copied(output), tokens)
            self._used += size

    def _ask_soon(self) -> None:
        if (
            self._granted < self._limit
            and self._clock() - self._asked_at >= _ASK_AGAIN_SECONDS
            and not self._loop.is_closed()
        ):
            self._asked_at = self._clock()
            self._loop.call_soon_threadsafe(self._ask)

    def _shrink(self, most: int) -> None:
        """Evict until at most `most` bytes are used."""
        while self._entries and self._used > most:
            self._drop(next(iter(self._entries)))
            metrics.IMAGE_CACHE_EVENTS.labels("evicted").inc()

    def _drop(self, key: tuple[str, bytes]) -> None:
        self._used -= _bytes(self._entries.pop(key).output) + _ENTRY_BYTES


def _bytes(output: Output) -> int:
    if isinstance(output, tuple):
        return sum(map(_bytes, output))
    if isinstance(output, SparseRow):
        return output.indices.nbytes + output.values.nbytes
    return output.ids.nbytes if isinstance(output, GeneratedIds) else output.nbytes


def _copied(output: Output) -> Output:
    """Copy an output: detach it from its batch's array, and make it read-only."""
    if isinstance(output, tuple):
        return tuple(map(_copied, output))
    if isinstance(output, SparseRow):
        return SparseRow(output.indices.copy(), output.values.copy())
    if isinstance(output, GeneratedIds):
        return output
    copied = np.array(output)
    copied.flags.writeable = False
    return copied
