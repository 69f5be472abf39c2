"""Hot reload of files when they change, such as certificates, tenants and pools, so that no process
has to restart for them.
"""

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
"""How long files must be unchanged before they are read: of a file that is still being written,
only the beginning would be read."""


class Watched(Generic[Content]):
    """The result of `read` over files, and over the entries of folders. Thread-safe: `content` is
    replaced as a whole.

    The first read raises what `read` raises (InvalidInput). Later, changed files are read once they
    were unchanged for SETTLE_SECONDS. A change that cannot be read, or a missing file, is logged as
    a warning once, and the content stays: a certificate is often newer than its key for a moment,
    and a half-written file must lock nobody out. `clock`: Unix seconds, as files' times are.
    """

    def __init__(
        self,
        paths: Sequence[Path],
        read: Callable[[], Content],
        *,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._paths = tuple(paths)
        self._read = read
        self._clock = clock
        self._lock = threading.Lock()
        # The state: the content, the files' stamps just before it was read, and the stamps of a
        # version that cannot be read.
        self._stamps = self._look_at_files()
        self.content = read()
        self._broken: Stamps | None = None
        # The last stamps seen, and since when.
        self._changed: tuple[Stamps, float] = (self._stamps, 0.0)

    @staticmethod
    def fixed(content: Content) -> Watched[Content]:
        """A constant content, without files."""
        return Watched((), lambda: content)

    def look(self) -> bool:
        """Reads the files if they have changed; returns whether the content is new. Blocking."""
        with self._lock:
            stamps = self._look_at_files()
            if stamps == self._stamps or not self._is_settled(stamps):
                return False
            try:
                content = self._read()
            except InvalidInput as error:
                if stamps != self._broken:
                    log.warning(
                        "changed files are not usable; what was read before holds",
                        extra=fields({"reason": error.message}),
                    )
                self._broken = stamps
                return False
            if self._look_at_files() != stamps:  # changed while it was read
                return False
            self.content, self._stamps = content, stamps
            log.info(
                "changed files were read", extra=fields({"files": ", ".join(map(str, self._paths))})
            )
            return True

    def _is_settled(self, stamps: Stamps) -> bool:
        """Judged by the files' own times, or, should their clock be ahead of ours, by how long
        these stamps have been seen.
        """
        now = self._clock()
        if stamps != self._changed[0]:
            self._changed = stamps, now
        touched = max((stamp[1] / 1e9 for stamp in stamps if stamp is not None), default=0.0)
        return now - min(touched, self._changed[1]) >= SETTLE_SECONDS

    def _look_at_files(self) -> Stamps:
        return tuple(_stamp(found) for path in self._paths for found in (path, *_within(path)))


def _within(path: Path) -> list[Path]:
    """The entries of a folder; none for a file."""
    return sorted(path.iterdir()) if path.is_dir() else []


def _stamp(path: Path) -> Stamp | None:
    """Differs after every change; None: no such file. Follows links: Kubernetes replaces mounted
    secrets by switching a link.
    """
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_mtime_ns, found.st_ctime_ns, found.st_size, found.st_ino
