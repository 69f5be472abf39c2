"""The hostile tenant of `benchmarks.stress.hostile`, in a separate process: sends the attacks of
one kind in turn, at a rate.

`python -m benchmarks.stress.hostile_client KIND ADDRESS HTTP_ADDRESS REQUESTS_PER_SECOND`; it ends
when its input ends, and prints the outcomes of each attack.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections import Counter, defaultdict
from itertools import cycle
from typing import Final

import grpc
import grpc.aio
from google.rpc import error_details_pb2, status_pb2

from benchmarks.stress.hostile_kinds import KINDS, Attack

TENANT: Final = "hostile"
LEGAL: Final = ", legal"
"""End of the names of attacks that are within the limits of the contract."""
DEADLINE_SECONDS: Final = 2.0
UNREAD_SECONDS: Final = 10.0
"""Seconds for which a connection with an unread answer is held."""
CANCEL_SECONDS: Final = 0.05


class Hostile:
    """Sends in an open loop; every second round of attacks is cancelled at once, the others are
    left to run out of their time.
    """

    def __init__(self, channel: grpc.aio.Channel, http_address: str, tenant: str = TENANT) -> None:
        self._channel, self._http_address, self._tenant = channel, http_address, tenant
        # The state: requests in flight, and the outcomes of the others, by name.
        self._in_flight: set[asyncio.Task[None]] = set()
        self.outcomes: dict[str, Counter[str]] = defaultdict(Counter)

    async def run(self, kind: str, rate: float) -> None:
        """Send until the task is cancelled."""
        attacks = KINDS[kind]()
        cancelled = cycle([False] * len(attacks) + [True] * len(attacks))
        try:
            for attack, is_cancelled in zip(cycle(attacks), cancelled, strict=False):
                task = asyncio.create_task(
                    self.send(attack, is_cancelled=is_cancelled and attack.is_read)
                )
                self._in_flight.add(task)
                task.add_done_callback(self._in_flight.discard)
                await asyncio.sleep(1 / rate)
        finally:
            for task in list(self._in_flight):
                task.cancel()

    async def send(self, attack: Attack, *, is_cancelled: bool = False) -> None:
        """Send one attack, and count its outcome."""
        if attack.method.startswith("/"):
            outcome = await self._post(attack)
        elif attack.is_read:
            outcome = await self._call(attack, is_cancelled)
        else:
            outcome = await self._stream(attack)
        self.outcomes[f"{attack.name}{LEGAL if attack.legal else ', too large'}"][outcome] += 1

    async def _call(self, attack: Attack, is_cancelled: bool) -> str:
        method = self._channel.unary_unary(
            f"/shoal.v1.InferenceService/{attack.method}", bytes, bytes
        )
        call = method(
            attack.body, timeout=DEADLINE_SECONDS, metadata=(("x-shoal-tenant", self._tenant),)
        )
        if is_cancelled:
            asyncio.get_running_loop().call_later(CANCEL_SECONDS, call.cancel)
        return _reason(await call.code(), await call.trailing_metadata())

    async def _stream(self, attack: Attack) -> str:
        """Read the first message of a stream and no other."""
        method = self._channel.unary_stream(
            f"/shoal.v1.InferenceService/{attack.method}", bytes, bytes
        )
        call = method(
            attack.body, timeout=UNREAD_SECONDS, metadata=(("x-shoal-tenant", self._tenant),)
        )
        try:
            await call.read()
        except grpc.aio.AioRpcError as error:
            return _reason(error.code(), error.trailing_metadata())
        await asyncio.sleep(UNREAD_SECONDS)
        call.cancel()
        return "unread"

    async def _post(self, attack: Attack) -> str:
        """Send a request and never read its answer."""
        host, _, port = self._http_address.rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port), limit=1024)
        head = (
            f"POST {attack.method} HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: "
            "application/json\r\n"
        )
        head += f"x-shoal-tenant: {self._tenant}\r\ncontent-length: {len(attack.body)}\r\n\r\n"
        writer.write(head.encode() + attack.body)
        line = b""
        try:
            async with asyncio.timeout(UNREAD_SECONDS):
                line = await reader.readline()
                await asyncio.sleep(UNREAD_SECONDS)
        except TimeoutError:
            pass
        finally:
            writer.transport.abort()
        return f"HTTP {line[9:12].decode()}" if line else "no answer"


def _reason(code: grpc.StatusCode, metadata: grpc.aio.Metadata | None) -> str:
    """Return the mesh's reason of a refusal, such as RATE_LIMITED; for anything else the code."""
    details = dict(list(metadata or ())).get("grpc-status-details-bin", b"")
    info = error_details_pb2.ErrorInfo()
    for detail in status_pb2.Status.FromString(
        details if isinstance(details, bytes) else b""
    ).details:
        if detail.Unpack(info):
            return str(info.reason)
    return code.name


async def main(kind: str, address: str, http_address: str, rate: float) -> None:
    async with grpc.aio.insecure_channel(address) as channel:
        hostile = Hostile(channel, http_address)
        running = asyncio.create_task(hostile.run(kind, rate))
        await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
        running.cancel()
        await asyncio.wait([running])
    print(json.dumps(hostile.outcomes))


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2], sys.argv[3], float(sys.argv[4])))
