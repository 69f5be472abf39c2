"""For all tests: torch takes one thread, because a test's forward pass shares the machine with the mesh under test; without a
GPU the Triton kernels run in Triton's interpreter, which must be said before anything imports Triton; files that take long come
first, so that no process is left alone with one of them.
"""

import os
from collections.abc import AsyncIterator, Iterator

import pytest
import torch
from redis.asyncio import Redis

from libs.queue import connect
from tests.support.redis import RedisServer

LONG = ("test_minilm.py", "test_chaos.py", "test_zipf.py", "test_keda_processes.py", "test_scheduler.py", "test_lora.py")

torch.set_num_threads(1)
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.path.name not in LONG)


@pytest.fixture(scope="session")
def server() -> Iterator[RedisServer]:
    """One redis-server for all tests of a process that do not kill it."""
    with RedisServer() as running:
        yield running


@pytest.fixture
async def redis(server: RedisServer) -> AsyncIterator[Redis]:
    """A client of it, emptied for each test."""
    client = connect(server.url)
    await client.flushall()
    yield client
    await client.aclose()
