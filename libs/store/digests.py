"""The digest of a model's files: two directories with the same digest hold the same model.

Of the files that the store would fetch, whatever else lies next to them, so that a directory of an
operator and the store's copy of the same files agree. Files are hashed while the model is read;
the digest of each is remembered by the file's identity and times, so that loading a model again
costs a few calls of stat(2).
"""

from __future__ import annotations

import hashlib
import os
import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from libs.catalog.checkpoint.files import locate
from libs.errors import ModelBroken
from libs.store.local import served_files

MAX_REMEMBERED_FILES: Final = 4096

_BLOCK_BYTES: Final = 1 << 20

_Mark = tuple[int, int, int, int, int]
"""Device, inode, size, and times of the last change of content and of metadata."""


class Stopped(Exception):
    """Hashing was stopped."""


@dataclass(frozen=True, slots=True)
class FilesDigest:
    """The digest of a directory's files at one moment.

    Attributes:
        hex: SHA-256 of a line `<path> <SHA-256 of the file>` for each file, in order of paths.
        marks: The identity and times of each file when it was hashed.
    """

    hex: str
    marks: tuple[tuple[Path, _Mark], ...]

    def is_current(self) -> bool:
        """Return whether no file has changed since it was hashed."""
        try:
            return all(_mark(os.stat(path)) == mark for path, mark in self.marks)
        except OSError:
            return False


class FileDigests:
    """Digests directories, and remembers the digests of files. Thread-safe; blocks."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: OrderedDict[_Mark, str] = OrderedDict()

    def of_directory(
        self,
        directory: Path,
        *,
        is_adapter: bool = False,
        stop: threading.Event | None = None,
    ) -> FilesDigest:
        """Return the digest of a model's or, with `is_adapter`, a LoRA adapter's files.

        A file that cannot be read does not count: a load that needs it fails. Raises Stopped once
        `stop` is set.
        """
        total, marks = hashlib.sha256(), []
        for name in served_files(directory, is_adapter=is_adapter):
            try:
                path = locate(directory, name)
                if path is None:
                    continue
                digest, mark = self._of_file(path, stop)
            except (ModelBroken, OSError):
                continue
            total.update(f"{name} {digest}\n".encode())
            marks.append((path, mark))
        return FilesDigest(total.hexdigest(), tuple(marks))

    def _of_file(self, path: Path, stop: threading.Event | None) -> tuple[str, _Mark]:
        mark = _mark(os.stat(path))
        with self._lock:
            known = self._known.get(mark)
        digest = self._hash(path, stop) if known is None else known
        with self._lock:
            self._known[mark] = digest
            self._known.move_to_end(mark)
            while len(self._known) > MAX_REMEMBERED_FILES:
                self._known.popitem(last=False)
        return digest, mark

    @staticmethod
    def _hash(path: Path, stop: threading.Event | None) -> str:
        total = hashlib.sha256()
        with path.open("rb") as file:
            while block := file.read(_BLOCK_BYTES):
                if stop is not None and stop.is_set():
                    raise Stopped
                total.update(block)
        return total.hexdigest()


def joined(digests: Sequence[FilesDigest]) -> FilesDigest:
    """Return the digest of several directories, such as an adapter's and its base model's."""
    if len(digests) == 1:
        return digests[0]
    lines = "".join(f"{each.hex}\n" for each in digests)
    marks = tuple(mark for each in digests for mark in each.marks)
    return FilesDigest(hashlib.sha256(lines.encode()).hexdigest(), marks)


def _mark(found: os.stat_result) -> _Mark:
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns
