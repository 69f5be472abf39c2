"""A model's way to the GPU: warm models of several sizes from host memory, against a plain copy of
as many bytes from pinned memory; and all-MiniLM-L6-v2 through the worker's residency, from the
order to load it until its first vector.
"""

from __future__ import annotations

import asyncio
import time
from functools import partial
from statistics import median
from typing import Final

import torch

from benchmarks.gpu import published, roofline
from benchmarks.gpu.context import StepContext
from benchmarks.gpu.report import Row
from benchmarks.models.families import FamilyShape
from benchmarks.models.swap import measure as residency
from libs.models import EncodeWork
from services.worker.settings import Settings

ROUNDS: Final = 15
NAMES: Final = ("MiniLM-L6", "BERT-base", "BERT-large", "Qwen3-0.6B")
HELD: Final = "BERT-large"
FACTOR_BOUND: Final = 1.2


def run(context: StepContext) -> None:
    context.measure("residency of all-MiniLM-L6-v2", lambda: minilm(context), seconds=10)
    for shape in published.shapes(context, NAMES):
        context.measure(
            f"warm {shape.name}", partial(swap, context, shape), needs_cuda=True, seconds=10
        )
    factor = context.report.number(f"warm {HELD}", "factor")
    context.target(
        f"warm swap of {HELD} / its bytes at the copy bandwidth",
        FACTOR_BOUND,
        "x",
        factor,
        at_most=True,
    )


def minilm(context: StepContext) -> Row:
    rounds = 1 if context.is_tiny else ROUNDS
    settings = Settings(
        "bench",
        device="cuda" if context.has_cuda else "cpu",
        dtype="bfloat16" if context.has_cuda else "float32",
        threads=1,
    )
    rows = asyncio.run(residency(settings, rounds))
    return {
        name: value
        for row in rows
        for name, value in (
            (f"{row.name}_ms", median(row.seconds) * 1e3),
            (f"{row.name}_load_ms", median(row.loads) * 1e3),
            (f"{row.name}_first_vector_ms", median(row.vectors) * 1e3),
        )
    }


def swap(context: StepContext, shape: FamilyShape) -> Row:
    """Seconds of a resume until its bytes are there, of the first vector after it, of a park, and
    of plain copies.
    """
    model = published.loaded(shape, context)
    prepared = model.prepare(EncodeWork(["a b c"]))
    size = model.bytes
    pinned = torch.empty(size, dtype=torch.uint8, pin_memory=True)
    target = torch.empty(size, dtype=torch.uint8, device=context.device)
    taken: dict[str, list[float]] = {"park": [], "swap": [], "copy": [], "first_vector": []}
    for _ in range(ROUNDS + 1):
        began = time.perf_counter()
        parked = model.park()
        taken["park"].append(time.perf_counter() - began)
        taken["swap"].append(context.timed(parked.resume))
        taken["first_vector"].append(
            context.timed(lambda: model.forward(prepared.head, prepared.sequences))
        )
        taken["copy"].append(context.timed(lambda: target.copy_(pinned, non_blocking=True)))
    middle = {name: median(seconds[1:]) for name, seconds in taken.items()}
    row: Row = {
        "bytes": size,
        "copy_bytes_per_second": size / middle["copy"],
        "factor": middle["swap"] / middle["copy"],
        **{f"{name}_ms": seconds * 1e3 for name, seconds in middle.items()},
        "first_park_ms": taken["park"][0] * 1e3,
    }
    if context.rates is None:
        return row
    return roofline.compared(row, {"swap_ms": roofline.swap_seconds(context.rates, size) * 1e3})
