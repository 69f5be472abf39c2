"""Measure how long a model takes to load: `python -m benchmarks.models.swap [--json]`.

all-MiniLM-L6-v2 through the worker's residency, on 1 and 2 threads: from the order to load it until
its first vector. First: the first load of a process, with its one-time costs. Cold: from the page
cache. Warm: from host memory. On a CUDA machine also the swap of a warm model of BERT-large's size
against its bytes over the measured host-to-device bandwidth.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import platform
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median

import torch

from benchmarks.common.texts import MINILM_ID, minilm_directory
from libs.kernels.linear.packed import has_bfloat16
from libs.models import EncodeWork, collect_outputs, load_model
from libs.models.interface.work import never_cancelled
from services.worker.machine.device import Device, open_device
from services.worker.memory.files import ModelFiles
from services.worker.memory.residency import Residency
from services.worker.settings import Settings, Shelf

COLD_SECONDS = 0.150
WARM_SECONDS = 0.050
TRANSFER_FACTOR = 1.5
TEXT = "Programs such as the GPL are free software."
LARGE = {
    "hidden_size": 1024,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "intermediate_size": 4096,
    "vocab_size": 30522,
}


@dataclass(frozen=True, slots=True)
class SwapRow:
    """`loads` and `vectors`: seconds of each round until the model was resident, and from then
    until the first vector.
    """

    name: str
    threads: int
    loads: tuple[float, ...]
    vectors: tuple[float, ...]
    target: float | None = None

    @property
    def seconds(self) -> list[float]:
        return [load + vector for load, vector in zip(self.loads, self.vectors, strict=True)]

    def line(self) -> str:
        total = median(self.seconds)
        verdict = (
            ""
            if self.target is None
            else f"   target {self.target * 1e3:.0f}: {'met' if total <= self.target else 'MISSED'}"
        )
        spread = f"({min(self.seconds) * 1e3:.1f}-{max(self.seconds) * 1e3:.1f})"
        parts = f"load {median(self.loads) * 1e3:.1f} + vector {median(self.vectors) * 1e3:.1f}"
        return (
            f"{self.name:6} {self.threads} threads  {total * 1e3:7.1f} ms {spread:16} = "
            f"{parts}{verdict}"
        )


@dataclass(frozen=True, slots=True)
class TransferSeconds:
    """Seconds of a warm model's transfer to a CUDA device.

    Attributes:
        copies: Seconds to copy as many bytes from pinned memory alone.
    """

    bytes: int
    swaps: tuple[float, ...]
    copies: tuple[float, ...]

    @property
    def factor(self) -> float:
        return median(self.swaps) / median(self.copies)

    def line(self) -> str:
        bandwidth = self.bytes / median(self.copies) / 1e9
        verdict = "met" if self.factor <= TRANSFER_FACTOR else "MISSED"
        return (
            f"warm swap of {self.bytes / 1e6:.0f} MB: {median(self.swaps) * 1e3:.2f} ms, "
            f"{self.factor:.2f} x its bytes at "
            f"{bandwidth:.1f} GB/s   target {TRANSFER_FACTOR}: {verdict}"
        )


class Bench:
    """A residency without other users."""

    def __init__(self, device: Device, host_bytes: int, tasks: asyncio.TaskGroup) -> None:
        self._changed = asyncio.Event()
        self._residency = Residency(
            ModelFiles((Shelf(minilm_directory(), MINILM_ID),), item_bytes=device.item_bytes),
            replace(device, host_bytes=host_bytes),
            tasks,
            clock=time.monotonic,
            changed=self._changed.set,
        )

    async def round(self) -> tuple[float, float]:
        """Seconds until the model is resident, and from then until its first vector; it is evicted
        again.
        """
        started = time.perf_counter()
        self._residency.load(MINILM_ID)
        while (resident := self._residency.serving(MINILM_ID)) is None:
            self._changed.clear()
            await self._changed.wait()
        loaded = time.perf_counter()
        prepared = resident.model.prepare(EncodeWork([TEXT]), never_cancelled)
        resident.model.finish(
            prepared, collect_outputs(resident.model.forward(prepared.head, prepared.sequences))
        )
        ended = time.perf_counter()
        del resident
        self._residency.evict(MINILM_ID)
        while self._residency.used_bytes:
            self._changed.clear()
            await self._changed.wait()
        return loaded - started, ended - loaded

    def stop(self) -> None:
        self._residency.stop()


async def measure(settings: Settings, rounds: int) -> list[SwapRow]:
    device = open_device(settings)
    device.enter()
    rows = []
    async with asyncio.TaskGroup() as tasks:
        for name, host_bytes, target in (
            ("cold", 0, COLD_SECONDS),
            ("warm", 1 << 30, WARM_SECONDS),
        ):
            bench = Bench(device, host_bytes, tasks)
            first = await bench.round()
            if name == "cold":
                rows.append(_row("first", settings.threads, [first], None))
            rows.append(
                _row(name, settings.threads, [await bench.round() for _ in range(rounds)], target)
            )
            bench.stop()
    return rows


def _row(
    name: str, threads: int, taken: Sequence[tuple[float, float]], target: float | None
) -> SwapRow:
    return SwapRow(
        name,
        threads,
        tuple(load for load, _ in taken),
        tuple(vector for _, vector in taken),
        target,
    )


def measure_transfer(rounds: int) -> TransferSeconds:
    """Needs a CUDA device."""
    from tests.parity.checkpoints import SentenceFiles, write_checkpoint

    device = torch.device("cuda")
    with tempfile.TemporaryDirectory() as root:
        directory = write_checkpoint(
            "bert",
            Path(root) / "large",
            sentence=SentenceFiles(),
            dtype=torch.bfloat16,
            config=LARGE,
        )
        model = load_model(directory, "random/large", device, torch.bfloat16)
    swaps, copies = [], []
    pinned = torch.empty(model.host_bytes, dtype=torch.uint8, pin_memory=True)
    target = torch.empty_like(pinned, device=device, pin_memory=False)
    for _ in range(rounds + 1):
        parked = model.park()
        swaps.append(_timed(parked.resume))
        copies.append(_timed(lambda: target.copy_(pinned, non_blocking=True)))
    return TransferSeconds(model.bytes, tuple(swaps[1:]), tuple(copies[1:]))


def _timed(work: Callable[[], object]) -> float:
    torch.cuda.synchronize()
    started = time.perf_counter()
    work()
    torch.cuda.synchronize()
    return time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument(
        "--json", action="store_true", help="one object on stdout instead of the table"
    )
    given = parser.parse_args()
    rows = []
    for threads in given.threads:
        rows += asyncio.run(
            measure(Settings("bench", device="cpu", dtype="float32", threads=threads), given.rounds)
        )
    transfer = measure_transfer(given.rounds) if torch.cuda.is_available() else None
    if given.json:
        reported = None if transfer is None else asdict(transfer)
        print(json.dumps({"rows": [asdict(row) for row in rows], "transfer": reported}))
        return
    bfloat16 = "native" if has_bfloat16() else "emulated"
    print(f"{platform.machine()}, bfloat16 {bfloat16}, torch {torch.__version__}")
    for row in rows:
        print(row.line())
    print("no CUDA device: the transfer was not measured" if transfer is None else transfer.line())


if __name__ == "__main__":
    main()
