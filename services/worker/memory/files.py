"""The files of models and adapters: found in the worker's directories, else fetched from the store; read as cards and sizes.

Not on the request path: `residency.py` lists what is on disk, `loading.py` and `adapters.py` read it. Everything here blocks and is
called on threads.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from libs.catalog import read_card
from libs.catalog.card import Card
from libs.catalog.overrides import Catalog
from libs.errors import ModelNotFound, ShoalError
from libs.store import Copy, Progress, Store
from libs.telemetry.logs import fields
from services.worker.machine import disk

log = logging.getLogger(__name__)

ITEM_BYTES: Final = {"float32": 4, "bfloat16": 2, "float16": 2, "int8": 1}


@dataclass(frozen=True, slots=True)
class OnDisk:
    """A model on disk: its card, and the bytes that its weights would take on the device. None and 0 if its files are broken."""

    card: Card | None = None
    bytes: int = 0


class ModelFiles:
    """`shelves` are searched first, then `store`, if there is one. `catalog` overrides what files say. `item_bytes`: size of a
    weight on the device where `catalog` sets none, or sets int8 and the device is without it (`has_int8`)."""

    def __init__(
        self,
        shelves: tuple[disk.Shelf, ...],
        store: Store | None = None,
        catalog: Catalog | None = None,
        *,
        item_bytes: int,
        has_int8: bool = False,
    ) -> None:
        self._shelves = shelves
        self._store = store
        self._catalog = catalog or Catalog()
        self.item_bytes = item_bytes
        self._own_bytes = {name: size for name, size in ITEM_BYTES.items() if name != "int8" or has_int8}

    @property
    def can_fetch(self) -> bool:
        """Whether there is a store to fetch from."""
        return self._store is not None

    def find(self, model: str) -> Copy:
        """The directory of a model on a shelf. Raises ModelNotFound."""
        return Copy(disk.find(self._shelves, model))

    def fetch(self, model: str, on_progress: Callable[[Progress], None]) -> Copy:
        """The directory of a model in the store, which downloads it if need be. Raises ShoalError."""
        if self._store is None:
            raise ModelNotFound(f"this worker has no store to fetch the model {model!r} from", field="model")
        return self._store.get(self._catalog.pinned_id(model), on_progress)

    def find_adapter(self, adapter: str) -> Copy:
        """The directory of an adapter: on a shelf, else in the store, which downloads it if need be. Raises ShoalError."""
        try:
            return Copy(disk.find_adapter(self._shelves, adapter))
        except ModelNotFound:
            if self._store is None:
                raise
        return self._store.get(self._catalog.pinned_id(adapter), lambda progress: None, is_adapter=True)

    def device_bytes(self, model: str, directory: Path) -> int:
        """Bytes that the model will take on the device, by the headers of its files. Raises ModelBroken."""
        overrides = self._catalog.of(model)
        item_bytes = self._own_bytes.get((overrides and overrides.dtype) or "", self.item_bytes)
        return max(disk.weight_bytes(directory, item_bytes), (overrides and overrides.memory_bytes) or 0)

    def listing(self, known: Mapping[str, OnDisk]) -> dict[str, OnDisk]:
        """Every model on disk, by id; those in `known` are not read again. A broken one is listed without a card: the reason is
        reported when it is loaded."""
        shelves = self._shelves if self._store is None else (*self._shelves, disk.Shelf(self._store.models))
        found = disk.listing(shelves)
        return {model: known[model] if model in known else self._read(model, directory) for model, directory in found.items()}

    def _read(self, model: str, directory: Path) -> OnDisk:
        try:
            card = read_card(directory, model, self._catalog.of(model))
            return OnDisk(card, disk.weight_bytes(directory, self._own_bytes.get(card.dtype, self.item_bytes)))
        except (ShoalError, OSError) as error:  # OSError: the store has just evicted it
            log.warning("a model on disk cannot be read", extra=fields({"model": model, "error": str(error)}))
        except Exception:  # whatever one directory holds, the others are served
            log.exception("a model on disk cannot be read", extra=fields({"model": model}))
        return OnDisk()
