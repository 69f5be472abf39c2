"""Measure encoders together with generative models on one worker: `python -m
benchmarks.stress.mixed`, or `make bench-mixed`.

A real mesh (Redis, router, one worker of one thread). MiniLM receives single texts at a steady rate
together with eight callers who each have a random qwen3 generate one text after another, and alone,
half of that time before and half after, since shared machines have slow minutes. In the middle of
the generation half of the callers cancel, and at the end all. Measured: the encoder's latency and
lost requests; the memory of keys and values that sequences have claimed, from the worker's metrics;
and the rest of it after the end.

The bound is that of `make bench-fairness`: 1.5 times the encoder's p99 alone, and one forward of
the generative model.

Needs transformers, for the generative model's checkpoint.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import random
import re
import tempfile
import time
import urllib.request
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from rich.console import Console
from shoal import AsyncClient, ReadText

from benchmarks.common.texts import MINILM_ID, minilm_directory, real_texts
from tests.generation.served import TEMPLATE
from tests.parity.checkpoints import write_checkpoint
from tests.support.cluster import Cluster, lasting_port

GENERATIVE = "random/generative"
SETTLE_SECONDS = 3.0


@dataclass(frozen=True, slots=True)
class MixedPhase:
    """Latencies of the encoder's requests in milliseconds, and how many of them failed."""

    asked: int
    failed: int
    p50: float
    p99: float


@dataclass(frozen=True, slots=True)
class MixedResult:
    """The results of a run.

    Attributes:
        forward: Mean milliseconds of a forward of the generative model.
        most_claimed: Maximum bytes of keys and values during generation.
        left_claimed: Bytes of keys and values after the end.
        resident: Bytes of the worker's memory that the generative model took, including weights.
    """

    rate: float
    alone: MixedPhase
    beside: MixedPhase
    forward: float
    texts: int
    tokens: int
    tokens_per_second: float
    writers_failed: int
    most_claimed: int
    left_claimed: int
    resident: int

    @property
    def bound(self) -> float:
        return 1.5 * self.alone.p99 + self.forward


def write_model(directory: Path, layers: int, hidden: int) -> None:
    write_checkpoint(
        "qwen3",
        directory,
        head="causal_lm",
        hidden=hidden,
        layers=layers,
        heads=hidden // 64,
        positions=4096,
    )
    (directory / "chat_template.jinja").write_text(TEMPLATE)
    generation = {"eos_token_id": None, "no_repeat_ngram_size": 3}
    (directory / "generation_config.json").write_text(json.dumps(generation))


class Metrics:
    """The worker's metrics, by the start of their lines."""

    def __init__(self, address: str) -> None:
        self._url = f"http://{address}/metrics"

    async def sum(self, name: str, model: str = GENERATIVE) -> float:
        text = await asyncio.to_thread(
            lambda: urllib.request.urlopen(self._url, timeout=10).read().decode()
        )
        return sum(
            float(value)
            for value in re.findall(
                rf'^{name}{{[^}}]*model="{model}"[^}}]*}} (\S+)$', text, re.MULTILINE
            )
        )


class PoissonLoad:
    """The encoder's requests: single texts at Poisson times, whatever the answers take."""

    def __init__(self, client: AsyncClient, texts: Sequence[str], rate: float) -> None:
        self._client, self._texts, self._rate = client, texts, rate
        self._chance = random.Random(3)
        self._took: list[float] = []
        self._failed = 0

    async def run(self, seconds: float) -> None:
        """Return when all that was asked for is answered."""
        tasks = []
        start, due = time.perf_counter(), 0.0
        while due < seconds:
            due += self._chance.expovariate(self._rate)
            await asyncio.sleep(max(0.0, start + due - time.perf_counter()))
            tasks.append(asyncio.create_task(self._ask(self._chance.choice(self._texts))))
        await asyncio.gather(*tasks)

    async def _ask(self, text: str) -> None:
        began = time.perf_counter()
        try:
            await self._client.encode(MINILM_ID, [text], timeout=30)
        except Exception:
            self._failed += 1
        else:
            self._took.append(1000 * (time.perf_counter() - began))

    @property
    def phase(self) -> MixedPhase:
        p50, p99 = np.percentile(self._took, (50, 99)).tolist()
        return MixedPhase(len(self._took) + self._failed, self._failed, p50, p99)


async def measure(options: argparse.Namespace, models: Path, console: Console) -> MixedResult:
    address = f"127.0.0.1:{lasting_port()}"
    mesh = Cluster(
        models / "mesh",
        models=f"{MINILM_ID}={minilm_directory()}:{models / 'models'}",
        dtype=options.dtype,
        each={"worker-0": {"SHOAL_METRICS_ADDRESS": address}},
    )
    texts = [text[: options.characters] for text in real_texts(512).texts]
    with mesh:
        return await _measure(options, texts, mesh.address, Metrics(address), console)


async def _measure(
    options: argparse.Namespace,
    texts: Sequence[str],
    address: str,
    metrics: Metrics,
    console: Console,
) -> MixedResult:
    async with AsyncClient(address, timeout=120) as client:
        await client.encode(MINILM_ID, texts[:32])
        await client.extract(GENERATIVE, ["warm"], ReadText(max_tokens=4))
        alone, beside = (
            PoissonLoad(client, texts, options.rate),
            PoissonLoad(client, texts, options.rate),
        )
        console.print(f"alone: {options.rate:g} texts per second for {options.seconds / 2:g} s")
        await alone.run(options.seconds / 2)
        written, tokens, failed, claims = 0, 0, 0, [0.0]

        async def write(number: int) -> None:
            nonlocal written, tokens, failed
            while True:
                try:
                    found = await client.extract(
                        GENERATIVE, [texts[number]], ReadText(max_tokens=options.tokens)
                    )
                except Exception:
                    failed += 1
                else:
                    written, tokens, number = (
                        written + 1,
                        tokens + found.usage.output_tokens,
                        (number + 8) % len(texts),
                    )

        async def watch() -> None:
            while True:
                claims.append(await metrics.sum("shoal_key_value_bytes"))
                await asyncio.sleep(0.2)

        sums = [await metrics.sum(f"shoal_forward_seconds_{name}") for name in ("sum", "count")]
        console.print(
            f"with {options.writers} generating callers, half of which cancel in the middle"
        )
        tasks = [asyncio.create_task(write(number)) for number in range(options.writers)]
        watching = asyncio.create_task(watch())
        asyncio.get_running_loop().call_later(
            options.seconds / 2, lambda: [task.cancel() for task in tasks[::2]]
        )
        began = time.perf_counter()
        await beside.run(options.seconds)
        took = time.perf_counter() - began
        for task in (*tasks, watching):
            task.cancel()
        for task in (*tasks, watching):
            with suppress(asyncio.CancelledError):
                await task
        more = [await metrics.sum(f"shoal_forward_seconds_{name}") for name in ("sum", "count")]
        await asyncio.sleep(SETTLE_SECONDS)
        left = await metrics.sum("shoal_key_value_bytes")
        resident = await metrics.sum("shoal_resident_bytes")
        console.print(f"alone again, for {options.seconds / 2:g} s")
        await alone.run(options.seconds / 2)
    forward = 1000 * (more[0] - sums[0]) / max(more[1] - sums[1], 1)
    return MixedResult(
        options.rate,
        alone.phase,
        beside.phase,
        forward,
        written,
        tokens,
        tokens / took,
        failed,
        int(max(claims)),
        int(left),
        int(resident),
    )


def show(result: MixedResult, console: Console) -> None:
    for name, phase in (("alone", result.alone), ("with generation", result.beside)):
        text = (
            f"p50 {phase.p50:.1f} ms, p99 {phase.p99:.1f} ms, {phase.failed} of {phase.asked:,} "
            "failed"
        )
        console.print(f"encoder {name}: {text}", soft_wrap=True)
    met = "met" if result.beside.p99 <= result.bound else "MISSED"
    console.print(
        f"bound: {result.bound:.1f} ms ({met}); a forward of the writer takes "
        f"{result.forward:.1f} ms on average"
    )
    console.print(
        f"writers: {result.texts:,} texts, {result.tokens:,} tokens, "
        f"{result.tokens_per_second:.0f} a second, "
        f"{result.writers_failed} failed; keys and values: at most "
        f"{result.most_claimed / 2**20:.1f} MiB claimed of a model of "
        f"{result.resident / 2**20:.1f} MiB, {result.left_claimed} bytes left claimed after the "
        "end",
        soft_wrap=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=60.0, help="of each phase")
    parser.add_argument("--rate", type=float, default=200.0, help="texts per second")
    parser.add_argument("--characters", type=int, default=40, help="of each text at most")
    parser.add_argument("--writers", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=200, help="of each text")
    parser.add_argument("--layers", type=int, default=6, help="of the writer")
    parser.add_argument("--hidden", type=int, default=256, help="size of the writer")
    parser.add_argument("--dtype", default="bfloat16", choices=("float32", "bfloat16"))
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args()
    console = Console(stderr=options.json)
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        (root / "mesh").mkdir()
        write_model(root / "models" / GENERATIVE, options.layers, options.hidden)
        # transformers, which wrote the checkpoint, left objects that the garbage collector would
        # collect during the measurement, which would stop this client for 0.2 s.
        gc.collect()
        gc.freeze()
        result = asyncio.run(measure(options, root, console))
        gc.unfreeze()
    if options.json:
        print(json.dumps(asdict(result)))
    else:
        show(result, console)


if __name__ == "__main__":
    main()
