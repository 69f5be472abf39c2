"""A router ends old connections without any caller noticing."""

from __future__ import annotations

import asyncio

import grpc
from shoal.v1 import inference_pb2 as pb

from services.router.app import running
from services.router.settings import Settings
from tests.router.parts import MODEL, Client, FakeWorker, card


async def test_clients_and_workers_do_not_notice_that_their_connections_end(redis_url: str) -> None:
    settings = Settings(
        "a", "127.0.0.1:0", redis_url=redis_url, connection_seconds=0.2, grace_seconds=5.0
    )
    async with (
        running(settings) as address,
        FakeWorker(address, models=[card()]).working() as worker,
    ):
        client = Client(address)
        try:
            await client.sees(worker.worker_id)
            states = asyncio.create_task(reconnections(client.channel, 3))
            answers: list[pb.EncodeResponse] = []
            while not states.done():
                answers += await asyncio.gather(
                    *(client.encode("text", model=MODEL) for _ in range(4))
                )
            await states
        finally:
            await client.close()
    assert all(answer.model_revision == "r1" for answer in answers)
    assert len(worker.jobs) == len(answers) > 0


async def reconnections(channel: grpc.aio.Channel, count: int) -> None:
    """Returns once the channel has lost its connection so often."""
    async with asyncio.timeout(120):
        for _ in range(count):
            while (state := channel.get_state()) == grpc.ChannelConnectivity.READY:
                await channel.wait_for_state_change(state)
            while (state := channel.get_state()) != grpc.ChannelConnectivity.READY:
                await channel.wait_for_state_change(state)
