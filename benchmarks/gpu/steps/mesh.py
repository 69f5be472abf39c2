"""The whole mesh on the GPU, in the layout of `shoal up`: redis-server, router, one worker, and one
client, which is this process.

The same texts go through it in one request, in requests of 512, as single texts of 64 and of 512
callers, and as single texts for four models in turn; then single queries at idle. Each row has the
CPU time of each process, since one of them may be the limit.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from statistics import median
from typing import Final

import numpy as np
import psutil
import torch
from shoal import AsyncClient

from benchmarks.common.processes import Vectors
from benchmarks.common.report import percentile
from benchmarks.common.texts import MINILM_ID, Mix, minilm_directory, real_texts
from benchmarks.gpu import published
from benchmarks.gpu.context import StepContext
from benchmarks.gpu.report import Row
from benchmarks.mesh.throughput import QUERIES, in_parts, singly
from benchmarks.models.families import packed_run
from libs.models import EncodeWork, load_model
from services.local.mesh import running
from services.local.settings import Settings

TEXTS: Final = 2048
ROUNDS: Final = 3
QUERIES_AT_IDLE: Final = 200
PART: Final = 512
BATCH_TOKENS: Final = 16_384
OTHERS: Final = ("BERT-base", "ModernBERT-base", "Qwen3-0.6B")
MIN_COSINE: Final = 0.999
BULK_BOUND: Final = 0.9


def run(context: StepContext) -> None:
    mix = real_texts(64 if context.is_tiny else TEXTS)
    context.measure("forward alone", lambda: alone(context, mix), seconds=10)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for shape in published.shapes(context, OTHERS):
            (folder / "random").mkdir(exist_ok=True)
            (folder / "random" / shape.name).symlink_to(published.checkpoint(shape)[0])
        asyncio.run(_mesh(context, mix, folder))
    forward, bulk = (
        context.report.number(what, "tokens_per_second")
        for what in ("forward alone", "one request")
    )
    ratio = None if forward is None or bulk is None else bulk / forward
    context.target("mesh, one request / forward alone, all-MiniLM-L6-v2", BULK_BOUND, "x", ratio)


def alone(context: StepContext, mix: Mix) -> Row:
    """The forward passes without any mesh, tokenised beforehand."""
    model = load_model(minilm_directory(), MINILM_ID, context.device, _dtype(context))
    once = packed_run(model, model.prepare(EncodeWork(mix.texts)).sequences, BATCH_TOKENS)
    context.timed(once)
    return {
        "tokens": mix.tokens,
        "tokens_per_second": mix.tokens / median(context.timed(once) for _ in range(ROUNDS)),
    }


async def _mesh(context: StepContext, mix: Mix, folder: Path) -> None:
    models = f"{MINILM_ID}={minilm_directory()}:{folder}"
    device = "cuda" if context.has_cuda else "cpu"
    threads = 1 if not context.has_cuda else 4
    settings = Settings(
        port=0, workers=1, threads=threads, models=models, dtype=_name(context), device=device
    )
    names = [MINILM_ID, *(f"random/{name}" for name in OTHERS)]
    began = time.perf_counter()
    async with running(settings) as mesh, AsyncClient(mesh.address) as client:
        started = time.perf_counter() - began
        loads = {}
        for name in names:
            began = time.perf_counter()
            await client.models.load(name)
            loads[name] = time.perf_counter() - began
        context.add({"what": "start", "start_seconds": started, "load_seconds": {**loads}})

        async def encode(texts: list[str]) -> Vectors:
            return (await client.encode(MINILM_ID, texts)).dequantize()

        ways: dict[str, Callable[[], Awaitable[object]]] = {
            "one request": lambda: encode(mix.texts[:PART]),
            f"requests of {PART}": lambda: in_parts(encode, mix.texts, PART),
            "64 single texts at once": lambda: singly(encode, mix.texts, 64),
            "512 single texts at once": lambda: singly(encode, mix.texts, 512),
            "four models, 64 single texts at once": lambda: _mixed(client, names, mix.texts, 64),
        }
        for what, way in ways.items():
            if context.seconds_left < 15:
                context.note(f"{what}: not begun, out of time")
                continue
            tokens = sum(mix.lengths[:PART]) if what == "one request" else mix.tokens
            await _measured(context, what, way, tokens)
        await _idle(context, client)
        context.add(await _right(encode, mix))


async def _measured(
    context: StepContext, what: str, way: Callable[[], Awaitable[object]], tokens: int
) -> None:
    if what in context.kept:
        return
    rounds = 1 if context.is_tiny else ROUNDS
    print(f"[mesh] {what}", flush=True)
    try:
        await way()
        before, taken = _cpu(), []
        for _ in range(rounds):
            began = time.perf_counter()
            await way()
            taken.append(time.perf_counter() - began)
    except Exception as error:  # the other rows are worth having
        context.add({"what": what, "error": f"{type(error).__name__}: {error}"[:2000]})
        return
    after = _cpu()
    cores: Row = {
        role: (seconds - before.get(role, 0.0)) / sum(taken) for role, seconds in after.items()
    }
    context.add(
        {
            "what": what,
            "tokens_per_second": tokens / median(taken),
            "seconds": [*taken],
            "cores_busy": {**cores},
        }
    )


async def _mixed(client: AsyncClient, names: list[str], texts: list[str], at_once: int) -> None:
    """Text by text, the models in turn; four times as many tokens of several models as one model
    would have.
    """
    waiting = iter(enumerate(texts))

    async def caller() -> None:
        for number, text in waiting:
            await client.encode(names[number % len(names)], [text])

    await asyncio.gather(*(caller() for _ in range(at_once)))


async def _idle(context: StepContext, client: AsyncClient) -> None:
    count = 5 if context.is_tiny else QUERIES_AT_IDLE
    totals, stages = [], []
    for number in range(count + len(QUERIES)):
        began = time.perf_counter()
        answer = await client.encode(MINILM_ID, [QUERIES[number % len(QUERIES)]])
        if number >= len(QUERIES):
            totals.append(time.perf_counter() - began)
            stages.append(answer.timings)
    parts = (
        "queue_seconds",
        "prepare_seconds",
        "wait_seconds",
        "forward_seconds",
        "finish_seconds",
        "total_seconds",
    )
    middle: Row = {
        name.removesuffix("_seconds"): median(float(getattr(one, name)) for one in stages) * 1e3
        for name in parts
    }
    p50, p99 = (percentile(totals, share) * 1e3 for share in (0.5, 0.99))
    context.add(
        {
            "what": "one query at idle",
            "queries": count,
            "p50_ms": p50,
            "p99_ms": p99,
            "stages_ms": {**middle},
        }
    )


async def _right(encode: Callable[[list[str]], Awaitable[Vectors]], mix: Mix) -> Row:
    """The mesh's vectors against those of the same model in float32 on the CPU."""
    texts = mix.texts[:64]
    found = await encode(texts)
    model = load_model(minilm_directory(), MINILM_ID, torch.device("cpu"), torch.float32)
    exact = np.stack(
        [
            np.asarray(one, np.float32)
            for one in model.forward("dense", model.prepare(EncodeWork(texts)).sequences)
        ]
    )
    cosines = (found * exact).sum(1) / np.linalg.norm(found, axis=1) / np.linalg.norm(exact, axis=1)
    row: Row = {"what": "vectors against float32 on the CPU", "lowest_cosine": float(cosines.min())}
    return (
        row
        if cosines.min() >= MIN_COSINE
        else row | {"error": f"cosine {cosines.min():.5f} < {MIN_COSINE}"}
    )


def _cpu() -> dict[str, float]:
    """Seconds of CPU so far of this process and of each that it has started, by role."""
    found = {"client": time.process_time()}
    for child in psutil.Process().children(recursive=True):
        try:
            command, times = child.cmdline(), child.cpu_times()
        except psutil.Error:
            continue
        role = next(
            (part.removeprefix("services.") for part in command if part.startswith("services.")),
            "redis",
        )
        found[role] = found.get(role, 0.0) + times.user + times.system
    return found


def _dtype(context: StepContext) -> torch.dtype:
    return torch.bfloat16 if context.has_cuda else torch.float32


def _name(context: StepContext) -> str:
    return "bfloat16" if context.has_cuda else "float32"
