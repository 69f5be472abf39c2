"""Measure how long the requests of a killed worker wait: `python -m benchmarks.stress.recovery`, or
`make bench-recovery`.

A real mesh with default settings (one router, two single-threaded workers, MiniLM) under steady
load. Every few seconds a worker is killed with SIGKILL and started again. A recovery is the time
from the kill to the last answer among the requests that were in flight then; without a killed
worker that is the duration of a request.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.progress import Progress
from shoal import AsyncClient

from benchmarks.common.texts import MINILM_ID, minilm_directory, real_texts
from tests.support.cluster import Cluster

TARGET_SECONDS = 3.0
CALM_SECONDS = 1.5
"""Seconds from a worker's readiness until the next kill."""


@dataclass(frozen=True, slots=True)
class RecoverySeconds:
    """Results of all kills: seconds from each to the last answer of requests in flight; requests
    answered and failed.
    """

    recoveries: list[float]
    answered: int
    failed: int

    def quantile(self, share: float) -> float:
        return float(np.quantile(self.recoveries, share))


@dataclass(slots=True)
class PacedLoad:
    """Requests at an even pace. `flying`: when each of those without an answer was sent."""

    client: AsyncClient
    texts: list[str]
    answered: int = 0
    failed: int = 0
    flying: set[asyncio.Task[None]] = field(default_factory=set)

    async def run(self, per_second: float) -> None:
        """Send requests until the task is cancelled."""
        while True:
            task = asyncio.create_task(self._ask(random.choice(self.texts)))
            self.flying.add(task)
            task.add_done_callback(self.flying.discard)
            await asyncio.sleep(1 / per_second)

    async def _ask(self, text: str) -> None:
        try:
            await self.client.encode(MINILM_ID, [text] * 4)
            self.answered += 1
        except Exception:
            self.failed += 1


async def measure(kills: int, per_second: float, seed: int, progress: Progress) -> RecoverySeconds:
    """Kill one worker after the other."""
    recoveries: list[float] = []
    chance = random.Random(seed)
    models = f"{MINILM_ID}={minilm_directory()}"
    bar = progress.add_task("kills", total=kills)
    with (
        tempfile.TemporaryDirectory() as directory,
        Cluster(Path(directory), models=models, workers=2) as cluster,
    ):
        async with AsyncClient(cluster.address) as client:
            load = PacedLoad(client, real_texts(200).texts)
            await client.encode(MINILM_ID, load.texts[:64])
            await client.models.load(MINILM_ID)
            pace = asyncio.create_task(load.run(per_second))
            for _ in range(kills):
                name = chance.choice(cluster.workers)
                await asyncio.sleep(CALM_SECONDS + chance.random())
                flying, began = list(load.flying), time.monotonic()
                await asyncio.to_thread(cluster.kill, name)
                await asyncio.gather(*flying)
                recoveries.append(time.monotonic() - began)
                cluster.start(name)
                await asyncio.to_thread(cluster.wait_ready, cluster.address)
                await client.models.load(
                    MINILM_ID
                )  # one more copy, so that the next kill finds work at either
                progress.advance(bar)
            pace.cancel()
            await asyncio.gather(*load.flying)
    return RecoverySeconds(recoveries, load.answered, load.failed)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument(
        "--per-second", type=float, default=15.0, help="requests of four texts each"
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    console = Console(stderr=True)
    with Progress(console=console, transient=True) as progress:
        result = asyncio.run(
            measure(arguments.kills, arguments.per_second, arguments.seed, progress)
        )
    p50, p99 = result.quantile(0.5), result.quantile(0.99)
    if arguments.json:
        json.dump(asdict(result), sys.stdout)
    else:
        reported = (
            f"{len(result.recoveries)} kills: p50 {p50:.2f} s, p99 {p99:.2f} s, longest "
            f"{max(result.recoveries):.2f} s"
        )
        Console().print(
            f"{reported} (target p99 {TARGET_SECONDS:g} s); {result.answered:,} answered, "
            f"{result.failed} failed"
        )
    sys.exit(0 if p99 <= TARGET_SECONDS and not result.failed else 1)


if __name__ == "__main__":
    main()
