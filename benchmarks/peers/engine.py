"""A model without any mesh around it, in a separate process: `python -m benchmarks.peers.engine
KIND THREADS SHARE TEXTS SEED`.

Kinds: `sentence-transformers` (its encode(), batch 32, tokenising included), `forward` (the
worker's PackedModel.forward alone, on batches of 32 texts in arrival order, tokenised beforehand),
`openvino`, `onnxruntime` and `ctranslate2` (padded batches of 32 texts, sorted by length and in
arrival order, tokenised beforehand too) and `candle` (batches of 32 texts, sorted by length,
tokenising included). DTYPES are the data types of each. The process waits on its input: each line
{"way": ..., "save": path or ""} runs its share of the texts once; a line of JSON answers when it is
done. Idle, it uses no CPU.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol, cast

import numpy as np
import torch
import typer
from numpy.typing import NDArray

from benchmarks.common.texts import MINILM_ID, Mix, minilm_directory, real_texts

BATCH = 32
DIMENSIONS = 384
DTYPES: dict[str, tuple[str, ...]] = {
    "sentence-transformers": ("float32", "bfloat16"),
    "forward": ("float32", "bfloat16"),
    "openvino": ("float32", "bfloat16"),
    "onnxruntime": ("float32", "int8"),
    "ctranslate2": ("float32", "int8"),
    "candle": ("float32",),
}
"""Data types of each kind, by the names that results have."""
PADDED = ("openvino", "onnxruntime", "ctranslate2")
"""Kinds that compute padded batches. They also have the way "<data type> arrival"."""
SORTED = (*PADDED, "candle")
"""Kinds with batches of texts of about the same length, the longest first: others take texts as
they arrive.
"""
Vectors = NDArray[np.float32]
Batches = Sequence[Sequence[int]]
"""Numbers of texts, batch by batch."""
Run = Callable[[], Vectors]
"""Runs the process's share of the texts; [texts, dimensions] in the order of its batches."""
Runs = dict[str, Run]
"""Runs by their way: a data type, perhaps with " arrival"."""


def balanced_shares(
    order: Sequence[int], lengths: Sequence[int], shares: int
) -> list[list[Sequence[int]]]:
    """The texts in this order in batches of 32 (fewer where there are more processes than batches),
    dealt out so that each process has about as many tokens. `lengths`: tokens of each text."""
    size = max(1, min(BATCH, len(order) // shares))
    batches = in_batches(order, size)
    tokens = [sum(lengths[index] for index in batch) for batch in batches]
    dealt: list[list[int]] = [[] for _ in range(shares)]
    for number in sorted(range(len(batches)), key=lambda number: -tokens[number]):
        min(dealt, key=lambda hand: sum(tokens[held] for held in hand)).append(number)
    return [[batches[number] for number in sorted(hand)] for hand in dealt]


def in_batches(order: Sequence[int], size: int = BATCH) -> list[Sequence[int]]:
    return [order[first : first + size] for first in range(0, len(order), size)]


def forward_runs(mix: Mix, batches: Batches, threads: int) -> Runs:
    """The worker's forward pass on texts that are tokenised already."""
    from libs.models import EncodeWork, load_model

    def prepared(dtype: torch.dtype) -> Run:
        model = load_model(minilm_directory(), MINILM_ID, torch.device("cpu"), dtype)
        jobs = [
            model.prepare(EncodeWork([mix.texts[index] for index in batch])) for batch in batches
        ]

        def run() -> Vectors:
            return np.stack(
                [
                    cast("Vectors", vector)
                    for job in jobs
                    for vector in model.forward(job.head, job.sequences)
                ]
            )

        return run

    return {name: prepared(getattr(torch, name)) for name in DTYPES["forward"]}


def sentence_transformers_runs(mix: Mix, batches: Batches, threads: int) -> Runs:
    """Run sentence-transformers, which most people use today. It sorts by length itself and pads
    each batch to its longest text.
    """
    from sentence_transformers import SentenceTransformer

    texts = [mix.texts[index] for batch in batches for index in batch]

    def loaded(dtype: torch.dtype) -> Run:
        model = SentenceTransformer(
            str(minilm_directory()),
            device="cpu",
            model_kwargs={"dtype": dtype},
            local_files_only=True,
        )

        def run() -> Vectors:
            vectors = model.encode(
                texts, batch_size=BATCH, convert_to_numpy=True, show_progress_bar=False
            )
            return np.asarray(vectors, dtype=np.float32)

        return run

    return {name: loaded(getattr(torch, name)) for name in DTYPES["sentence-transformers"]}


class PaddedModel(Protocol):
    def __call__(self, ids: NDArray[np.int64], mask: NDArray[np.int64]) -> Vectors:
        """Compute one batch: ids and mask [texts, tokens], vectors [texts, dimensions]."""


def padded_runs(load: Callable[[str], PaddedModel], kind: str, mix: Mix, batches: Batches) -> Runs:
    """Run padded batches that are tokenised already. `batches`: sorted by length; "… arrival"
    computes the same texts in their order of arrival.
    """
    from benchmarks.peers.padding import padded, token_ids

    ids = token_ids(mix)
    rows = [index for batch in batches for index in batch]
    places = {index: place for place, index in enumerate(rows)}

    def compiled(model: PaddedModel, batches: Batches) -> Run:
        inputs = [
            ([places[index] for index in batch], *padded([ids[index] for index in batch]))
            for batch in batches
        ]

        def run() -> Vectors:
            vectors = np.empty((len(rows), DIMENSIONS), np.float32)
            for at, tokens, mask in inputs:
                vectors[at] = model(tokens, mask)
            return vectors

        return run

    models = {name: load(name) for name in DTYPES[kind]}
    by_arrival = in_batches(sorted(rows))
    return {name: compiled(model, batches) for name, model in models.items()} | {
        f"{name} arrival": compiled(model, by_arrival) for name, model in models.items()
    }


def openvino_runs(mix: Mix, batches: Batches, threads: int) -> Runs:
    from benchmarks.peers.openvino_model import OpenVinoModel

    return padded_runs(lambda dtype: OpenVinoModel(dtype, threads), "openvino", mix, batches)


def onnxruntime_runs(mix: Mix, batches: Batches, threads: int) -> Runs:
    from benchmarks.peers.onnxruntime_model import OnnxRuntimeModel

    return padded_runs(lambda dtype: OnnxRuntimeModel(dtype, threads), "onnxruntime", mix, batches)


def ctranslate2_runs(mix: Mix, batches: Batches, threads: int) -> Runs:
    from benchmarks.peers.ctranslate2_model import CTranslate2Model

    return padded_runs(lambda dtype: CTranslate2Model(dtype, threads), "ctranslate2", mix, batches)


def candle_runs(mix: Mix, batches: Batches, threads: int) -> Runs:
    """Run candle on texts: its package has no entry for token ids."""
    from benchmarks.peers.candle_model import CandleModel

    model = CandleModel(threads)
    texts = [[mix.texts[index] for index in batch] for batch in batches]
    return {
        "float32": lambda: np.concatenate([model(batch, BATCH) for batch in texts]),
    }


KINDS: dict[str, Callable[[Mix, Batches, int], Runs]] = {
    "forward": forward_runs,
    "sentence-transformers": sentence_transformers_runs,
    "openvino": openvino_runs,
    "onnxruntime": onnxruntime_runs,
    "ctranslate2": ctranslate2_runs,
    "candle": candle_runs,
}


def serve(kind: str, threads: int, share: str, texts: int, seed: int) -> None:
    """Answer lines until the input ends. Everything but answers goes to stderr, whatever the
    libraries print.
    """
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    torch.set_num_threads(threads)
    mix = real_texts(texts, seed)
    number, shares = (int(part) for part in share.split("/"))
    order = (
        range(texts)
        if kind not in SORTED
        else sorted(range(texts), key=lambda index: -mix.lengths[index])
    )
    batches = balanced_shares(order, mix.lengths, shares)[number]
    runs = KINDS[kind](mix, batches, threads)
    answers.write(
        json.dumps({"ready": True, "rows": [index for batch in batches for index in batch]}) + "\n"
    )
    for line in sys.stdin:
        asked = json.loads(line)
        vectors = runs[asked["way"]]()
        if asked["save"]:
            np.save(Path(asked["save"]), vectors)
        answers.write(json.dumps({"done": len(vectors)}) + "\n")


if __name__ == "__main__":
    typer.run(serve)
