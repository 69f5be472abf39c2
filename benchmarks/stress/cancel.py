"""Measure how much device time is spent on cancelled work: `python -m benchmarks.stress.cancel`, or
`make bench-cancel`.

A real mesh (Redis, router, single-threaded workers, MiniLM) and a backlog: so large that each
request waits for many forward passes. In the first phase all are answered, which gives a request's
duration and device time. In the second each is cancelled with the probability `--share`, at a
uniformly drawn moment of its expected duration; another follows at once.

Wasted time is reported by workers: the shares, by tokens, of forward passes in jobs that were
cancelled before their answer was taken. A job that is known to be cancelled is never computed
(tests/worker/test_worker.py), so all of it fell to jobs in a running forward pass or with a
cancellation on its way. A second figure does not depend on that account: the tokens of all forward
passes, from the workers' logs, less those of the received answers.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from itertools import count
from pathlib import Path
from statistics import fmean

from rich.console import Console
from rich.progress import Progress
from shoal import AsyncClient

from benchmarks.common.texts import MINILM_ID, minilm_directory, real_texts
from services.local.mesh import running
from services.local.settings import Settings

TARGET = 0.05
ENVIRONMENT = (("SHOAL_LOG_LEVEL", "DEBUG"), ("SHOAL_MAX_QUEUED_SECONDS", "600"))
"""Workers log each forward pass; and the backlog is meant: nothing of it is to be refused."""
SETTLE_SECONDS = 3.0
"""Heartbeats are sent every two seconds."""


@dataclass(frozen=True, slots=True)
class CancelPhase:
    """The results of one phase. Seconds and tokens are of all workers together.

    Attributes:
        life_seconds: The mean duration of an answered request.
    """

    answered: int
    cancelled: int
    life_seconds: float
    device_seconds: float
    wasted_seconds: float
    computed_tokens: int
    answered_tokens: int


@dataclass(frozen=True, slots=True)
class CancelResult:
    """The results of a run: both phases, the share of device time that workers report as wasted,
    and the share of tokens without an answer.
    """

    concurrency: int
    cancel_share: float
    calm: CancelPhase
    stormy: CancelPhase
    wasted_share: float
    unanswered_share: float


class ClosedLoad:
    """Requests in a closed loop: each is followed by another until the time is over."""

    def __init__(
        self,
        client: AsyncClient,
        logs: Sequence[Path],
        texts: list[str],
        *,
        items: int,
        concurrency: int,
        seed: int,
    ) -> None:
        self._client, self._logs, self._texts, self._items, self._concurrency = (
            client,
            logs,
            texts,
            items,
            concurrency,
        )
        self._chance = random.Random(seed)
        self._numbers = count()

    async def run(
        self, seconds: float, tick: Callable[[int], None], *, share: float = 0.0, life: float = 0.0
    ) -> CancelPhase:
        """`share`: the chance of a request to be cancelled, at a moment of its `life` (seconds)."""
        before, tokens_before = await self._device(), self._computed()
        lives: list[float] = []
        cancelled, answered_tokens, until = 0, 0, time.monotonic() + seconds

        async def one_after_another() -> None:
            nonlocal cancelled, answered_tokens
            while time.monotonic() < until:
                began = time.monotonic()
                patience = (
                    self._chance.uniform(0.0, life) if self._chance.random() < share else None
                )
                tokens = await self._ask(patience)
                if tokens is None:
                    cancelled += 1
                else:
                    lives.append(time.monotonic() - began)
                    answered_tokens += tokens
                tick(len(lives) + cancelled)

        async with asyncio.TaskGroup() as group:
            for _ in range(self._concurrency):
                group.create_task(one_after_another())
        await asyncio.sleep(SETTLE_SECONDS)
        device, wasted = (
            now - then for now, then in zip(await self._device(), before, strict=True)
        )
        return CancelPhase(
            len(lives),
            cancelled,
            fmean(lives),
            device,
            wasted,
            self._computed() - tokens_before,
            answered_tokens,
        )

    async def _ask(self, patience: float | None) -> int | None:
        """The answer's tokens; None if it was cancelled."""
        first = next(self._numbers) * self._items
        texts = [self._texts[(first + step) % len(self._texts)] for step in range(self._items)]
        task = asyncio.create_task(self._client.encode(MINILM_ID, texts, timeout=120))
        await asyncio.wait([task], timeout=patience)
        if task.done():
            return task.result().usage.input_tokens
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
        return None

    def _computed(self) -> int:
        """Tokens of all forward passes, without widenings."""
        lines = (
            json.loads(line)
            for log in self._logs
            for line in log.read_text().splitlines()
            if '"batch"' in line
        )
        return sum(line["tokens"] for line in lines if line["message"] == "batch")

    async def _device(self) -> tuple[float, float]:
        workers = (await self._client.mesh()).workers
        return sum(worker.device_seconds for worker in workers), sum(
            worker.wasted_seconds for worker in workers
        )


async def measure(options: argparse.Namespace, console: Console) -> CancelResult:
    settings = Settings(
        port=0,
        workers=options.workers,
        models=f"{MINILM_ID}={minilm_directory()}",
        dtype="float32",
        environment=ENVIRONMENT,
    )
    async with running(settings) as mesh, AsyncClient(mesh.address) as client:
        texts = real_texts(512, options.seed).texts
        logs = [mesh.logs / f"worker-{number}.log" for number in range(options.workers)]
        load = ClosedLoad(
            client,
            logs,
            texts,
            items=options.items,
            concurrency=options.concurrency,
            seed=options.seed,
        )
        with Progress(console=console, transient=True, disable=options.json) as progress:
            task = progress.add_task("loading", total=None)

            def tick(name: str) -> Callable[[int], None]:
                return lambda done: progress.update(task, description=f"{name}: {done} requests")

            await load.run(1.0, tick("warming up"))
            calm = await load.run(options.seconds / 2, tick("without cancellations"))
            stormy = await load.run(
                options.seconds,
                tick("with cancellations"),
                share=options.share,
                life=calm.life_seconds,
            )
    return CancelResult(
        options.concurrency,
        options.share,
        calm,
        stormy,
        stormy.wasted_seconds / stormy.device_seconds,
        1 - stormy.answered_tokens / stormy.computed_tokens,
    )


def show(result: CancelResult, console: Console) -> None:
    for name, phase in (
        ("without cancellations", result.calm),
        ("with cancellations", result.stormy),
    ):
        console.print(
            f"{name}: {phase.answered} answered in {phase.life_seconds:.2f} s on average, "
            f"{phase.cancelled} cancelled; "
            f"device {phase.device_seconds:.2f} s, wasted {phase.wasted_seconds:.3f} s",
            soft_wrap=True,
        )
    met = "met" if result.wasted_share < TARGET else "MISSED"
    console.print(
        (
            f"wasted: {result.wasted_share:.2%} of the device's time (target below {TARGET:.0%}: "
            f"{met})"
        ),
        soft_wrap=True,
    )
    tokens = (
        f"{result.stormy.computed_tokens:,} tokens computed, {result.stormy.answered_tokens:,} "
        "answered"
    )
    console.print(f"{tokens}: {result.unanswered_share:.2%} had no answer", soft_wrap=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--seconds",
        type=float,
        default=30.0,
        help="of the phase with cancellations; the one before takes half",
    )
    parser.add_argument("--concurrency", type=int, default=256, help="requests at a time")
    parser.add_argument("--items", type=int, default=1, help="texts of a request")
    parser.add_argument("--share", type=float, default=0.5, help="of requests that are cancelled")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args()
    console = Console()
    result = asyncio.run(measure(options, console))
    if options.json:
        print(json.dumps(asdict(result)))
    else:
        show(result, console)


if __name__ == "__main__":
    main()
