"""The digest of a model's files: two directories with the same digest hold the same model.

It covers the files that the store would fetch and a loader may read, whatever else lies next to
them, so that a directory of an operator and the store's copy of the same files agree. Files are
listed before the model is read, hashed while it is read, and compared with the list afterwards. The
digest of each is remembered by the file's identity and times, so that loading a model again costs a
few calls of stat(2).
"""

from __future__ import annotations

import hashlib
import os
import threading
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from libs.catalog.checkpoint.files import locate
from libs.errors import ModelBroken, ShoalError
from libs.store.local import served_files

MAX_REMEMBERED_FILES: Final = 4096

MAX_HASHING_THREADS: Final = 4
LARGE_FILE_BYTES: Final = 16 << 20
"""Files from this size on are hashed on several threads: hashlib releases the GIL."""

_READ_BYTES: Final = 1 << 20

_Mark = tuple[int, int, int, int, int]
"""Device, inode, size, and times of the last change of content and of metadata."""


class HashingStopped(Exception):
    """Hashing was stopped."""


class FilesChanged(Exception):
    """Files were added or replaced since they were listed."""


@dataclass(frozen=True, slots=True)
class ListedFiles:
    """The files of a directory that its digest covers, at one moment.

    Attributes:
        is_adapter: Only the two files of a LoRA adapter count.
        files: The path in the directory, the path on disk, and the identity and times of each file.
    """

    directory: Path
    is_adapter: bool
    files: tuple[tuple[str, Path, _Mark], ...]

    def check_current(self) -> None:
        """Raise FilesChanged if files were added or replaced since, OSError if one vanished or
        cannot be listed.
        """
        now = list_files(self.directory, is_adapter=self.is_adapter)
        for name in sorted({name for name, *_ in self.files} - {name for name, *_ in now.files}):
            raise FileNotFoundError(f"{name} vanished from {self.directory}")
        if now != self:
            raise FilesChanged(f"the files in {self.directory} changed")


def list_files(directory: Path, *, is_adapter: bool = False) -> ListedFiles:
    """List a model's or, with `is_adapter`, a LoRA adapter's files. Blocks.

    Links out of the directory do not count: no loader follows them. Raises OSError, and ModelBroken
    as `served_files` does.
    """
    files = []
    for name in served_files(directory, is_adapter=is_adapter):
        try:
            path = locate(directory, name)
        except ModelBroken:
            continue
        if path is None:
            raise FileNotFoundError(f"{name} vanished from {directory}")
        files.append((name, path, _mark(os.stat(path))))
    return ListedFiles(directory, is_adapter, tuple(files))


@dataclass(frozen=True, slots=True)
class FilesDigest:
    """The digest of the files of one or several directories, such as an adapter's and its base
    model's.

    Attributes:
        hex: SHA-256 of a line `<path> <SHA-256 of the file>` for each file, in order of paths; of
            several directories that of a line with the digest of each.
    """

    hex: str
    listed: tuple[ListedFiles, ...]

    def check_current(self) -> None:
        """Raise as `ListedFiles.check_current` does."""
        for each in self.listed:
            each.check_current()

    def is_current(self) -> bool:
        """Return whether no file has changed since it was listed."""
        try:
            self.check_current()
        except (FilesChanged, OSError, ShoalError):
            return False
        return True


class FileDigests:
    """Digests listed files, and remembers the digests of files. Thread-safe; blocks."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: OrderedDict[_Mark, str] = OrderedDict()

    def hash_files(
        self, listed: Sequence[ListedFiles], stop: threading.Event | None = None
    ) -> FilesDigest:
        """Return the digest of the listed files.

        Raises FilesChanged for a file that is not the listed one, OSError for one that cannot be
        read, HashingStopped once `stop` is set.
        """
        digests = self._hash_all([one for each in listed for one in each.files], stop)
        found = [
            _digest_of_lines(f"{name} {next(digests)}" for name, *_ in each.files)
            for each in listed
        ]
        return FilesDigest(found[0] if len(found) == 1 else _digest_of_lines(found), tuple(listed))

    def _hash_all(
        self, files: Sequence[tuple[str, Path, _Mark]], stop: threading.Event | None
    ) -> Iterator[str]:
        """Return the digests of files, in order. Large ones are hashed on several threads."""
        found: dict[Path, str] = {}
        errors: list[BaseException] = []
        pending = iter(list(files))
        lock = threading.Lock()

        def work() -> None:
            while not errors:
                with lock:
                    file = next(pending, None)
                if file is None:
                    return
                _, path, mark = file
                try:
                    found[path] = self._hash_once(path, mark, stop)
                except BaseException as error:
                    errors.append(error)

        large = sum(mark[2] >= LARGE_FILE_BYTES for _, _, mark in files)
        count = min(MAX_HASHING_THREADS, os.cpu_count() or 1, large) - 1
        threads = [threading.Thread(target=work, name="hash", daemon=True) for _ in range(count)]
        for thread in threads:
            thread.start()
        work()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]
        return iter([found[path] for _, path, _ in files])

    def _hash_once(self, path: Path, mark: _Mark, stop: threading.Event | None) -> str:
        with self._lock:
            known = self._known.get(mark)
        digest = self._hash(path, mark, stop) if known is None else known
        with self._lock:
            self._known[mark] = digest
            self._known.move_to_end(mark)
            while len(self._known) > MAX_REMEMBERED_FILES:
                self._known.popitem(last=False)
        return digest

    @staticmethod
    def _hash(path: Path, mark: _Mark, stop: threading.Event | None) -> str:
        total = hashlib.sha256()
        with path.open("rb") as file:
            if _mark(os.fstat(file.fileno())) != mark:
                raise FilesChanged(f"{path} changed before it was hashed")
            while block := file.read(_READ_BYTES):
                if stop is not None and stop.is_set():
                    raise HashingStopped
                total.update(block)
            if _mark(os.fstat(file.fileno())) != mark:
                raise FilesChanged(f"{path} changed while it was hashed")
        return total.hexdigest()


def _digest_of_lines(lines: Iterable[str]) -> str:
    return hashlib.sha256("".join(f"{line}\n" for line in lines).encode()).hexdigest()


def _mark(found: os.stat_result) -> _Mark:
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns
