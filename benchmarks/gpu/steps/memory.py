"""Many models on a budget, and real out-of-memory.

Forty random models of three sizes in a mesh: the worker's budget holds eight of the mean size on
the device and sixteen more in host memory, and requests follow Zipf's popularity; every model's
vector of one text is compared with the vector computed alone before. The worker's allocator may
take no more than the budget and its slack, as on a full device. Out of memory: a batch runs while a
plain allocation takes all but a part of the memory that it needs, and the worker's OOM recovery
handles CUDA's errors.
"""

from __future__ import annotations

import asyncio
import logging
import random
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from shoal import AsyncClient, ShoalError

from benchmarks.common.report import percentile
from benchmarks.common.texts import real_texts
from benchmarks.gpu import published
from benchmarks.gpu.context import StepContext
from benchmarks.gpu.report import Row
from libs.models import EncodeWork, InputSequence, Output, PackedModel, Unfinished, load_model
from services.local.mesh import running
from services.local.settings import Settings as MeshSettings
from services.worker.jobs.execution import oom_recovery
from services.worker.machine.device import open_device
from services.worker.settings import Settings
from tests.parity.checkpoints import write_checkpoint

MODELS: Final = 40
SIZES: Final = ((384, 6, 6), (512, 8, 8), (384, 6, 6), (768, 12, 12))
"""hidden, layers and heads of the models, in turn: a piece that a small model leaves is too small
for a large one.
"""

RESIDENT: Final = 8
WARM: Final = 16
REQUESTS: Final = 1500
CALLERS: Final = 16
BATCH_TOKENS: Final = 16_384
MIN_COSINE: Final = 0.999
ERRORS: Final = 3.0
SHARES: Final = (1.5, 0.6, 0.3, 0.1, 0.02)
"""Shares of the batch's memory need that are left on the device."""
SPARE: Final = 32 << 20

Vector = NDArray[np.float32]


def run(context: StepContext) -> None:
    context.measure("a batch that does not fit", lambda: rehearsed(context), seconds=5)
    for share in SHARES:
        what = f"out of memory, room for {share:g} of a batch"
        context.measure(what, partial(ladder_row, context, share), needs_cuda=True, seconds=8)
    context.measure(
        "out of memory, an idle model lets go",
        lambda: relieved(context),
        needs_cuda=True,
        seconds=8,
    )
    context.measure(f"{MODELS} models", lambda: many(context), seconds=30)
    failed = context.report.number(f"{MODELS} models", "failures")
    context.target(
        f"failures of {MODELS} models on a budget of {RESIDENT}",
        0,
        "requests",
        failed,
        at_most=True,
    )


def rehearsed(context: StepContext) -> Row:
    """The ladder on this device, with a forward that raises torch's error for more than a quarter
    of the batch.
    """
    model, sequences, exact = _model(context, 512)
    wanted = _vectors(model.forward("dense", sequences))
    limit = sum(one.tokens for one in sequences) // 4

    def forward(some: list[InputSequence]) -> list[Output]:
        if sum(one.tokens for one in some) > limit:
            raise torch.OutOfMemoryError("CUDA out of memory. (a rehearsal)")
        return model.forward("dense", some)

    recovery = oom_recovery.OomRecovery(
        recover=lambda: None, trim=lambda: None, relieve=lambda _: False
    )
    return _climbed(recovery, forward, sequences, wanted, exact)


def ladder_row(context: StepContext, share: float) -> Row:
    model, sequences, exact = _model(context, BATCH_TOKENS)
    wanted, need = _needed(model, sequences)
    device = open_device(Settings("bench", device="cuda", dtype="bfloat16"))
    recovery = oom_recovery.OomRecovery(device.recover, device.trim, relieve=lambda _: False)
    with _filled(int(need * share)):
        row = _climbed(
            recovery, lambda some: model.forward("dense", some), sequences, wanted, exact
        )
    again = _lowest_cosine(_vectors(model.forward("dense", sequences)), wanted)
    return row | {"batch_bytes": need, "cosine_after_it": again}


def relieved(context: StepContext) -> Row:
    """Run a batch without enough memory until an idle model that holds as much is evicted."""
    model, sequences, exact = _model(context, BATCH_TOKENS)
    wanted, need = _needed(model, sequences)
    device = open_device(Settings("bench", device="cuda", dtype="bfloat16"))
    idle = [torch.empty(2 * need + SPARE, dtype=torch.uint8, device=context.device)]

    def relieve(_: str) -> bool:
        had = bool(idle)
        idle.clear()
        torch.cuda.empty_cache()
        return had

    with _filled(need // 10):
        row = _climbed(
            oom_recovery.OomRecovery(device.recover, device.trim, relieve),
            lambda some: model.forward("dense", some),
            sequences,
            wanted,
            exact,
        )
    return row | {"batch_bytes": need}


def _model(context: StepContext, tokens: int) -> tuple[PackedModel, list[InputSequence], Vector]:
    """Return a model of BERT-base's shape, a batch of this many tokens, and its vectors in
    float32.
    """
    shape = published.shapes(context, ("BERT-base",))[0]
    model = published.loaded(shape, context)
    mix = real_texts(max(16, tokens // 40), directory=published.checkpoint(shape)[0])
    sequences: list[InputSequence] = []
    for one in model.prepare(EncodeWork(mix.texts)).sequences:
        if sum(each.tokens for each in sequences) + one.tokens > tokens:
            break
        sequences.append(one)
    exact = load_model(
        published.checkpoint(shape)[0], "random/exact", context.device, torch.float32
    )
    return model, sequences, _vectors(exact.forward("dense", sequences))


def _needed(model: PackedModel, sequences: list[InputSequence]) -> tuple[Vector, int]:
    """The batch's vectors with all the memory there is, and the bytes that its forward took at
    most.
    """
    model.forward("dense", sequences)
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    wanted = _vectors(model.forward("dense", sequences))
    return wanted, torch.cuda.max_memory_allocated() - before


@contextmanager
def _filled(left: int) -> Iterator[None]:
    """Leave about `left` free bytes on the device within the context: one allocation takes all
    others.
    """
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    filler = _taken(torch.cuda.mem_get_info()[0] - left - SPARE)
    try:
        yield
    finally:
        del filler
        torch.cuda.empty_cache()


def _taken(size: int) -> torch.Tensor:
    """One allocation of about `size` bytes: less where the driver has no piece that large."""
    while True:
        try:
            return torch.empty(max(0, size), dtype=torch.uint8, device="cuda")
        except torch.OutOfMemoryError:
            if size <= 0:
                raise
            size -= SPARE


class _Rungs(logging.Handler):
    """Collects which steps the ladder says that it takes."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.rungs: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        reported = getattr(record, "shoal_fields", None)
        self.rungs.append(
            str(reported.get("step", record.getMessage()))
            if isinstance(reported, dict)
            else record.getMessage()
        )


def _climbed(
    recovery: oom_recovery.OomRecovery,
    forward: Callable[[list[InputSequence]], list[Output]],
    sequences: list[InputSequence],
    wanted: Vector,
    exact: Vector,
) -> Row:
    """Return the steps taken, how many sequences failed, and if the vectors of the others are
    right: at most ERRORS times as far from float32 as the undisturbed batch's. A smaller batch has
    products of other shapes, which round differently, and random weights amplify that.
    """
    rungs = _Rungs()
    oom_recovery.log.addHandler(rungs)
    began = time.perf_counter()
    try:
        climbed = recovery.run("random/BERT-base", forward, sequences)
    finally:
        oom_recovery.log.removeHandler(rungs)
    took = time.perf_counter() - began
    errors = Counter(type(one).__name__ for one in climbed.outcomes if isinstance(one, Exception))
    fine = [number for number, one in enumerate(climbed.outcomes) if not isinstance(one, Exception)]
    found = (
        _vectors([one for one in climbed.outcomes if not isinstance(one, Exception | Unfinished)])
        if fine
        else wanted[:0]
    )
    row: Row = {
        "sequences": len(sequences),
        "seconds": took,
        "rungs": dict(Counter(rungs.rungs)),
        "is_clean": climbed.is_clean,
        "fitted_tokens": climbed.fitted_tokens,
        "failed": dict(errors),
        "lowest_cosine": _lowest_cosine(found, wanted[fine]) if fine else None,
        "error_recovered": _error(found, exact[fine]) if fine else None,
        "error_undisturbed": _error(wanted, exact),
    }
    if set(errors) - {"OutOfMemory"}:
        return row | {"error": f"sequences failed with {dict(errors)}"}
    if fine and _error(found, exact[fine]) > ERRORS * _error(wanted, exact):
        return row | {"error": "vectors differ after recovery"}
    return row


def _vectors(outputs: list[Output]) -> Vector:
    return np.stack([np.asarray(one, np.float32) for one in outputs])


def _error(found: Vector, exact: Vector) -> float:
    """The largest distance of a row, relative to the exact row's length."""
    return float((np.linalg.norm(found - exact, axis=1) / np.linalg.norm(exact, axis=1)).max())


def _lowest_cosine(found: Vector, wanted: Vector) -> float:
    return float(
        (
            (found * wanted).sum(1) / np.linalg.norm(found, axis=1) / np.linalg.norm(wanted, axis=1)
        ).min()
    )


def many(context: StepContext) -> Row:
    models, requests = (6, 40) if context.is_tiny else (MODELS, REQUESTS)
    sizes = ((32, 2, 2), (64, 2, 2)) if context.is_tiny else SIZES
    resident, warm = (2, 2) if context.is_tiny else (RESIDENT, WARM)
    text = "Programs such as the GPL are free software."
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        alone: dict[str, Vector] = {}
        batch_tokens = 256 if context.is_tiny else BATCH_TOKENS
        weights: list[int] = []
        activations = 0
        for number in range(models):
            hidden, layers, heads = sizes[number % len(sizes)]
            model_id = f"many/{number:02}"
            write_checkpoint(
                "bert",
                folder / model_id,
                seed=number,
                dtype=torch.bfloat16,
                hidden=hidden,
                layers=layers,
                heads=heads,
            )
            model = load_model(folder / model_id, model_id, context.device, torch.bfloat16)
            alone[model_id] = _vectors(
                model.forward("dense", model.prepare(EncodeWork([text])).sequences)
            )
            weights.append(model.bytes)
            if number < len(sizes):
                activations = max(activations, int(model.probe() * batch_tokens))
            del model
        context.forget()
        mean = sum(weights) / models
        budget = int(resident * mean * 1.1) + int(activations * 1.2)
        found = asyncio.run(
            _asked(
                context, folder, alone, text, requests, budget, int(warm * mean * 1.1), batch_tokens
            )
        )
    return {
        "models": models,
        "weights_bytes": sum(weights),
        "budget_bytes": budget,
        "batch_bytes": activations,
        **found,
    }


async def _asked(
    context: StepContext,
    folder: Path,
    alone: dict[str, Vector],
    text: str,
    requests: int,
    budget: int,
    host: int,
    batch_tokens: int,
) -> Row:
    environment = (
        ("SHOAL_MEMORY_BYTES", str(budget)),
        ("SHOAL_HOST_BYTES", str(host)),
        ("SHOAL_BATCH_TOKENS", str(batch_tokens)),
    )
    settings = MeshSettings(
        port=0,
        models=str(folder),
        dtype="bfloat16",
        device="cuda" if context.has_cuda else "cpu",
        environment=environment,
    )
    names = list(alone)
    chooser = random.Random(7)
    weights = [1 / (rank + 1) for rank in range(len(names))]
    asked = iter([*names, *chooser.choices(names, weights, k=requests)])
    seconds: list[float] = []
    failures: Counter[str] = Counter()
    cosines: list[float] = []

    async def caller(client: AsyncClient) -> None:
        for model in asked:
            if context.seconds_left < 5:
                return
            began = time.perf_counter()
            try:
                answer = await client.encode(model, [text])
            except ShoalError as error:
                failures[type(error).__name__] += 1
                continue
            seconds.append(time.perf_counter() - began)
            cosines.append(_lowest_cosine(answer.dequantize(), alone[model]))

    async with running(settings) as mesh, AsyncClient(mesh.address, timeout=60) as client:
        began = time.perf_counter()
        await asyncio.gather(*(caller(client) for _ in range(CALLERS)))
        took = time.perf_counter() - began
    row: Row = {
        "requests": len(seconds) + sum(failures.values()),
        "requests_per_second": len(seconds) / took,
        "p50_ms": percentile(seconds, 0.5) * 1e3,
        "p99_ms": percentile(seconds, 0.99) * 1e3,
        "failures": sum(failures.values()),
        "failed": dict(failures),
        "lowest_cosine": min(cosines),
    }
    return (
        row
        if min(cosines) >= MIN_COSINE
        else row | {"error": f"a vector's cosine to the model's own is {min(cosines):.4f}"}
    )
