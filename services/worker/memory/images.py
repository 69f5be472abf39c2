"""Outputs of images that were computed before: within a claim of the worker's memory that grows
only into what is free.

Used by `space.py`, which gives the memory back before it evicts a model. Preparing threads look
outputs up, the device thread looks and adds, the event loop alone changes the claim. Least recently
used outputs are evicted first.
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
from libs.models.output_cache import CachedOutput, FindOutput
from libs.telemetry import metrics
from services.worker.memory.budget import Claim, Ledger, Size

_NAME: Final = "outputs of images"

_ENTRY_BYTES: Final = 512
"""Of an entry beside its numbers: key, array, and its place in the dictionary."""

_ASK_AGAIN_SECONDS: Final = 1.0
"""How often more memory is asked for while there is too little."""


@runtime_checkable
class RecallsImages(Protocol):
    """A model that may look outputs up before it decodes."""

    def use_output_cache(self, find: FindOutput | None) -> bool: ...


class ImageOutputs:
    """The outputs of one model. Any thread."""

    def __init__(self, cache: ImageCache, model: str) -> None:
        self._cache, self._model = cache, model

    def find(self, key: bytes) -> CachedOutput | None:
        """What was kept by that key."""
        return self._cache.find(self._model, key)

    def keep(self, key: bytes, output: Output, tokens: int) -> None:
        """Keeps a copy, if there is room. `tokens`: of the sequence."""
        self._cache.keep(self._model, key, output, tokens)


class ImageCache:
    """Of all models of a worker. `limit_bytes` 0: nothing is kept. `may_grow`: whether free memory
    may be taken now.

    `clock` is monotonic (seconds).
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
        self._claim: Claim | None = None
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
        """What it has claimed, which is given back when somebody needs it."""
        return self._granted

    @property
    def used_bytes(self) -> int:
        return self._used

    # Of the event loop

    def serve(self, name: str, model: Model) -> ImageOutputs | None:
        """A model has become resident: from now on it looks here. None: it has no such outputs, or
        none are kept.
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
        """The model leaves the device, and its outputs with it."""
        if isinstance(model, RecallsImages):
            model.use_output_cache(None)
        self._models.discard(name)
        with self._lock:
            for key in [key for key in self._entries if key[0] == name]:
                self._drop(key)
        if not self._models:
            self.give_back(self._granted)

    def give_back(self, needed: int) -> bool:
        """Gives back so much of the claim, or all of it; outputs that do not fit any more are
        dropped. Whether it had any.
        """
        if needed <= 0 or self._claim is None:
            return False
        with self._lock:
            self._granted = max(0, self._granted - needed)
            self._shrink(self._granted)
            self._asked_at = self._clock()
        if self._granted:
            self._ledger.resize(self._claim, Size(self._granted))
        else:
            self._ledger.release(self._claim)
            self._claim = None
        return True

    def _ask(self) -> None:
        """Takes what is free, up to the limit."""
        self._asked_at = self._clock()
        more = min(self._limit - self._granted, self._ledger.free_bytes)
        if more <= 0 or not self._models or not self._may_grow():
            return
        size = Size(self._granted + more)
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
        """Evicts until at most so many bytes are used."""
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
    """Without the batch of which it is a view, and so that nobody changes it."""
    if isinstance(output, tuple):
        return tuple(map(_copied, output))
    if isinstance(output, SparseRow):
        return SparseRow(output.indices.copy(), output.values.copy())
    if isinstance(output, GeneratedIds):
        return output
    copied = np.array(output)
    copied.flags.writeable = False
    return copied
