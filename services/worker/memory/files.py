"""The files of models and adapters: found in the worker's directories or fetched from the store,
and read as cards and sizes.

Not on the request path: `residency.py` lists models on disk, `loading.py` and `adapters.py` read
them. Everything here blocks and runs on threads.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from libs.catalog.card import Card
from libs.catalog.checkpoint.adapter import read_base_model
from libs.catalog.detect import read_card
from libs.catalog.overrides import Catalog
from libs.errors import ModelBroken, ModelNotFound, ModelUnreachable, NoCapacity, ShoalError
from libs.kinds.vision_language.card import is_merged
from libs.store import Copy, DownloadProgress, LocalCopies, ModelStore
from libs.store.digests import FileDigests, FilesChanged, FilesDigest, ListedFiles, list_files
from libs.telemetry.logs import fields
from services.worker.machine import disk
from services.worker.settings import Shelf

log = logging.getLogger(__name__)

_MAX_NAMED_FOLDERS: Final = 8
"""Maximum number of folders that an error names."""
ITEM_BYTES: Final = {"float32": 4, "bfloat16": 2, "float16": 2, "int8": 1}


@dataclass(frozen=True, slots=True)
class OnDisk:
    """A model on disk."""

    card: Card | None = None
    """None if its files are broken."""
    bytes: int = 0
    """Bytes of its weights on the device; 0 if its files are broken."""


class ModelFiles:
    """Finds models on `shelves`, then in `store`.

    Args:
        catalog: Overrides values from files.
        item_bytes: Size of a weight on the device, if `catalog` sets none, or sets int8 and the
            device lacks it (`has_int8`).
        copies: Converts torch checkpoints on shelves. Without it they are refused.
    """

    def __init__(
        self,
        shelves: tuple[Shelf, ...],
        store: ModelStore | None = None,
        catalog: Catalog | None = None,
        *,
        item_bytes: int,
        has_int8: bool = False,
        copies: LocalCopies | None = None,
    ) -> None:
        self._shelves = shelves
        self._store = store
        self._copies = copies
        self._catalog = catalog or Catalog()
        self.item_bytes = item_bytes
        # Mutable state: the bases of adapters on disk, by directory.
        self._base_names: dict[Path, str] = {}
        self._digests = FileDigests()
        self._own_bytes = {
            name: size for name, size in ITEM_BYTES.items() if name != "int8" or has_int8
        }

    @property
    def can_fetch(self) -> bool:
        """True if models can be fetched from a store."""
        return self._store is not None

    def find(self, model: str) -> Copy:
        """Return the directory of a model on a shelf. For an adapter that is served as a model,
        include its base.

        Raises ModelNotFound, or ModelBroken if such an adapter's base cannot be found.
        """
        try:
            directory = disk.find(self._shelves, model)
        except ModelNotFound:
            copy = self.readable(self._merged(model))
        else:
            return self.readable(directory)
        try:
            return self.with_base(copy, model)
        except ModelBroken:
            if self._store is None:
                raise
            raise ModelNotFound(
                f"this worker has no directory with the base of the model {model!r}", field="model"
            ) from None

    def fetch(self, model: str, on_progress: Callable[[DownloadProgress], None]) -> Copy:
        """Return the directory of a model in the store, downloading it if necessary, with its base
        as in `find`. Raises ShoalError.
        """
        if self._store is None:
            raise ModelNotFound(
                f"this worker has no store to fetch the model {model!r}", field="model"
            )
        try:
            copy = self.readable(self._merged(model), on_progress)
        except ModelNotFound:
            copy = self._from_store(self._store, model, on_progress)
        return self.with_base(copy, model, on_progress)

    def with_base(
        self, copy: Copy, model: str, on_progress: Callable[[DownloadProgress], None] | None = None
    ) -> Copy:
        """Add the base's directory to an adapter's copy, from a shelf or, with `on_progress`, from
        the store.

        Raises ModelBroken, naming a base that cannot be found, or for an adapter of a text model;
        NoCapacity as the store does.
        """
        try:
            name = read_base_model(copy.directory)
            if not name:
                return copy
            base = self._base(copy.directory, name, on_progress)
            if not is_merged(copy.directory, base.directory):
                base.close()
                raise _adapter_error(name)
            return copy.over(base)
        except (ModelNotFound, ModelBroken) as error:
            copy.close()
            raise ModelBroken(f"{model}: {error.message}") from error
        except BaseException:
            copy.close()
            raise

    def _base(
        self, directory: Path, name: str, on_progress: Callable[[DownloadProgress], None] | None
    ) -> Copy:
        found = self._on_shelf(name)
        if found is not None:
            return self.readable(found)
        if not is_merged(directory, None):
            raise _adapter_error(name)
        needed = f"an adapter of the model {name!r}, which is also needed"
        if self._store is None or on_progress is None:
            raise ModelBroken(f"{needed} but missing on this worker")
        try:
            return self._from_store(self._store, name, on_progress)
        except (ModelNotFound, ModelBroken) as error:
            raise ModelBroken(f"{needed}: {error.message}") from error

    def _on_shelf(self, model: str) -> Path | None:
        try:
            return disk.find(self._shelves, model)
        except ModelNotFound:
            return None

    def _merged(self, model: str) -> Path:
        """Return the directory of an adapter on a shelf that is served as a model. Raises
        ModelNotFound.
        """
        try:
            directory = disk.find_adapter(self._shelves, model)
            if is_merged(directory, self._on_shelf(read_base_model(directory))):
                return directory
        except (ModelNotFound, ModelBroken):
            pass
        raise ModelNotFound(f"this worker has no directory with the model {model!r}", field="model")

    def readable(
        self, directory: Path, on_progress: Callable[[DownloadProgress], None] | None = None
    ) -> Copy:
        """Return a directory outside the store, or its converted copy if its weights are torch
        checkpoints.

        Raises ModelBroken, naming a file that cannot be converted, or NoCapacity.
        """
        if self._copies is None:
            return Copy(directory)
        return self._copies.find(directory, on_progress or (lambda progress: None))

    def find_adapter(self, adapter: str) -> Copy:
        """Return the directory of an adapter on a shelf or in the store, downloading it if
        necessary. Raises ShoalError.
        """
        try:
            directory = disk.find_adapter(self._shelves, adapter)
        except ModelNotFound:
            if self._store is None:
                raise
        else:
            return self.readable(directory)
        return self._from_store(self._store, adapter, lambda progress: None, is_adapter=True)

    def can_encode(self, copy: Copy, model: str) -> bool:
        """Return whether the model has vectors; True if its card cannot be read."""
        try:
            card = read_card(copy.directory, model, self._catalog.overrides(model), copy.base)
        except Exception:  # the load reports it
            return True
        return "encode" in card.tasks

    @staticmethod
    def list_files(copy: Copy) -> tuple[ListedFiles, ...]:
        """List a model's files, and its base's for an adapter that is served as a model. Raises as
        `libs.store.digests.list_files` does.
        """
        folders = [copy.directory] if copy.base is None else [copy.directory, copy.base]
        return tuple(list_files(folder) for folder in folders)

    def hash_files(self, listed: Sequence[ListedFiles], stop: threading.Event) -> FilesDigest:
        """Return the digest of listed files. Raises as `FileDigests.hash_files` does."""
        return self._digests.hash_files(listed, stop)

    def adapter_digest(self, directory: Path) -> FilesDigest:
        """Return the digest of an adapter's files. Raises NoCapacity if they cannot be read or
        change while they are hashed.
        """
        try:
            return self._digests.hash_files([list_files(directory, is_adapter=True)])
        except (FilesChanged, OSError) as error:
            raise NoCapacity(f"the adapter's files cannot be hashed: {error}; try again") from error

    def _from_store(
        self,
        store: ModelStore,
        name: str,
        on_progress: Callable[[DownloadProgress], None],
        *,
        is_adapter: bool = False,
    ) -> Copy:
        """Return the directory of a model or adapter in the store. Raises ShoalError;
        ModelUnreachable lists the searched folders, and a published model that is not served is
        refused before it is fetched.
        """
        self._catalog.refuse_unserved(name)
        try:
            return store.get(self._catalog.pinned_id(name), on_progress, is_adapter=is_adapter)
        except ModelUnreachable as error:
            folders = [str(shelf) for shelf in self._shelves if shelf.model in ("", name)]
            shown = ", ".join([*folders[:_MAX_NAMED_FOLDERS], str(store.models)])
            raise ModelUnreachable(
                f"this worker does not have {name} on disk (searched: {shown}), and "
                f"some stores are unreachable: {error.message}. Check the name, pass the model's "
                "folder with `shoal up --model` or SHOAL_MODELS, or set a reachable store in "
                "SHOAL_STORES",
                field="adapter" if is_adapter else "model",
            ) from error

    def device_bytes(self, model: str, directory: Path, base: Path | None = None) -> int:
        """Return the bytes that the model will take on the device, from the headers of its files.
        Raises ModelBroken.
        """
        overrides = self._catalog.overrides(model)
        item_bytes = self._own_bytes.get((overrides and overrides.dtype) or "", self.item_bytes)
        return max(
            _weight_bytes(directory, base, item_bytes), (overrides and overrides.memory_bytes) or 0
        )

    def listing(self, known: Mapping[str, OnDisk]) -> dict[str, OnDisk]:
        """List every model on disk by ID. Those in `known` are not read again. A broken model has
        no card; loading it reports why.
        """
        shelves = (
            self._shelves if self._store is None else (*self._shelves, Shelf(self._store.models))
        )
        found = disk.listing(shelves)
        listed = {
            model: known[model] if model in known else self._read(model, directory)
            for model, directory in found.items()
        }
        for model, directory in disk.adapters(shelves).items():
            if model in known:
                listed[model] = known[model]
            elif model not in found and self._is_model(
                directory, base := found.get(self._base_name(directory))
            ):
                listed[model] = self._read(model, directory, base)
        return listed

    @staticmethod
    def _is_model(adapter: Path, base: Path | None) -> bool:
        try:
            return is_merged(adapter, base)
        except (ShoalError, OSError):  # the base's own files are broken
            return False

    def _base_name(self, directory: Path) -> str:
        """Return the name of an adapter's base, "" if its file is broken. Cached for repeated
        listings.
        """
        if directory not in self._base_names:
            try:
                self._base_names[directory] = read_base_model(directory)
            except (ShoalError, OSError):
                return ""
        return self._base_names[directory]

    def _read(self, model: str, directory: Path, base: Path | None = None) -> OnDisk:
        try:
            directory = directory if self._copies is None else self._copies.existing(directory)
            card = read_card(directory, model, self._catalog.overrides(model), base)
            return OnDisk(
                card,
                _weight_bytes(directory, base, self._own_bytes.get(card.dtype, self.item_bytes)),
            )
        except (ShoalError, OSError) as error:  # OSError: the store has just evicted the model
            log.warning(
                "a model on disk cannot be read",
                extra=fields({"model": model, "error": str(error)}),
            )
        except Exception:  # one bad directory must not affect the others
            log.exception("a model on disk cannot be read", extra=fields({"model": model}))
        return OnDisk()


def _weight_bytes(directory: Path, base: Path | None, item_bytes: int) -> int:
    """Include the base: the adapter's weights are in memory until they are merged."""
    return disk.weight_bytes(directory, item_bytes) + (
        0 if base is None else disk.weight_bytes(base, item_bytes)
    )


def _adapter_error(base: str) -> ModelBroken:
    return ModelBroken(
        f"is an adapter of {base!r}, which is not an image model: request that model, with this as "
        "its `adapter`"
    )
