"""Send requests to an HTTP server from many connections at once, in a separate process: `python -m
benchmarks.http.load PORT`.

Each line {"connections": …, "seconds": …, "path": …, "body": …} on its input is a closed loop: each
of the connections sends the request as soon as it has the answer to the previous one. It checks
only status and end of an answer, so that a request costs it some µs and the server dominates the
measurement. Idle, it uses no CPU.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from typing import Any, cast

import typer
import uvloop

_LENGTH = b"content-length: "
_END = b"\r\n\r\n"


class LoadConnection(asyncio.Protocol):
    """One connection of a closed loop, until `end` (of time.perf_counter).

    Attributes:
        seconds: The time of each answer.
        failure: The first answer other than 200 with a content-length.
    """

    def __init__(self, request: bytes, end: float) -> None:
        self.seconds: list[float] = []
        self.failure = ""
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._request, self._end = request, end
        self._sent = 0.0
        self._missing = 0
        self._head = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._send()

    def data_received(self, data: bytes) -> None:
        if self._missing:
            self._missing -= len(data)
        else:
            self._head += data
            end = self._head.find(_END)
            if end < 0:
                return
            length = self._head.find(_LENGTH, 0, end)
            if not self._head.startswith(b"HTTP/1.1 200") or length < 0:
                self._fail(self._head[:200].decode(errors="replace"))
                return
            size = int(self._head[length + len(_LENGTH) : self._head.find(b"\r", length)])
            self._missing = end + len(_END) + size - len(self._head)
            self._head = b""
        if self._missing == 0:
            self.seconds.append(time.perf_counter() - self._sent)
            self._send()

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.done.done():
            self.failure = self.failure or "the connection was closed"
            self.done.set_result(None)

    def _send(self) -> None:
        self._sent = time.perf_counter()
        if self._sent < self._end:
            self._transport.write(self._request)
        elif not self.done.done():
            self.done.set_result(None)
            self._transport.close()

    def _fail(self, what: str) -> None:
        self.failure = what
        self._transport.close()


async def closed_loop(
    port: int, request: bytes, connections: int, seconds: float
) -> dict[str, Any]:
    """Answers, seconds from the first request to the last answer, and latencies' p50 and p99 in
    seconds. Raises RuntimeError for any answer but 200."""
    begin = time.perf_counter()
    loop = asyncio.get_running_loop()
    made = [
        loop.create_connection(lambda: LoadConnection(request, begin + seconds), "127.0.0.1", port)
        for _ in range(connections)
    ]
    callers = [caller for _, caller in await asyncio.gather(*made)]
    await asyncio.gather(*(caller.done for caller in callers))
    took = time.perf_counter() - begin
    if failures := [caller.failure for caller in callers if caller.failure]:
        raise RuntimeError(
            f"{len(failures)} of {connections} connections failed, one of them with: {failures[0]}"
        )
    times = sorted(one for caller in callers for one in caller.seconds)
    return {
        "answers": len(times),
        "seconds": took,
        "p50": times[len(times) // 2],
        "p99": times[len(times) * 99 // 100],
    }


def build_request(path: str, body: bytes) -> bytes:
    """A POST as an SDK sends it, with as many headers."""
    head = (
        f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nAccept: application/json\r\nContent-Type: "
        "application/json\r\n"
        "User-Agent: OpenAI/Python 3.54.0\r\nX-Stainless-Lang: "
        "python\r\nX-Stainless-Read-Timeout: 600\r\n"
        "X-Stainless-Retry-Count: 0\r\nAuthorization: Bearer sk-not-needed\r\nContent-Length: "
        f"{len(body)}\r\n\r\n"
    )
    return head.encode() + body


def main(port: int) -> None:
    """Answer lines until the input ends."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        print(json.dumps({"ready": True}), flush=True)
        for line in sys.stdin:
            asked = json.loads(line)
            request = build_request(asked["path"], asked["body"].encode())
            print(
                json.dumps(
                    runner.run(closed_loop(port, request, asked["connections"], asked["seconds"]))
                ),
                flush=True,
            )


if __name__ == "__main__":
    typer.run(main)
