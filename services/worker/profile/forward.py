"""Runs one batch through a model with and without torch's profiler, to measure the time of each
part and the overhead of the profiler.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Final

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from libs.errors import TaskNotSupported
from libs.models import PackedModel, Work
from libs.models.runtime.precision.samples import works
from libs.store import Copy
from services.worker.machine.device import open_device
from services.worker.profile.ranges import named_parts
from services.worker.profile.trace import FORWARD, Forward, Part, forwards, read
from services.worker.settings import Settings

_WARM_RUNS: Final = 3
"""Forward passes before the measured ones."""


@dataclass(frozen=True, slots=True)
class ProfileBatch:
    """The input of a forward pass: a job about as large as the maximum batch.

    Attributes:
        tokens: Tokens of the whole job.
    """

    texts: list[str]
    work: Work
    tokens: int


@dataclass(frozen=True, slots=True)
class ForwardProfile:
    """Timings of forward passes, in seconds."""

    model: str
    device: str
    dtype: str
    threads: int
    texts: int
    tokens: int
    runs: int
    """Number of passes with and without the profiler."""
    seconds: float
    """The median forward pass under the profiler."""
    plain_seconds: float
    """The median forward pass without the profiler."""
    parts: Mapping[Part, float]
    """Seconds of each part of the median profiled pass, as in `trace.py`."""
    inside: Mapping[Part, Mapping[str, float]]
    """Seconds of torch's operators within each part, by name."""
    prepare_seconds: float
    """Tokenising before the pass, which a worker does on other threads."""
    finish_seconds: float
    """Making the answer after the pass, which a worker does on other threads."""

    @property
    def covered(self) -> float:
        """Return the sum of the parts as a share (0..1) of the whole pass."""
        return sum(self.parts.values()) / self.seconds

    @property
    def overhead(self) -> float:
        """Return the time that the profiler adds, as a share of a pass without it."""
        return self.seconds / self.plain_seconds - 1


def load(settings: Settings, model: str, copy: Copy) -> tuple[PackedModel, str, int]:
    """Load the model as a worker with these settings would. Return it, the device's name, and the
    maximum batch tokens.

    The calling thread computes with as many threads as such a worker's device thread. Raises
    ShoalError.
    """
    device = open_device(settings)
    loaded = device.load(copy.directory, model, copy.base)
    device.enter()
    if not isinstance(loaded, PackedModel):
        raise TaskNotSupported(f"{model} is not a text model; only text models can be profiled")
    return loaded, device.name, device.batch_tokens


def fill(
    model: PackedModel, texts: Iterator[str], most_tokens: int, most_texts: int
) -> ProfileBatch:
    """Return a batch for the model's first task, filled with texts in their order, at least one, up
    to `most_tokens` tokens and `most_texts` texts.
    """
    taken: list[str] = []
    tokens = 0
    for text in texts:
        more = model.prepare(first_work(model, [text])).tokens
        if taken and (tokens + more > most_tokens or len(taken) == most_texts):
            break
        taken.append(text)
        tokens += more
    work = first_work(model, taken)
    return ProfileBatch(taken, work, model.prepare(work).tokens)


def first_work(model: PackedModel, texts: list[str]) -> Work:
    """Make a job for the model's first task."""
    return next(works(model.card, texts))


def profile_forward(
    model: PackedModel,
    batch: ProfileBatch,
    *,
    runs: int,
    device: str,
    threads: int,
    trace: Path | None = None,
) -> ForwardProfile:
    """Run the batch `runs` times without and `runs` times under the profiler. `trace` is the output
    path of the trace.
    """
    prepared = model.prepare(batch.work)
    if not prepared.sequences:
        raise TaskNotSupported(
            f"{model.card.model} uses a lookup table and has no forward pass to profile"
        )

    def forward() -> object:
        return model.forward_all(prepared)

    outputs = model.forward_all(prepared)
    _timed(forward, _WARM_RUNS)
    # Half of the plain runs are before and half after the profiled ones, since machine speed
    # drifts.
    plain = _timed(forward, runs - runs // 2)
    seen = _traced(model, forward, runs, trace)
    plain += _timed(forward, runs // 2)
    middle = sorted(seen, key=lambda one: one.seconds)[runs // 2]
    return ForwardProfile(
        model=model.card.model,
        device=device,
        dtype=model.data_type,
        threads=threads,
        texts=len(batch.texts),
        tokens=batch.tokens,
        runs=runs,
        seconds=middle.seconds,
        plain_seconds=median(plain),
        parts=middle.parts,
        inside=middle.inside,
        prepare_seconds=median(_timed(lambda: model.prepare(batch.work), runs)),
        finish_seconds=median(_timed(lambda: model.finish(prepared, outputs), runs)),
    )


def _timed(call: Callable[[], object], times: int) -> list[float]:
    """Return the seconds that each call takes."""
    seconds = []
    for _ in range(times):
        started = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - started)
    return seconds


def _traced(
    model: PackedModel, forward: Callable[[], object], runs: int, path: Path | None
) -> list[Forward]:
    """Trace each run but the first, in which the profiler sets itself up. `path` is the output path
    of the trace.
    """
    activities = [
        ProfilerActivity.CPU,
        *([ProfilerActivity.CUDA] if torch.cuda.is_available() else []),
    ]
    with TemporaryDirectory() as directory:
        path = path or Path(directory) / "trace.json"
        with named_parts(model), profile(activities=activities) as profiler:
            for _ in range(runs + 1):
                with record_function(FORWARD):
                    forward()
        profiler.export_chrome_trace(str(path))
        return forwards(read(path))[1:]
