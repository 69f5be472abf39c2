"""`make edge-idle`: open 10,000 idle connections to an edge process, print the memory of each, and
send requests at the same time.

Exits 1 if a connection takes more than BUDGET_BYTES, if a request fails at the same time, or if
memory is not freed.
"""

from __future__ import annotations

import asyncio
import json
import os
import resource
import sys
import time
from pathlib import Path
from typing import Final

import uvloop

from tests.edge.parts import Http, Script, head, read_reply, routing
from tests.edge.test_server import BODY, EMBED

CONNECTIONS: Final = 10_000
AT_ONCE: Final = 500
SPARE: Final = 10
"""Additional connections that the edge accepts."""
BUDGET_BYTES: Final = 24 << 10


class Idle(asyncio.Protocol):
    """A connection that sends one request and is then silent."""

    def __init__(self) -> None:
        self.answered: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self.is_lost = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport
        transport.write(head("GET", "/livez", {}))  # type: ignore[attr-defined]

    def data_received(self, data: bytes) -> None:
        if not self.answered.done():
            self.answered.set_result(data)

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_lost = True
        if not self.answered.done():
            self.answered.set_exception(exc or ConnectionError("closed"))


def resident(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * resource.getpagesize()


async def opened(port: int, count: int) -> list[Idle]:
    loop = asyncio.get_running_loop()
    found: list[Idle] = []
    for first in range(0, count, AT_ONCE):
        made = [
            loop.create_connection(Idle, "127.0.0.1", port)
            for _ in range(min(AT_ONCE, count - first))
        ]
        found += [idle for _, idle in await asyncio.gather(*made)]
        await asyncio.gather(*(idle.answered for idle in found[first:]))
    return found


async def good(http: Http) -> float:
    """Return the seconds of a request, which must succeed."""
    begin = time.perf_counter()
    reply = await http.post(EMBED, BODY)
    assert reply.status == 200, reply
    return time.perf_counter() - begin


async def main() -> int:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    count = CONNECTIONS if hard == resource.RLIM_INFINITY else min(CONNECTIONS, hard - 200)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, count + 200), hard))
    async with routing(Script()) as router:
        reported = {
            "SHOAL_ROUTERS": router,
            "SHOAL_HTTP_ADDRESS": "127.0.0.1:0",
            "SHOAL_HTTP_CONNECTIONS": str(count + SPARE),
        }
        reported["SHOAL_HTTP_IDLE_SECONDS"] = "600"
        edge = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "services.edge"),
            env=dict(os.environ) | reported,
            stderr=asyncio.subprocess.PIPE,
        )
        assert edge.stderr is not None
        address = ""
        while not address:
            line = json.loads(await edge.stderr.readline())
            address = line["address"] if line["message"] == "listening" else ""
        silent = asyncio.create_task(edge.stderr.read())
        http = Http(address)
        port = int(address.rpartition(":")[2])
        alone = sorted([await good(http) for _ in range(20)])[10]
        before = resident(edge.pid)
        begin = time.perf_counter()
        idle = await opened(port, count)
        took = time.perf_counter() - begin
        each = (resident(edge.pid) - before) / count
        loaded = sorted([await good(http) for _ in range(20)])[10]
        more = await opened(port, SPARE)
        reader, writer = await http.open()
        beyond = (await read_reply(reader)).status
        writer.close()
        lost = sum(one.is_lost for one in idle)
        for one in idle + more:
            one.transport.close()
        while resident(edge.pid) > before + count * each / 2 and time.perf_counter() < begin + 90:  # noqa: ASYNC110
            await asyncio.sleep(0.5)  # freed memory is returned to the system once a minute
        after = await good(http)
        edge.terminate()
        status = await edge.wait()
        await silent
    print(
        f"{count:,} connections in {took:.1f} s, {each / 1024:.1f} KiB of the edge's memory each "
        f"({BUDGET_BYTES >> 10} may be)"
    )
    print(
        f"a good request: {alone * 1e3:.1f} ms alone, {loaded * 1e3:.1f} with them, "
        f"{after * 1e3:.1f} after"
    )
    print(f"one connection more than may be: {beyond}; lost: {lost}")
    return int(each > BUDGET_BYTES or lost > 0 or beyond != 503 or status != 0)


if __name__ == "__main__":
    sys.exit(uvloop.run(main()))
