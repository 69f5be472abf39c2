"""Only the wall clock and the disk differ. `python -m tests.chaos.test_machine FILE`: one call in a
process with FILE's clock.
"""

from __future__ import annotations

import asyncio
import json
import struct
import subprocess
import sys
import time
from pathlib import Path

import grpc
import pytest

from tests.chaos.machine import have_a_wrong_clock

DEADLINE_SECONDS = 60.0


async def remaining() -> float:
    """Return the time that the server sees left of a call."""

    async def time_remaining(
        request: bytes, context: grpc.aio.ServicerContext[bytes, bytes]
    ) -> bytes:
        return json.dumps(context.time_remaining()).encode()

    server = grpc.aio.server()
    handlers: dict[str, grpc.RpcMethodHandler[bytes, bytes]] = {
        "Tell": grpc.unary_unary_rpc_method_handler(time_remaining)
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("Clock", handlers),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        call: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary("/Clock/Tell")
        answer = await call(b"", timeout=DEADLINE_SECONDS, wait_for_ready=True)
    await server.stop(None)
    seconds: float = json.loads(answer)
    return seconds


@pytest.mark.parametrize("error", [-240.0, 240.0])
def test_wrong_clock_is_wrong_and_a_call_still_has_its_time(tmp_path: Path, error: float) -> None:
    """A process with a wrong clock serves and calls."""
    file = tmp_path / "clock"
    file.write_bytes(struct.pack("d", error))
    run = subprocess.run(
        [sys.executable, "-m", __name__, str(file)],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=5 * DEADLINE_SECONDS,
    )
    reported = json.loads(run.stdout)
    assert reported["now"] == pytest.approx(time.time() + error, abs=DEADLINE_SECONDS)
    # gRPC converts a deadline between clocks by reading both, one after the other. A process that
    # is stopped between the two is off by as long (95 ms seen), which is small against 240 s.
    assert reported["remaining"] == pytest.approx(DEADLINE_SECONDS, abs=DEADLINE_SECONDS / 2)


if __name__ == "__main__":
    have_a_wrong_clock(sys.argv[1])
    print(json.dumps({"remaining": asyncio.run(remaining()), "now": time.time()}))
