"""Every family on the GPU against transformers on the CPU in float32, with random weights; and
all-MiniLM-L6-v2's vectors.

float32: within the bound of tests/parity. bfloat16: less than three times transformers' error in
bfloat16 on the same device. Alone: a sequence's states are the same in a batch as alone. Graph:
states replayed from CUDA graphs against those of the eager forward, within the bound of the sampled
checks, for all families with launches that do not depend on lengths.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import tempfile
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Final

import numpy as np
import torch
import transformers

from benchmarks.common.texts import MINILM_ID, minilm_directory, real_texts
from benchmarks.gpu.context import NotHere, StepContext
from benchmarks.gpu.graphs import GraphTally
from benchmarks.gpu.report import Row, Value
from libs.models import EncodeWork, load_model
from libs.models.interface.packed import Packed
from libs.models.interface.sequences import InputSequence
from libs.models.layers.encoder import PackedEncoder
from libs.models.runtime.backbone import Backbone
from libs.models.runtime.graphs.shapes import distance
from libs.models.text.heads.pooled import PooledHead
from libs.models.text.registry import build_encoder
from libs.models.weights import TensorFile
from tests.parity.checkpoints import random_model, write_checkpoint
from tests.parity.recipes import RECIPES

LENGTHS: Final = (1, 1, 6, 6, 6, 17, 33, 60, 128)
GRAPH_BATCHES: Final = (
    (12,),
    (1, 6, 6),
    (9,),
    (2, 3, 8),
    (33, 2),
    (17, 17, 60, 1),
    (60, 60, 60, 60),
)
GRAPH_HEADS: Final[tuple[list[PooledHead], ...]] = (
    [],
    [PooledHead(("mean",), ())],
    [PooledHead(("lasttoken",), ())],
)
"""The encoder alone, and with a head that pools all tokens or one of each sequence."""

FLOAT32_BOUNDS: Final = {64: 1e-5, 256: 1e-4}
"""Bounds by hidden size. 1e-5 is that of tests/parity; wide random weights amplify rounding, on a
CPU to 3.2e-5 (electra).
"""
BFLOAT16_TIMES: Final = 3.0
MIN_COSINE: Final = 0.999
PROCESSES: Final = 6
TINY: Final = ("bert", "modernbert", "qwen3", "gemma3_text")
SHAPES: Final = ((64, 4, 2), (256, 4, 2))
"""hidden, heads, layers: heads of 16 and of 64."""

Ids = list[np.typing.NDArray[np.int32]]


def run(context: StepContext) -> None:
    kinds = TINY if context.is_tiny else tuple(RECIPES)
    # Most of a row's time is the compiler's, which keeps one core busy.
    processes = max(1, min(PROCESSES, len(os.sched_getaffinity(0)) // 2))
    with ProcessPoolExecutor(processes, multiprocessing.get_context("spawn")) as pool:
        pending = {
            f"{kind} hidden {hidden}": pool.submit(
                family, context.device, kind, hidden, heads, layers
            )
            for hidden, heads, layers in SHAPES[: 1 if context.is_tiny else None]
            for kind in kinds
        }
        for what, row in pending.items():
            context.measure(what, partial(row.result, max(0.0, context.seconds_left)), seconds=3)
        pool.shutdown(cancel_futures=True)
    context.measure("all-MiniLM-L6-v2", lambda: minilm(context), seconds=5)
    rows = [row for row in context.report.rows if "is_right" in row or "error" in row]
    wrong = sum(row.get("is_right") is not True for row in rows)
    context.target(
        "families that differ from transformers", 0, "rows", wrong if rows else None, at_most=True
    )
    if wrong:
        context.note(
            "not right: "
            f"{', '.join(str(row['what']) for row in rows if row.get('is_right') is not True)}"
        )


def family(device: torch.device, kind: str, hidden: int, heads: int, layers: int) -> Row:
    """The largest errors, relative to the largest value of each sequence, and whether they are
    within their bounds.
    """
    if (known := RECIPES[kind].like or kind) not in transformers.CONFIG_MAPPING:
        raise NotHere(f"transformers {transformers.__version__} has no {known}")
    rng = np.random.default_rng(0)
    ids = [rng.integers(5, 300, length, dtype=np.int32) for length in LENGTHS]
    with tempfile.TemporaryDirectory() as name:
        directory = write_checkpoint(kind, Path(name), hidden=hidden, heads=heads, layers=layers)
        reference = random_model(kind, hidden=hidden, heads=heads, layers=layers)
        exact = reference_states(reference, ids, torch.device("cpu"))
        own = worst(
            reference_states(reference.to(device=device, dtype=torch.bfloat16), ids, device), exact
        )
        single = load_encoder(directory, torch.float32, device)
        found = own_states(single, ids, device)
        alone = [own_states(single, [one], device)[0] for one in ids]
        narrow = load_encoder(directory, torch.bfloat16, device)
        half = worst(own_states(narrow, ids, device), exact)
        replayed = {
            f"graph_{str(one.dtype).removeprefix('torch.')}": graph(one, device)
            for one in (single, narrow)
        }
    errors = {
        "float32": worst(found, exact),
        "alone": worst(found, alone),
        "bfloat16": half,
        "transformers_bfloat16": own,
    }
    right = (
        max(errors["float32"], errors["alone"]) <= FLOAT32_BOUNDS[hidden]
        and half < BFLOAT16_TIMES * own
    )
    return {
        **errors,
        **replayed,
        "is_right": right and all("wrong" not in one for one in replayed.values()),
    }


def graph(encoder: PackedEncoder, device: torch.device) -> dict[str, Value]:
    """The largest distance to the eager forward over two replays of each batch, or why it has no
    graphs; `wrong` if there should be, or if they differ."""
    if not encoder.is_graph_capturable:
        return {"none": "its launches go by the lengths of sequences"}
    tally = GraphTally()
    graphs = tally.graphs(device, check_every=1)
    rng = np.random.default_rng(0)
    apart: list[float] = []
    backbone = Backbone(encoder, {})
    with torch.inference_mode():
        for lengths in GRAPH_BATCHES * 2:
            batch = [
                InputSequence(rng.integers(5, 300, length, dtype=np.int32)) for length in lengths
            ]
            for heads in GRAPH_HEADS:
                found = graphs.forward(backbone, batch, heads)
                while graphs.is_pending:
                    graphs.capture_one()
                found = found or graphs.forward(backbone, batch, heads)
                if found is None or graphs.is_off:
                    return {"wrong": "; ".join(tally.details) or "no graph"}
                packed = Packed.from_sequences([one.ids for one in batch], device=device)
                wanted = encoder.forward(packed, heads[0].rows if heads else None)
                apart.append(
                    distance(
                        found.output,
                        heads[0].forward(wanted, packed, batch)[0] if heads else wanted,
                    )
                )
    return {"distance": max(apart), "captured": tally.reported["captured"], "bytes": tally.bytes}


def minilm(context: StepContext) -> Row:
    """The lowest cosine of vectors on the device, in either type, to those of transformers in
    float32 on the CPU.
    """
    directory = minilm_directory()
    mix = real_texts(16 if context.is_tiny else 128)
    model = transformers.AutoModel.from_pretrained(directory).float().eval()
    rows: Row = {}
    for dtype in context.dtypes:
        ours = load_model(directory, MINILM_ID, context.device, dtype)
        sequences = ours.prepare(EncodeWork(mix.texts)).sequences
        vectors = np.stack(
            [np.asarray(one, np.float32) for one in ours.forward("dense", sequences)]
        )
        with torch.inference_mode():
            states = [
                model(input_ids=torch.from_numpy(one.ids)[None].long()).last_hidden_state[0]
                for one in sequences
            ]
        means = torch.stack([state.mean(0) for state in states]).numpy()
        cosines = (
            (vectors * means).sum(1)
            / np.linalg.norm(vectors, axis=1)
            / np.linalg.norm(means, axis=1)
        )
        rows[f"cosine_{str(dtype).removeprefix('torch.')}"] = float(cosines.min())
    rows["is_right"] = all(
        isinstance(value, float) and value >= MIN_COSINE for value in rows.values()
    )
    return rows


def load_encoder(directory: Path, dtype: torch.dtype, device: torch.device) -> PackedEncoder:
    config = json.loads((directory / "config.json").read_text())
    return build_encoder(
        config, TensorFile.open(directory), dtype=dtype, device=device, head_tables={}
    )[0]


def own_states(encoder: PackedEncoder, ids: Ids, device: torch.device) -> list[torch.Tensor]:
    with torch.inference_mode():
        states = encoder(Packed.from_sequences(ids, device=device)).float().cpu()
    return list(states.split([len(one) for one in ids]))


def reference_states(model: torch.nn.Module, ids: Ids, device: torch.device) -> list[torch.Tensor]:
    """Hidden states of each sequence alone."""
    with torch.inference_mode():
        return [
            model(input_ids=torch.from_numpy(one)[None].long().to(device))
            .last_hidden_state[0]
            .float()
            .cpu()
            for one in ids
        ]


def worst(got: list[torch.Tensor], wanted: list[torch.Tensor]) -> float:
    return max(
        ((a - b).abs().max() / b.abs().max()).item() for a, b in zip(got, wanted, strict=True)
    )
