"""The machines of redis-servers, as far as a library that is loaded into them can imitate them: a
wrong clock and a slow disk (`preload.c`).
"""

from __future__ import annotations

import os
import shutil
import struct
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Final

SOURCE: Final = Path(__file__).with_name("preload.c")
SETTINGS_NAME: Final = "CHAOS_REDIS"


class RedisMachines:
    """The clock and the disk of each server, by its name. Without a compiler they are those of this
    machine.

    Args:
        directory: Holds the library and a file for each server.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._library = directory / "preload.so"
        compiler = shutil.which("cc")
        if compiler is not None:
            command = [compiler, "-shared", "-fPIC", "-O1", "-o", str(self._library), str(SOURCE)]
            subprocess.run([*command, "-ldl", "-lm"], check=True)

    @property
    def can_change(self) -> bool:
        return self._library.exists()

    def variables(self, name: str) -> Mapping[str, str]:
        """Return the environment of a server."""
        if not self.can_change:
            return os.environ
        self.change(name)
        ours = {"LD_PRELOAD": str(self._library), SETTINGS_NAME: str(self._path(name))}
        return os.environ | ours

    def change(self, name: str, *, clock_seconds: float = 0.0, disk_seconds: float = 0.0) -> None:
        """Change the machine of a server, from now on.

        Args:
            clock_seconds: How far its wall clock is wrong.
            disk_seconds: How much longer each synchronisation of a file takes.
        """
        path = self._path(name)
        path.touch()
        with path.open("r+b") as file:  # not truncated: the process has it mapped
            file.write(struct.pack("2d", clock_seconds, disk_seconds))

    def _path(self, name: str) -> Path:
        return self._directory / f"redis-machine-{name}"
