"""Files that are read again when they change, such as certificates, tenants and pools, so that nothing has to restart for them."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, Generic, TypeVar

from libs.errors import InvalidInput
from libs.telemetry.logs import fields

log = logging.getLogger(__name__)

Content = TypeVar("Content")
Stamp = tuple[int, int, int, int]
Stamps = tuple[Stamp | None, ...]

SETTLE_SECONDS: Final = 0.5
"""So long changed files must have been left alone: who writes one slowly would have its beginning read, without the last tokens."""


class Watched(Generic[Content]):
    """What `read` makes of files, and of what lies in folders. Safe in threads: `content` is replaced as a whole.

    Raises what `read` raises the first time (InvalidInput). Later files are read once they have been left alone for SETTLE_SECONDS;
    a change that cannot be read, and a file that is gone, is a warning, once, and the content stays: a certificate is often newer
    than its key for a moment, and a half-written file must lock nobody out. `clock`: Unix seconds, as files' times are.
    """

    def __init__(self, paths: Sequence[Path], read: Callable[[], Content], *, clock: Callable[[], float] = time.time) -> None:
        self._paths = tuple(paths)
        self._read = read
        self._clock = clock
        self._lock = threading.Lock()
        # The state: what was read, what the files looked like just before, and what they look like if they cannot be read.
        self._stamps = self._look_at_files()
        self.content = read()
        self._broken: Stamps | None = None
        # How they look since when, if not as they were read.
        self._changed: tuple[Stamps, float] = (self._stamps, 0.0)

    @staticmethod
    def fixed(content: Content) -> Watched[Content]:
        """Without files: this, for ever."""
        return Watched((), lambda: content)

    def look(self) -> bool:
        """Reads the files if they have changed; whether the content is new. Blocking."""
        with self._lock:
            stamps = self._look_at_files()
            if stamps == self._stamps or not self._is_settled(stamps):
                return False
            try:
                content = self._read()
            except InvalidInput as error:
                if stamps != self._broken:
                    log.warning("changed files are not usable; what was read before holds", extra=fields({"reason": error.message}))
                self._broken = stamps
                return False
            if self._look_at_files() != stamps:  # changed while it was read
                return False
            self.content, self._stamps = content, stamps
            log.info("changed files were read", extra=fields({"files": ", ".join(map(str, self._paths))}))
            return True

    def _is_settled(self, stamps: Stamps) -> bool:
        """By the files' own times, or, should their clock be ahead of ours, by how long we have seen them so."""
        now = self._clock()
        if stamps != self._changed[0]:
            self._changed = stamps, now
        touched = max((stamp[1] / 1e9 for stamp in stamps if stamp is not None), default=0.0)
        return now - min(touched, self._changed[1]) >= SETTLE_SECONDS

    def _look_at_files(self) -> Stamps:
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
