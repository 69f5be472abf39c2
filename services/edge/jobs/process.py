"""The process of a job, as the edge sees it: starts it, follows its reports, and ends it if it
hangs.

A process that has reached its memory limit may hang instead of end, because a thread of a library
dies of MemoryError while others wait for it for ever.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, Final

from libs.telemetry.logs import fields

log = logging.getLogger(__name__)

CHILD: Final = "services.edge.jobs.child"
MAX_REPORT_BYTES: Final = 1 << 20
PROCESS_STOP_SECONDS: Final = 10.0
"""Maximum time of a process to end after its stdin is closed."""
MAX_IDLE_SECONDS: Final = 900.0
"""Maximum time in which a process does not read, receive or report anything that was due. Listing
an input of 10,000 objects, or repeated reads of a store that does not respond, take minutes.
"""
MAX_IDLE_STOP_SECONDS: Final = 120.0
"""Maximum time until a process has followed a request to pause or cancel the job."""
WATCH_SECONDS: Final = 1.0

INHERITED_VARIABLES: Final = frozenset(
    (
        *("PATH", "HOME", "USER", "LOGNAME", "LANG", "TZ", "TMPDIR"),
        *("LD_LIBRARY_PATH", "LD_PRELOAD"),
        *("SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE"),
        *("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY"),
        *("http_proxy", "https_proxy", "all_proxy", "no_proxy"),
        *("HF_ENDPOINT", "HF_HOME"),
        *("STORAGE_EMULATOR_HOST", "GCE_METADATA_HOST", "GCE_METADATA_IP"),
    )
)
"""Variables of the edge that its processes of jobs have, too."""
INHERITED_PREFIXES: Final = (
    *("AWS_", "AZURE_", "BOTO_", "CLOUDSDK_", "FSSPEC_", "GCLOUD_", "GCSFS_", "GOOGLE_"),
    *("IDENTITY_", "MSI_", "XDG_"),
    *("ARROW_", "GRPC_", "LC_", "MALLOC_", "MKL_", "OMP_", "OPENBLAS_", "PYTHON"),
)
"""Prefixes of further ones: of the stores of inputs and outputs, and of the libraries. Those of
Shoal are not among them: the process gets its order by a pipe, and the edge has other secrets.
"""

Report = dict[str, Any]


def inherited(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of the edge that a process of a job needs."""
    return {
        name: value
        for name, value in environ.items()
        if name in INHERITED_VARIABLES or name.startswith(INHERITED_PREFIXES)
    }


class JobProcess:
    """The process of one job.

    Attributes:
        pid: Its id.
    """

    def __init__(self, process: Process, job: str) -> None:
        self._process, self._job = process, job
        self.pid = process.pid
        self._idle_seconds, self._is_requested = 0.0, False

    @staticmethod
    async def start(job: str, order: dict[str, Any]) -> JobProcess:
        """Start a process, and write its order.

        Args:
            job: The id of the job, for logs.
        """
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-P", "-m", CHILD),
            stdin=PIPE,
            stdout=PIPE,
            limit=MAX_REPORT_BYTES,
            start_new_session=True,  # Ctrl-C at a terminal is for the edge alone.
            env={
                **inherited(os.environ),
                # The module is found where this one was, whatever the working directory is.
                "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
                # Arrow's own allocator keeps more memory of a long job than the system's.
                "ARROW_DEFAULT_MEMORY_POOL": "system",
            },
        )
        made = JobProcess(process, job)
        made.write(**order)
        return made

    @property
    def is_running(self) -> bool:
        return self._process.returncode is None

    def request(self, name: str) -> None:
        """Request that the process pauses or cancels the job, soon: from now on, the time counts
        that it takes for that, whatever it does.
        """
        self._idle_seconds, self._is_requested = 0.0, True
        self.write(request=name)

    def write(self, **content: Any) -> None:
        """Send a line to the process."""
        stdin = self._process.stdin
        if stdin is not None and not stdin.is_closing():
            stdin.write(json.dumps(content).encode() + b"\n")

    async def follow(self, take: Callable[[Report], None]) -> Report | None:
        """Pass reports to `take` until the end of the job, and return this; None if the process
        ended without one.
        """
        stdout = self._process.stdout
        assert stdout is not None  # noqa: S101  # for the type checker
        watching = asyncio.create_task(self._kill_when_idle())
        try:
            while line := await stdout.readline():
                report = json.loads(line)
                if "end" in report:
                    ended: Report = report["end"]
                    return ended
                if not self._is_requested:
                    self._idle_seconds = report.get("overdue_seconds", 0.0)
                take(report)
            await self._process.wait()
        except ValueError as error:  # The line is too long, or not JSON.
            self._warn("unusable report", error=str(error))
        finally:
            watching.cancel()
        self._warn("process of a job ended", status=self._process.returncode)
        return None

    async def _kill_when_idle(self) -> None:
        """Kill the process if it hangs, until cancelled.

        The time is counted in short waits: a frozen edge does not blame the process for its pause.
        """
        while self._idle_seconds <= (
            MAX_IDLE_STOP_SECONDS if self._is_requested else MAX_IDLE_SECONDS
        ):
            await asyncio.sleep(WATCH_SECONDS)
            self._idle_seconds += WATCH_SECONDS
        self._warn("process of a job hangs and is killed", seconds=self._idle_seconds)
        self._kill()

    async def stop(self) -> None:
        """End the process: it stops when its stdin is closed."""
        if not self.is_running:
            return
        if self._process.stdin is not None:
            self._process.stdin.close()
        try:
            async with asyncio.timeout(PROCESS_STOP_SECONDS):
                await self._process.wait()
        except TimeoutError:
            self._kill()
            await self._process.wait()

    def _kill(self) -> None:
        with suppress(ProcessLookupError):
            self._process.kill()

    def _warn(self, message: str, **more: Any) -> None:
        log.warning(message, extra=fields({"job": self._job, **more}))
