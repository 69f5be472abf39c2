"""The peak memory of a process as the kernel counts it, for tests with hostile input."""

from __future__ import annotations

import re
from pathlib import Path


class Peak:
    """The peak memory of a process. `grown` is its growth in bytes since the beginning."""

    def __init__(self, pid: int) -> None:
        self._status = Path(f"/proc/{pid}/status")
        Path(f"/proc/{pid}/clear_refs").write_text(
            "5"
        )  # the peak is measured from here (man 5 proc)
        self._before = self._bytes("VmRSS")

    @property
    def bytes(self) -> int:
        return self._bytes("VmHWM")

    @property
    def grown(self) -> int:
        return self.bytes - self._before

    def _bytes(self, field: str) -> int:
        return _read(self._status, field)


def resident_bytes(pid: int) -> int:
    """Return the memory that a process holds now (VmRSS), in bytes."""
    return _read(Path(f"/proc/{pid}/status"), "VmRSS")


def _read(status: Path, field: str) -> int:
    found = re.search(rf"{field}:\s+(\d+) kB", status.read_text())
    assert found is not None, f"{status} has no {field}"
    return int(found[1]) * 1024
