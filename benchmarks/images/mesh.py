"""The mesh against its parts: images/s of preparing alone, of the forward alone and of a mesh, in
turns in one run.

All have as many threads as cores exist. Where the device is these cores, preparing and forward
share them: the mesh cannot be faster than `shared`, one over the sum of both times, whatever
overlaps. On a GPU the slower one of the two counts.
"""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch
from shoal import AsyncClient

from benchmarks.images.encoders import EncoderShape, packed_run, prepare_sequences
from benchmarks.models.families import DTYPES
from libs.models.images.loading import ImageModel, load_images
from services.local.mesh import running
from services.local.settings import Settings

NAME = "random/images"
CALLERS, REQUEST = 4, 8
"""Number of callers at once, and number of images in each of their requests, sent one after the
other.
"""
MIN_RATIO = 0.9
UNCACHED = (("SHOAL_IMAGE_CACHE_BYTES", "0"),)
"""Every photograph is sent several times: a kept output would be found in place of a forward."""


@dataclass(frozen=True, slots=True)
class InMesh:
    """Images a second.

    Attributes:
        ratio: The mesh over the slower of `prepare` and `forward`.
        of_shared: The mesh over the limit of the shared cores.
    """

    shape: str
    dtype: str
    prepare: float
    forward: float
    mesh: float
    ratio: float
    of_shared: float


async def measure_mesh(
    shapes: Sequence[EncoderShape],
    dtype: str,
    photos: Sequence[bytes],
    rounds: int,
    layers: int,
    device: torch.device,
) -> list[InMesh]:
    """Print each line when it is measured."""
    head = (
        f"{'mesh, 1 worker':22} {'dtype':9} {'prepare/s':>10} {'forward/s':>10} {'mesh/s':>8} "
        f"{'x min':>6} {'x shared':>9}"
    )
    print("", head, "-" * len(head), sep="\n", flush=True)
    found = []
    for shape in shapes:
        print(f"{shape.name} {dtype}", file=sys.stderr)
        found.append(one := await _measure(shape, dtype, photos, rounds, layers, device))
        rates = (
            f"{one.prepare:10.1f} {one.forward:10.1f} {one.mesh:8.1f} {one.ratio:6.2f} "
            f"{one.of_shared:9.2f}"
        )
        print(f"{one.shape:22} {one.dtype:9} {rates}", flush=True)
    return found


async def _measure(
    shape: EncoderShape,
    dtype: str,
    photos: Sequence[bytes],
    rounds: int,
    layers: int,
    device: torch.device,
) -> InMesh:
    cores = len(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory() as name, ThreadPoolExecutor(cores) as threads:
        torch.manual_seed(0)
        shape.model(layers).save_pretrained(name)
        shape.processor.save_pretrained(name)
        model = load_images(Path(name), dtype=DTYPES[dtype], device=device)
        run = packed_run(model, prepare_sequences(model, photos))
        settings = Settings(
            port=0,
            workers=1,
            threads=cores,
            models=f"{NAME}={name}",
            dtype=dtype,
            environment=UNCACHED,
        )
        async with running(settings) as mesh, AsyncClient(mesh.address) as client:
            run()
            await _asked(client, photos)
            turns = []
            for _ in range(rounds):
                prepared = _time_run(lambda: _prepared(threads, model, photos))
                before = _time_run(run)
                asked = await _asked(client, photos)
                turns.append((prepared, (before + _time_run(run)) / 2, asked))
    # Per image; ratios are of one round, so that the machine's drift cancels.
    count = len(photos)
    prepare, forward, asked = (count / median(turn[place] for turn in turns) for place in range(3))
    ratio = median(max(turn[:2]) / turn[2] for turn in turns)
    shared = ratio if device.type == "cuda" else median(sum(turn[:2]) / turn[2] for turn in turns)
    return InMesh(shape.name, dtype, prepare, forward, asked, ratio, shared)


def _time_run(run: Callable[[], object]) -> float:
    began = time.perf_counter()
    run()
    return time.perf_counter() - began


def _prepared(threads: ThreadPoolExecutor, model: ImageModel, photos: Sequence[bytes]) -> None:
    list(threads.map(lambda data: model.input.sequence(data, "image"), photos))


async def _asked(client: AsyncClient, photos: Sequence[bytes]) -> float:
    """Return the seconds for all images once, of a closed loop that sends them several times: its
    end, with fewer callers left, is a small part.
    """
    parts = [photos[first : first + REQUEST] for first in range(0, len(photos), REQUEST)]
    times = max(1, -(-4 * CALLERS // len(parts)))
    waiting = iter(parts * times)

    async def caller() -> None:
        for part in waiting:
            await client.encode(NAME, part, timeout=600)

    began = time.perf_counter()
    await asyncio.gather(*(caller() for _ in range(CALLERS)))
    return (time.perf_counter() - began) / times
