"""The memory of the children that convert files, as the kernel counts it."""

from __future__ import annotations

import re
import subprocess
import threading
import time
from pathlib import Path

import pytest


class Watch:
    """The most anonymous memory (RssAnon) and all resident memory (VmHWM) of a process, read until
    it ends.
    """

    def __init__(self, pid: int) -> None:
        self.anonymous = self.resident = 0
        self._status = Path(f"/proc/{pid}/status")
        self.thread = threading.Thread(target=self._read)
        self.thread.start()

    def _read(self) -> None:
        while True:
            try:
                found = dict(re.findall(r"(RssAnon|VmHWM):\s+(\d+) kB", self._status.read_text()))
            except OSError:
                return
            if not found:
                return
            self.anonymous = max(self.anonymous, int(found["RssAnon"]) << 10)
            self.resident = max(self.resident, int(found["VmHWM"]) << 10)
            # Without a pause the thread takes a core, and the child has less of one. No tensor that
            # counts is allocated and freed within it, and VmHWM keeps its maximum.
            time.sleep(0.001)


def watch_children(monkeypatch: pytest.MonkeyPatch) -> list[Watch]:
    """A list that gets a watch of each process that is started from now on."""
    watches: list[Watch] = []
    start = subprocess.Popen

    def watched(*arguments: object, **options: object) -> object:
        child = start(*arguments, **options)  # type: ignore[call-overload]
        watches.append(Watch(child.pid))
        return child

    monkeypatch.setattr(subprocess, "Popen", watched)
    return watches
