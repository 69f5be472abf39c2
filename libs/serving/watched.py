"""Hot reload of files when they change, such as certificates, tenants and pools, without a
restart.
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
"""Time for which files must be unchanged before they are read, to avoid reading a partly written
file.
"""


class Watched(Generic[Content]):
    """The result of `read` over files, and over the entries of folders. Thread-safe: `content` is
    replaced as a whole.

    The first read raises what `read` raises (InvalidInput). Later, changed files are read once they
    were unchanged for SETTLE_SECONDS. An unreadable change or a missing file is logged once as a
    warning, and the content is kept: a certificate is often briefly newer than its key, and a
    partly written file must not lock callers out.

    Args:
        clock: Unix seconds, like file times.
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
        # Mutable state: the content, the files' stamps just before it was read, and the stamps of
        # an unreadable version.
        self._stamps = self._stamps_of_files()
        self.content = read()
        self._broken: Stamps | None = None
        # The last observed stamps, and when they were first observed.
        self._changed: tuple[Stamps, float] = (self._stamps, 0.0)

    @staticmethod
    def fixed(content: Content) -> Watched[Content]:
        """Return a constant content without files."""
        return Watched((), lambda: content)

    def refresh(self) -> bool:
        """Read the files if they have changed. Return whether the content is new. Blocking."""
        with self._lock:
            stamps = self._stamps_of_files()
            if stamps == self._stamps or not self._is_settled(stamps):
                return False
            try:
                content = self._read()
            except InvalidInput as error:
                if stamps != self._broken:
                    log.warning(
                        "changed files are invalid; keeping the previous content",
                        extra=fields({"reason": error.message}),
                    )
                self._broken = stamps
                return False
            if self._stamps_of_files() != stamps:  # changed during the read
                return False
            self.content, self._stamps = content, stamps
            log.info(
                "reloaded changed files", extra=fields({"files": ", ".join(map(str, self._paths))})
            )
            return True

    def _is_settled(self, stamps: Stamps) -> bool:
        """Return whether the stamps are old enough, by file times or, if those are in the future,
        by when the stamps were first observed.
        """
        now = self._clock()
        if stamps != self._changed[0]:
            self._changed = stamps, now
        touched = max((stamp[1] / 1e9 for stamp in stamps if stamp is not None), default=0.0)
        return now - min(touched, self._changed[1]) >= SETTLE_SECONDS

    def _stamps_of_files(self) -> Stamps:
        return tuple(_stamp(found) for path in self._paths for found in (path, *_within(path)))


def _within(path: Path) -> list[Path]:
    """Return the entries of a folder; none for a file."""
    return sorted(path.iterdir()) if path.is_dir() else []


def _stamp(path: Path) -> Stamp | None:
    """Return a value that differs after every change, None for a missing file. Follows links:
    Kubernetes replaces mounted secrets by switching a link.
    """
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_mtime_ns, found.st_ctime_ns, found.st_size, found.st_ino
