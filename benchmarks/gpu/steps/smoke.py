"""One launch of each kind of thing that only a GPU can show, in seconds: whether the other steps
are worth their time.

A forward of each kernel path that does not wait for the device, a warm model's way back, a capture,
a capture that fails and one after it, and running out of memory.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Final

import numpy as np
import torch

from benchmarks.gpu.context import StepContext
from benchmarks.gpu.report import Row
from benchmarks.gpu.steps.parity import (
    BFLOAT16_TIMES,
    FLOAT32_BOUNDS,
    load_encoder,
    own_states,
    reference_states,
    worst,
)
from libs.models import EncodeWork, PackedModel, load_model
from libs.models.interface.packed import Packed
from libs.models.interface.sequences import InputSequence
from libs.models.runtime.graphs.buckets import Bucket
from libs.models.runtime.graphs.buffers import fill, filled, whole_batch
from libs.models.runtime.graphs.cuda import CudaCapture
from libs.models.runtime.graphs.shapes import distance, tolerance
from tests.parity.checkpoints import random_model, write_checkpoint
from tests.support.device import no_synchronization

KINDS: Final = ("bert", "modernbert", "qwen3", "gemma3_text", "t5", "deberta-v2", "nomic_bert")
LENGTHS: Final = (1, 6, 6, 33, 60)
HIDDEN: Final = 256
BUCKET: Final = Bucket(64, 4, 64)


def run(context: StepContext) -> None:
    for kind in KINDS[: 1 if context.is_tiny else None]:
        for dtype in context.dtypes:
            name = str(dtype).removeprefix("torch.")
            context.measure(f"{kind} {name}", partial(forward, context, kind, dtype), seconds=2)
    context.measure("a parked model returns", lambda: resumed(context), seconds=2)
    context.measure("captures", lambda: captures(context), needs_cuda=True, seconds=2)
    context.measure("out of memory", lambda: out_of_memory(context), needs_cuda=True, seconds=2)


def forward(context: StepContext, kind: str, dtype: torch.dtype) -> Row:
    """The distance to transformers on the CPU; a second forward of the encoder must not wait for
    the device.
    """
    rng = np.random.default_rng(0)
    ids = [rng.integers(5, 300, length, dtype=np.int32) for length in LENGTHS]
    with tempfile.TemporaryDirectory() as name:
        directory = write_checkpoint(kind, Path(name), hidden=HIDDEN, heads=4)
        reference = random_model(kind, hidden=HIDDEN, heads=4)
        exact = reference_states(reference, ids, torch.device("cpu"))
        encoder = load_encoder(directory, dtype, context.device)
        found = own_states(encoder, ids, context.device)
        half = reference.to(device=context.device, dtype=torch.bfloat16)
        bound = (
            FLOAT32_BOUNDS[HIDDEN]
            if dtype is torch.float32
            else BFLOAT16_TIMES * worst(reference_states(half, ids, context.device), exact)
        )
        row: Row = {"distance": worst(found, exact), "bound": bound}
        if context.has_cuda:
            batch = Packed.from_sequences(ids, device=context.device)
            with torch.inference_mode():
                try:
                    with no_synchronization():
                        encoder(batch)
                except RuntimeError as error:
                    row["waits"] = str(error)[:500]
    assert isinstance(row["distance"], float)
    return (
        row
        if row["distance"] <= bound
        else row | {"error": f"distance {row['distance']:.3g} > {bound:.3g}"}
    )


def _model(context: StepContext, folder: Path) -> PackedModel:
    write_checkpoint("bert", folder, hidden=HIDDEN, heads=4)
    model = load_model(folder, "random/bert", context.device, torch.bfloat16)
    assert isinstance(model, PackedModel)
    return model


def resumed(context: StepContext) -> Row:
    with tempfile.TemporaryDirectory() as name:
        model = _model(context, Path(name))
        prepared = model.prepare(EncodeWork(["Programs such as the GPL are free software."]))

        def vector() -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
            return np.asarray(model.forward(prepared.head, prepared.sequences)[0], np.float32)

        before = vector()
        began = time.perf_counter()
        model.park().resume()
        took = time.perf_counter() - began
        same = bool((vector() == before).all())
    row: Row = {"seconds": took, "is_same": same}
    return row if same else row | {"error": "the vector differs after it"}


@torch.inference_mode()
def captures(context: StepContext) -> Row:
    """A graph equals the eager forward; after a capture that fails, memory can be freed and a graph
    can be captured.
    """
    with tempfile.TemporaryDirectory() as name:
        encoder = load_encoder(
            write_checkpoint("modernbert", Path(name), hidden=HIDDEN, heads=4),
            torch.bfloat16,
            context.device,
        )
    rng = np.random.default_rng(0)

    def batch(lengths: Sequence[int]) -> list[InputSequence]:
        return [InputSequence(rng.integers(5, 300, length, dtype=np.int32)) for length in lengths]

    def whole(buffer: torch.Tensor) -> torch.Tensor:
        return encoder.forward(whole_batch(buffer, BUCKET, typed=False))

    def waits(buffer: torch.Tensor) -> torch.Tensor:
        hidden = whole(buffer)
        hidden.sum().item()
        return hidden

    def apart() -> float:
        graph = CudaCapture(context.device).capture(whole, filled(BUCKET, batch((5,))))
        assert graph is not None
        sequences = batch((9, 3, 17))
        wanted = encoder.forward(
            Packed.from_sequences([one.ids for one in sequences], device=context.device)
        )
        return distance(
            graph.replay(partial(fill, bucket=BUCKET, sequences=sequences))[:29], wanted
        )

    row: Row = {"distance": apart()}
    try:
        CudaCapture(context.device).capture(waits, filled(BUCKET, batch((5,))))
        return row | {"error": "a forward that waits was captured"}
    except RuntimeError as error:
        row["refused_with"] = str(error)[:300]
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.randn(8, device=context.device)
    row["distance_after_a_failure"] = again = apart()
    return (
        row
        if again <= tolerance(torch.bfloat16)
        else row | {"error": "a graph differs after a failed capture"}
    )


def out_of_memory(context: StepContext) -> Row:
    free, _ = torch.cuda.mem_get_info()
    row: Row = {"free_bytes": free}
    try:
        torch.empty(2 * free, dtype=torch.uint8, device=context.device)
        return row | {"error": "more memory was granted than there is"}
    except torch.OutOfMemoryError as error:
        row["raised"] = str(error)[:200]
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return row | {"sum_after_it": float(torch.ones(1000, device=context.device).sum())}
