"""The store's copies of models on this node's disk, shared by all its processes.

    <root>/models/<org>/<name>[@revision]/   complete models, and nothing else; `.shoal.json` records the fetched files and their source
    <root>/models/.converted/<name>-<key>/   converted copies of directories outside the store (`local.py`)
    <root>/incoming/<org>/<name>[@revision]/ a download in progress, or left by a process that died: `listing.json`, `files/`,
                                             and `record.json` once its torch checkpoints are converted
    <root>/locks/                            one file per model: locked shared by users, exclusive to fetch or remove the model
    <root>/trash/                            copies that are being removed

A model enters and leaves `models/` by one atomic rename. Locks are flock(2): they end with their
process, however it ends.
"""  # noqa: E501

from __future__ import annotations

import fcntl
import json
import os
import shutil
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath
from typing import Final

from libs.conversion import ConversionStep
from libs.conversion.plan import is_torch
from libs.errors import ModelBroken, NoCapacity
from libs.store.download import done_bytes
from libs.store.source import DownloadProgress, Remote, RemoteFile

RECORD: Final = ".shoal.json"
_LISTING: Final = "listing.json"
_RECORD: Final = "record.json"
_BUDGET_LOCK: Final = "budget.lock"
_LOCK_POLL_SECONDS: Final = 0.1
"""Interval at which a process that waits for the work of another one polls."""


@dataclass(frozen=True, slots=True)
class Listing:
    """The identity of a download: all that decides whether bytes on the disk are the wanted
    ones.
    """

    origin: str
    revision: str
    files: tuple[RemoteFile, ...]

    @staticmethod
    def from_remote(remote: Remote, files: Sequence[RemoteFile]) -> Listing:
        return Listing(remote.origin, remote.revision, tuple(files))

    @property
    def bytes(self) -> int:
        """The most that the files take on the disk. A torch checkpoint and its conversion are there
        at the same time.
        """
        return sum(file.size * (2 if is_torch(file.path) else 1) for file in self.files)

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self), indent=1), encoding="utf-8")

    @staticmethod
    def read(path: Path) -> Listing | None:
        """Return the listing in a file; None if there is none, or if a crash cut it short."""
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
            files = tuple(RemoteFile(**file) for file in found["files"])
            return Listing(found["origin"], found["revision"], files)
        except (OSError, ValueError, LookupError, TypeError):
            return None


class Lock:
    """A non-blocking flock(2) on a file. Two Locks exclude each other in one process as well."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)

    def try_shared(self) -> bool:
        return self._try(fcntl.LOCK_SH)

    def try_exclusive(self) -> bool:
        return self._try(fcntl.LOCK_EX)

    def wait_exclusive(self, while_waiting: Callable[[], None] = lambda: None) -> None:
        """Poll until the lock is exclusive, and call `while_waiting` before each pause."""
        while not self.try_exclusive():
            while_waiting()
            time.sleep(_LOCK_POLL_SECONDS)

    def close(self) -> None:
        """Release the lock. Idempotent."""
        if self._handle >= 0:
            os.close(self._handle)
            self._handle = -1

    def _try(self, mode: int) -> bool:
        try:
            fcntl.flock(self._handle, mode | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True


class Copy:
    """A model's directory, protected from eviction until `close`. `base`: of a model that is an
    adapter of another, this other.
    """

    def __init__(self, directory: Path, lock: Lock | None = None, base: Copy | None = None) -> None:
        self.directory = directory
        self._lock = lock
        self._base = base

    def over(self, base: Copy) -> Copy:
        """Return this copy of an adapter together with its base model's copy; closing the result
        closes both.
        """
        return Copy(self.directory, self._lock, base)

    @property
    def base(self) -> Path | None:
        """The directory of the model that this one is an adapter of; None for a model of its
        own.
        """
        return None if self._base is None else self._base.directory

    def close(self) -> None:
        """Allow the eviction of the directories. Idempotent."""
        if self._lock is not None:
            self._lock.close()
        if self._base is not None:
            self._base.close()


@dataclass(frozen=True, slots=True)
class _Entry:
    """A model that counts against the disk budget: complete, or being fetched."""

    model: str
    directory: Path
    bytes: int
    last_used: float


class Cache:
    """The cache laid out as above. `root` is created if needed."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.models = root / "models"
        self._incoming = root / "incoming"
        self._locks = root / "locks"
        self._trash = root / "trash"
        for folder in (self.models, self._incoming, self._locks, self._trash):
            folder.mkdir(parents=True, exist_ok=True)

    def directory(self, model: str) -> Path | None:
        """Return the directory of a complete copy, if there is one."""
        directory = self.models / model
        return directory if (directory / RECORD).is_file() else None

    def lock(self, model: str) -> Lock:
        return Lock(self._locks / f"{model}.lock")

    def touch(self, model: str) -> None:
        """Mark the model as used now, for eviction by last use."""
        with suppress(FileNotFoundError):
            os.utime(self.models / model / RECORD)

    def progress(self, model: str) -> DownloadProgress | None:
        """Return the progress of a download of the model by any process of this node; None if there
        is none.
        """
        listing = Listing.read(self._incoming / model / _LISTING)
        if listing is None:
            return None
        total = sum(file.size for file in listing.files)
        return DownloadProgress(done_bytes(listing.files, self._incoming / model / "files"), total)

    def begin(self, model: str, listing: Listing, budget_bytes: int) -> Path:
        """Reserve disk space, evicting the least recently used models if needed. Returns the
        directory for the files; those that an earlier try left there are kept if they are of this
        listing. The caller holds the model's lock.

        Raises ModelBroken if the model is larger than the budget, NoCapacity if too much of it is
        in use, both with the numbers.
        """
        if listing.bytes > budget_bytes:
            raise ModelBroken(
                f"{model} takes {listing.bytes:,} bytes on disk; the store of this worker may keep "
                f"{budget_bytes:,} (SHOAL_STORE_BYTES)"
            )
        with self._budget_lock():
            incoming = self._incoming / model
            if Listing.read(incoming / _LISTING) != listing:
                self._remove(incoming)
                self._make_room(model, listing.bytes, budget_bytes)
                (incoming / "files").mkdir(parents=True)
                listing.write(incoming / _LISTING)
            os.utime(incoming / _LISTING)
            return incoming / "files"

    def finish_conversion(
        self, model: str, listing: Listing, steps: Sequence[ConversionStep]
    ) -> None:
        """Record the outputs of a model's conversions in place of their sources, then remove
        these. The caller holds its lock.
        """
        incoming = self._incoming / model
        root = incoming / "files"
        sources = {step.source for step in steps}
        digests = {file.path: file.digest for file in listing.files}
        files = [
            RemoteFile(path, (root / path).stat().st_size, digests.get(path, ""))
            for path in sorted(
                str(found.relative_to(root)) for found in root.rglob("*") if found.is_file()
            )
            if path not in sources and not PurePosixPath(path).name.startswith(".")
        ]
        part = incoming / f"{_RECORD}.part"
        Listing(listing.origin, listing.revision, tuple(files)).write(part)
        part.rename(incoming / _RECORD)
        _sync(incoming)
        for path in sources:
            (incoming / "files" / path).unlink(missing_ok=True)

    def is_converted(self, model: str) -> bool:
        """Return True if only `publish` is left to do for an interrupted fetch."""
        return Listing.read(self._incoming / model / _RECORD) is not None

    def publish(self, model: str) -> Path:
        """Make a completely fetched model visible. The caller holds its lock."""
        incoming, directory = self._incoming / model, self.models / model
        (incoming / (_RECORD if self.is_converted(model) else _LISTING)).rename(
            incoming / "files" / RECORD
        )
        for folder in [
            incoming / "files",
            *(path for path in (incoming / "files").rglob("*") if path.is_dir()),
        ]:
            _sync(folder)
        directory.parent.mkdir(parents=True, exist_ok=True)
        (incoming / "files").rename(directory)
        _sync(directory.parent)
        self._remove(incoming)
        self.touch(model)
        return directory

    def used_bytes(self) -> int:
        """Bytes of complete models, and the full sizes of those being fetched."""
        return sum(entry.bytes for entry in self._entries())

    def _entries(self) -> list[_Entry]:
        found = []
        for root, name in ((self.models, RECORD), (self._incoming, _LISTING)):
            for record in root.glob(f"*/*/{name}"):
                listing = Listing.read(record)
                with suppress(FileNotFoundError):
                    model = str(record.parent.relative_to(root))
                    found.append(
                        _Entry(
                            model,
                            record.parent,
                            listing.bytes if listing else 0,
                            record.stat().st_mtime,
                        )
                    )
        return found

    def _make_room(self, model: str, needed: int, budget_bytes: int) -> None:
        for old in self._trash.iterdir():
            shutil.rmtree(old, ignore_errors=True)
        entries = sorted(self._entries(), key=lambda entry: entry.last_used)
        used = sum(entry.bytes for entry in entries)
        for entry in entries:
            if used + needed <= budget_bytes:
                return
            if self._evict(entry):
                used -= entry.bytes
        if used + needed > budget_bytes:
            raise NoCapacity(
                f"{model} takes {needed:,} bytes on disk; the store of this worker may keep "
                f"{budget_bytes:,}, of which {used:,} are in use (SHOAL_STORE_BYTES)"
            )

    def _evict(self, entry: _Entry) -> bool:
        """Remove a model; False if it is in use."""
        lock = self.lock(entry.model)
        try:
            if not lock.try_exclusive():
                return False
            self._remove(entry.directory)
            return True
        finally:
            lock.close()

    def _remove(self, directory: Path) -> None:
        """Move the directory to the trash by one atomic rename, then delete it."""
        trash = self._trash / uuid.uuid4().hex
        with suppress(FileNotFoundError):
            directory.rename(trash)
            shutil.rmtree(trash, ignore_errors=True)

    @contextmanager
    def _budget_lock(self) -> Iterator[None]:
        lock = Lock(self._locks / _BUDGET_LOCK)
        try:
            lock.wait_exclusive()
            yield
        finally:
            lock.close()


def _sync(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
