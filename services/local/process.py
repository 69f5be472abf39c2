"""One child process of the local mesh: started, watched, stopped."""

from __future__ import annotations

import asyncio
import ctypes
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType

STOP_SECONDS = 30.0
_PR_SET_PDEATHSIG = 1


def _die_with_parent() -> None:
    """Runs in the child before exec: a mesh whose parent was killed must not live on."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


class Child:
    """A process whose output goes to a file; leaving its context stops it with SIGTERM, and with SIGKILL after 30 s.

    It has a session of its own, so that Ctrl-C reaches only the parent, which then stops its children in order.
    """

    def __init__(self, name: str, command: Sequence[str], environment: Mapping[str, str], log: Path) -> None:
        self.name = name
        self.log = log
        self._command = list(command)
        self._environment = dict(environment)
        self._process: asyncio.subprocess.Process | None = None

    async def __aenter__(self) -> Child:
        with self.log.open("ab") as output:
            self._process = await asyncio.create_subprocess_exec(
                *self._command,
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
                preexec_fn=_die_with_parent if sys.platform == "linux" else None,
            )
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        process = self.process
        if process.returncode is None:
            process.terminate()
            try:
                await asyncio.wait_for(process.wait(), STOP_SECONDS)
            except TimeoutError:
                process.kill()
                await process.wait()

    @property
    def process(self) -> asyncio.subprocess.Process:
        assert self._process is not None, "the child was not entered"
        return self._process

    def last_words(self, lines: int = 15) -> str:
        """The end of its output."""
        text = self.log.read_text(errors="replace") if self.log.exists() else ""
        return "\n".join(text.splitlines()[-lines:])
