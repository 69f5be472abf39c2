"""Files that are read again when they change, such as certificates, tenants and pools, so that nothing has to restart for them."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Generic, TypeVar

from libs.errors import InvalidInput
from libs.telemetry.logs import fields

log = logging.getLogger(__name__)

Content = TypeVar("Content")
Stamp = tuple[int, int, int, int]


class Watched(Generic[Content]):
    """What `read` makes of files, and of what lies in folders. Safe in threads: `content` is replaced as a whole.

    Raises what `read` raises the first time (InvalidInput). Later a change that cannot be read is a warning, once, and the content
    stays: a certificate is often newer than its key for a moment, and a half-written file must lock nobody out.
    """

    def __init__(self, paths: Sequence[Path], read: Callable[[], Content]) -> None:
        self._paths = tuple(paths)
        self._read = read
        self._lock = threading.Lock()
        # The state: what was read, what the files looked like just before, and what they look like if they cannot be read.
        self._stamps = self._look_at_files()
        self.content = read()
        self._broken: tuple[Stamp | None, ...] | None = None

    @staticmethod
    def fixed(content: Content) -> Watched[Content]:
        """Without files: this, for ever."""
        return Watched((), lambda: content)

    def look(self) -> bool:
        """Reads the files if they have changed; whether the content is new. Blocking."""
        with self._lock:
            stamps = self._look_at_files()
            if stamps == self._stamps:
                return False
            try:
                self.content = self._read()
            except InvalidInput as error:
                if stamps != self._broken:
                    log.warning("changed files are not usable; what was read before holds", extra=fields({"reason": error.message}))
                self._broken = stamps
                return False
            self._stamps = stamps
            log.info("changed files were read", extra=fields({"files": ", ".join(map(str, self._paths))}))
            return True

    def _look_at_files(self) -> tuple[Stamp | None, ...]:
        return tuple(_stamp(found) for path in self._paths for found in (path, *_within(path)))


def _within(path: Path) -> list[Path]:
    """What a folder holds; nothing of a file."""
    return sorted(path.iterdir()) if path.is_dir() else []


def _stamp(path: Path) -> Stamp | None:
    """Differs after every change; None: no such file. Follows links: Kubernetes replaces mounted secrets by turning one."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_mtime_ns, found.st_ctime_ns, found.st_size, found.st_ino
