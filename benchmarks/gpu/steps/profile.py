"""Divide a batch's time: torch's profiler over one batch of 16,384 tokens, its longest kernels, and
the gaps between them.

Then batches in turn, one at a time and two in flight, and the gaps between them.

Busy: the kernels' time over the median time of a pass without the profiler; the rest is the host's.
Arithmetic rate: the pass's FLOPs over the kernels' time.
"""

from __future__ import annotations

from functools import partial
from statistics import median
from typing import Any, Final

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.common.texts import real_texts
from benchmarks.gpu import published
from benchmarks.gpu.context import StepContext, peak
from benchmarks.gpu.report import Row
from benchmarks.models.families import FamilyShape, split_into_batches
from libs.models import EncodeWork, load_model
from libs.models.interface.pending import PendingBatch
from services.worker.profile.forward import ProfileBatch, profile_forward

BATCH_TOKENS: Final = 16_384
RUNS: Final = 9
IN_TURN: Final = 8
"""Batches that are computed one after the other."""

TOP: Final = 20
NAMES: Final = ("BERT-large", "ModernBERT-base", "Qwen3-0.6B")


def run(context: StepContext) -> None:
    for shape in published.shapes(context, NAMES):
        context.measure(shape.name, partial(measure, context, shape), seconds=15)
        context.measure(
            f"{shape.name}, two in flight",
            partial(in_flight, context, shape),
            needs_cuda=True,
            seconds=8,
        )
    context.measure(
        "copy bandwidth and matrix rate", lambda: ceilings(context), needs_cuda=True, seconds=5
    )


def in_flight(context: StepContext, shape: FamilyShape) -> Row:
    """Seconds of a batch among IN_TURN, collected before the next one is launched and after, as the
    worker does.
    """
    directory, _ = published.checkpoint(shape)
    model = load_model(directory, f"random/{shape.name}", context.device, torch.bfloat16)
    mix = real_texts(16 if context.is_tiny else 512, directory=directory)
    batch = split_into_batches(
        model.prepare(EncodeWork(mix.texts)).sequences, 128 if context.is_tiny else BATCH_TOKENS
    )[0]
    gaps: list[float] = []

    def collect(launched: PendingBatch) -> None:
        launched.collect()
        gaps.append(launched.idle_seconds)

    def one_at_a_time() -> None:
        for _ in range(IN_TURN):
            collect(model.launch("dense", batch))

    def two() -> None:
        before = model.launch("dense", batch)
        for _ in range(IN_TURN - 1):
            following = model.launch("dense", batch)
            collect(before)
            before = following
        collect(before)

    row: Row = {}
    for what, work in {"one_at_a_time": one_at_a_time, "two_in_flight": two}.items():
        work()
        gaps.clear()
        row[f"seconds_{what}"] = median(context.timed(work) for _ in range(3)) / IN_TURN
        row[f"gap_seconds_{what}"] = median(gaps)
    return row


def measure(context: StepContext, shape: FamilyShape) -> Row:
    texts, tokens, runs = (16, 128, 2) if context.is_tiny else (512, BATCH_TOKENS, RUNS)
    directory, reference = published.checkpoint(shape)
    mix = real_texts(texts, directory=directory)
    model = load_model(directory, f"random/{shape.name}", context.device, torch.bfloat16)
    batch = split_into_batches(model.prepare(EncodeWork(mix.texts)).sequences, tokens)[0]
    chosen = mix.texts[: len(batch)]
    work = EncodeWork(chosen)
    whole = ProfileBatch(chosen, work, model.prepare(work).tokens)
    parts = profile_forward(
        model, whole, runs=runs, device=context.device.type, threads=torch.get_num_threads()
    )

    def forward() -> object:
        return model.forward("dense", batch)

    plain = median(context.timed(forward) for _ in range(runs))
    kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if context.has_cuda else [])]
    with profile(activities=kinds, acc_events=True) as profiler:
        forward()
        context.wait()
    events = kernels(profiler.key_averages(), on_device=context.has_cuda)
    counted = published.flops(reference, shape, [sequence.tokens for sequence in batch])
    kernel_seconds = sum(seconds for _, seconds, _ in events)
    limit = peak(context.device)
    return {
        "tokens": sum(sequence.tokens for sequence in batch),
        "seconds": plain,
        "kernel_seconds": kernel_seconds,
        "launches": sum(count for _, _, count in events),
        "busy": kernel_seconds / plain,
        "flops": counted,
        "mfu": None if limit is None else counted / plain / limit,
        "mfu_while_busy": None
        if limit is None or not kernel_seconds
        else counted / kernel_seconds / limit,
        "parts": {str(part): seconds for part, seconds in parts.parts.items()},
        "top": [
            {
                "kernel": name[:160],
                "seconds": seconds,
                "count": count,
                "share": seconds / max(kernel_seconds, 1e-12),
            }
            for name, seconds, count in events[:TOP]
        ],
    }


def kernels(averages: Any, *, on_device: bool) -> list[tuple[str, float, int]]:
    """Name, seconds and count of each kernel, the longest first; on a CPU, of each operator without
    those that it calls.
    """
    found = []
    for one in averages:
        if on_device and str(one.device_type).endswith("CPU"):
            continue
        micros = one.self_device_time_total if on_device else one.self_cpu_time_total
        if micros > 0:
            found.append((str(one.key), micros / 1e6, int(one.count)))
    return sorted(found, key=lambda one: -one[1])


def ceilings(context: StepContext) -> Row:
    """Measure the ceilings of this GPU with plain torch: a copy within its memory, counting bytes
    read and written, and a matrix product.
    """
    size = 8192
    source = torch.empty(4 << 30, dtype=torch.uint8, device=context.device)
    target = torch.empty_like(source)
    left, right = (
        torch.randn(size, size, device=context.device, dtype=torch.bfloat16) for _ in range(2)
    )

    def once(work: Any) -> float:
        work()
        return median(context.timed(work) for _ in range(7))

    copied = once(lambda: target.copy_(source))
    multiplied = once(lambda: left @ right)
    return {
        "copy_bytes_per_second": 2 * source.numel() / copied,
        "matrix_flops_per_second": 2 * size**3 / multiplied,
    }
