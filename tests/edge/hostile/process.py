"""An edge in a separate process, for tests that measure its memory, its CPU time and the delay of
other callers.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tests.edge.parts import Http, Script, head, read_reply, routing

MIB: Final = 1 << 20
MAX_GROWTH_BYTES: Final = 64 * MIB
"""The maximum memory that an input without a credential may cost."""
MAX_DELAY_SECONDS: Final = 0.1
"""The maximum delay that such an input may cause for other callers, in seconds of CPU time."""

MAX_PAUSE_SECONDS: Final = 10.0
"""Each answer arrives within this time, whatever else the machine does."""


@dataclass(frozen=True)
class EdgeProcess:
    """A running edge with its process id and its HTTP client."""

    pid: int
    http: Http

    @property
    def resident_bytes(self) -> int:
        """Return the process's resident memory."""
        return int(Path(f"/proc/{self.pid}/statm").read_text().split()[1]) * os.sysconf(
            "SC_PAGE_SIZE"
        )

    @property
    def cpu_seconds(self) -> float:
        """Return the CPU time of all threads since the start."""
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@asynccontextmanager
async def edge_process(script: Script, **environment: str) -> AsyncIterator[EdgeProcess]:
    """Start an edge in front of a scripted router. It has answered its first requests when the
    context begins.
    """
    async with routing(script) as router:
        variables = {
            "SHOAL_ROUTERS": router,
            "SHOAL_HTTP_ADDRESS": "127.0.0.1:0",
            "SHOAL_LOG_LEVEL": "INFO",
            **environment,
        }
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "services.edge"),
            env=dict(os.environ) | variables,
            stderr=asyncio.subprocess.PIPE,
        )
        assert process.stderr is not None
        try:
            address = ""
            while not address:
                line = json.loads(await process.stderr.readline())
                address = line["address"] if line["message"] == "listening" else ""
            draining = asyncio.create_task(process.stderr.read())
            http = Http(address)
            for _ in range(20):
                assert (await http.get("/livez")).status == 200
            yield EdgeProcess(process.pid, http)
            process.terminate()
            assert await process.wait() == 0
            await draining
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()


@asynccontextmanager
async def measured_delay(process: EdgeProcess) -> AsyncIterator[list[float]]:
    """Request `/livez` repeatedly over one connection; yield the seconds of each answer for which
    the edge computed.

    The time in which other processes use the cores is not a delay that the edge causes: the time
    until an answer counts only as far as the edge had CPU time in it.
    """
    seconds: list[float] = []
    reader, writer = await process.http.open()

    async def ask() -> None:
        while True:
            begin, used = time.perf_counter(), process.cpu_seconds
            writer.write(head("GET", "/livez", {}))
            assert (await read_reply(reader)).status == 200
            elapsed = time.perf_counter() - begin
            assert elapsed < MAX_PAUSE_SECONDS, "the event loop waited for something"
            seconds.append(min(elapsed, process.cpu_seconds - used))
            await asyncio.sleep(0.005)

    asking = asyncio.create_task(ask())
    try:
        yield seconds
    finally:
        asking.cancel()
        with suppress(asyncio.CancelledError):
            await asking
        writer.close()
