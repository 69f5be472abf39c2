"""Send single texts to a router from many callers at once, in a separate process: `python -m
benchmarks.mesh.load ADDRESS MODEL`.

It sends by the client's transport below `AsyncClient`, as the edge does: on a stream with several
callers; with --unary by generated stubs, a gRPC call for each text. Each line {"callers": …,
"seconds": …} on its input is a closed loop: each caller sends a text as soon as it has the answer
to the previous one. Idle, it uses no CPU.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
import uuid
from typing import cast

import grpc
import typer
import uvloop
from shoal.transport.aio import AsyncTransport
from shoal.transport.methods import ENCODE
from shoal.v1 import inference_pb2, inference_pb2_grpc

TEXT = "how to read a file line by line"
READY_SECONDS = 120.0
ANSWER_SECONDS = 60.0


class TextLoad:
    """Requests of one text to a router.

    Args:
        address: The router, host:port.
        model: A model that some worker has.
    """

    def __init__(self, address: str, model: str, *, unary: bool) -> None:
        self._channel = grpc.aio.insecure_channel(address)
        stub = inference_pb2_grpc.InferenceServiceStub(self._channel)
        self._stub = cast("inference_pb2_grpc.InferenceServiceAsyncStub", stub)
        self._request = inference_pb2.EncodeRequest(
            model=model, items=[inference_pb2.Item(text=TEXT)]
        )
        self._address = address
        self._transport = None if unary else AsyncTransport(None)

    async def ask(self) -> None:
        """Return when one text was answered."""
        if self._transport is None:
            await self._stub.Encode(self._request, timeout=ANSWER_SECONDS)
            return
        metadata = (("x-request-id", uuid.uuid4().hex),)
        await self._transport.send(
            self._address, ENCODE, self._request, timeout=ANSWER_SECONDS, metadata=metadata
        )

    async def ready(self) -> None:
        """Return once a text was answered. Raises TimeoutError."""
        async with asyncio.timeout(READY_SECONDS):
            while True:
                try:
                    await self._stub.Encode(
                        self._request, timeout=ANSWER_SECONDS, wait_for_ready=True
                    )
                except grpc.aio.AioRpcError:
                    await asyncio.sleep(0.1)
                else:
                    return

    async def closed_loop(self, callers: int, seconds: float) -> tuple[int, float]:
        """Answers, and seconds from the first request to the last answer."""
        begin, answers = time.perf_counter(), 0

        async def caller() -> None:
            nonlocal answers
            while time.perf_counter() < begin + seconds:
                await self.ask()
                answers += 1

        await asyncio.gather(*(caller() for _ in range(callers)))
        return answers, time.perf_counter() - begin


def main(address: str, model: str, unary: bool = False) -> None:
    """Answer lines until the input ends."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:

        async def made() -> TextLoad:
            load = TextLoad(address, model, unary=unary)
            await load.ready()
            return load

        load = runner.run(made())
        print(json.dumps({"ready": True}), flush=True)
        for line in sys.stdin:
            asked = json.loads(line)
            answers, seconds = runner.run(load.closed_loop(asked["callers"], asked["seconds"]))
            print(json.dumps({"answers": answers, "seconds": seconds}), flush=True)


if __name__ == "__main__":
    typer.run(main)
