"""One child process of the local mesh: start, wait, stop."""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Final

from services.local.supervision.policy import last_fault

CHILD_STOP_SECONDS: Final = 30.0
"""Time between SIGTERM and SIGKILL."""
_LAST_BYTES: Final = 64 << 10
"""Bytes at the end of a log that are searched."""
_PR_SET_PDEATHSIG: Final = 1
"""The option of Linux' prctl(2)."""


def _dying_with_parent() -> Callable[[], None] | None:
    """Return a function that the child calls before exec, so that the kernel kills it when its
    parent dies for any reason. None on systems other than Linux, which cannot do that.
    """
    if sys.platform != "linux":
        return None
    libc, parent = ctypes.CDLL(None), os.getpid()

    def before_exec() -> None:
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # the parent died before prctl took effect
            os._exit(1)

    return before_exec


class Child:
    """A process with its output appended to a log file. As a context manager it starts and stops
    the process.

    The process runs in a new session, so that Ctrl-C reaches only the parent, which then stops its
    children in order.
    """

    def __init__(
        self, name: str, command: Sequence[str], environment: Mapping[str, str], log: Path
    ) -> None:
        self.name = name
        self.log = log
        self._command = list(command)
        self._environment = dict(environment)
        # The state: the process of the last start, and the byte of the log at which its output
        # begins.
        self._process: asyncio.subprocess.Process | None = None
        self._begins = 0

    async def __aenter__(self) -> Child:
        await self.start()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.stop()

    async def start(self) -> None:
        """Start or restart the process. Raises OSError if that fails."""
        with self.log.open("ab") as output:
            self._begins = output.tell()
            self._process = await asyncio.create_subprocess_exec(
                *self._command,
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
                preexec_fn=_dying_with_parent(),
            )

    @property
    def pid(self) -> int:
        """The process id of the last start."""
        assert self._process is not None, "the child was not started"
        return self._process.pid

    @property
    def status(self) -> int | None:
        """The exit status of the last start, negative for a signal; None while it runs."""
        assert self._process is not None, "the child was not started"
        return self._process.returncode

    async def wait(self) -> int:
        """Wait for the process to end; return its exit status."""
        assert self._process is not None, "the child was not started"
        return await self._process.wait()

    async def stop(self) -> None:
        """Send SIGTERM, and SIGKILL after CHILD_STOP_SECONDS. Does nothing if the process does not
        run.
        """
        process = self._process
        if process is None or process.returncode is not None:
            return
        process.terminate()
        try:
            async with asyncio.timeout(CHILD_STOP_SECONDS):
                await process.wait()
        except TimeoutError:
            process.kill()
            await process.wait()

    def log_end(self, lines: int = 15) -> str:
        """Return the last lines of its output."""
        return "\n".join(self._end(0)[-lines:])

    def last_fault(self) -> str:
        """Return the last warning or error in its log since its last start; empty if there
        is none.
        """
        return last_fault(self._end(self._begins))

    def _end(self, begins: int) -> list[str]:
        """Return the last lines of its log from byte `begins` on."""
        if not self.log.exists():
            return []
        with self.log.open("rb") as log:
            log.seek(max(begins, self.log.stat().st_size - _LAST_BYTES))
            return log.read().decode(errors="replace").splitlines()
