"""Servers that the mesh is compared with, each from its own environment (`install.py`), with the
arguments that make it fastest on a CPU.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Final

from benchmarks.common.processes import HttpPool, OpenAi, listening
from benchmarks.common.texts import minilm_directory
from benchmarks.peers.install import peer_python
from services.local.settings import free_port
from services.local.supervision.child import Child

MODEL: Final = "minilm"
TRUNCATING: Final = {"truncate_prompt_tokens": -1}
"""Cut texts at the model's 256 tokens, as all others do; vLLM refuses longer ones by default."""
_ENVIRONMENT: Final = {
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
    "INFINITY_ANONYMOUS_USAGE_STATS": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    # By default vLLM keeps one core, here half of the machine, from the model.
    "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
}


def _infinity(dtype: str, port: int) -> list[str]:
    return [
        *("-m", "infinity_emb.cli", "v2", "--engine", "torch", "--device", "cpu"),
        *("--dtype", dtype, "--model-id", str(minilm_directory()), "--served-model-name", MODEL),
        *("--batch-size", "32", "--no-bettertransformer"),
        *("--host", "127.0.0.1", "--port", str(port), "--log-level", "warning"),
    ]


def _vllm(dtype: str, port: int) -> list[str]:
    return [
        # `vllm serve` asks for the version of the package `vllm`; this one is named `vllm-cpu`.
        *("-m", "vllm.entrypoints.openai.api_server", "--model", str(minilm_directory())),
        *("--runner", "pooling", "--dtype", dtype, "--served-model-name", MODEL),
        *("--gpu-memory-utilization", "0.2"),  # of the host; an encoder needs no KV cache
        *("--host", "127.0.0.1", "--port", str(port), "--disable-uvicorn-access-log"),
    ]


COMMANDS: Final[dict[str, tuple[Callable[[str, int], list[str]], str]]] = {
    "infinity": (_infinity, "/embeddings"),
    "vllm": (_vllm, "/v1/embeddings"),
}
"""Arguments of each server's interpreter for a data type and a port, and the path of its OpenAI
endpoint.
"""


@asynccontextmanager
async def serving(name: str, dtype: str) -> AsyncIterator[OpenAi]:
    """Start a server and yield its client. Raises RuntimeError if it ends before it listens."""
    command, path = COMMANDS[name]
    port = free_port()
    async with AsyncExitStack() as stack:
        directory = stack.enter_context(tempfile.TemporaryDirectory(prefix=f"{name}-"))
        child = await stack.enter_async_context(
            Child(
                name,
                [str(peer_python(name)), *command(dtype, port)],
                dict(os.environ) | _ENVIRONMENT,
                Path(directory) / "log",
            )
        )
        await listening(child, port)
        pool = HttpPool(port)
        stack.push_async_callback(pool.close)
        yield OpenAi(pool, path, MODEL, TRUNCATING if name == "vllm" else None)
