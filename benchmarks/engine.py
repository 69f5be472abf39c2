"""A model without any mesh around it, in a process of its own: `python -m benchmarks.engine KIND THREADS SHARE TEXTS SEED`.

Kinds: `sentence-transformers` (its encode(), batch 32, tokenising included) and `forward` (the worker's PackedModel.forward alone,
on batches of 32 texts in arrival order, tokenised beforehand). Both hold the model in float32 and bfloat16. The process waits on
its input: each line {"dtype": ..., "save": path or ""} runs its share of the texts once; a line of JSON answers when it is done.
Idle, it uses no CPU.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import cast

import numpy as np
import torch
import typer
from numpy.typing import NDArray

from benchmarks.texts import MINILM_ID, Mix, minilm_directory, real_texts

BATCH = 32
Vectors = NDArray[np.float32]
Run = Callable[[], Vectors]
"""Runs the process's share of the texts; [texts, dimensions] in their order."""


def balanced_shares(lengths: list[int], shares: int) -> list[list[range]]:
    """Batches of 32 (fewer where there are more processes than batches) in arrival order, dealt out so that each process has about
    as many tokens."""
    size = max(1, min(BATCH, len(lengths) // shares))
    batches = [range(first, min(first + size, len(lengths))) for first in range(0, len(lengths), size)]
    tokens = {batch: sum(lengths[index] for index in batch) for batch in batches}
    dealt: list[list[range]] = [[] for _ in range(shares)]
    for batch in sorted(batches, key=lambda batch: -tokens[batch]):
        min(dealt, key=lambda hand: sum(tokens[held] for held in hand)).append(batch)
    return [sorted(hand, key=lambda batch: batch.start) for hand in dealt]


def forward_run(mix: Mix, batches: list[range], dtype: torch.dtype) -> Run:
    """The worker's forward pass on texts that are tokenised already."""
    from libs.models import EncodeWork, load_model

    model = load_model(minilm_directory(), MINILM_ID, torch.device("cpu"), dtype)
    prepared = [model.prepare(EncodeWork([mix.texts[index] for index in batch])) for batch in batches]

    def run() -> Vectors:
        return np.stack([cast("Vectors", vector) for job in prepared for vector in model.forward(job.head, job.sequences)])

    return run


def sentence_transformers_run(mix: Mix, batches: list[range], dtype: torch.dtype) -> Run:
    """What most people use today. It sorts by length itself and pads each batch to its longest text."""
    from sentence_transformers import SentenceTransformer

    model = SentenceTransformer(str(minilm_directory()), device="cpu", model_kwargs={"dtype": dtype}, local_files_only=True)
    texts = [mix.texts[index] for batch in batches for index in batch]

    def run() -> Vectors:
        vectors = model.encode(texts, batch_size=BATCH, convert_to_numpy=True, show_progress_bar=False)
        return np.asarray(vectors, dtype=np.float32)

    return run


KINDS: dict[str, Callable[[Mix, list[range], torch.dtype], Run]] = {
    "forward": forward_run,
    "sentence-transformers": sentence_transformers_run,
}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def serve(kind: str, threads: int, share: str, texts: int, seed: int) -> None:
    """Answers lines until the input ends. Everything but answers goes to stderr, whatever the libraries print."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    torch.set_num_threads(threads)
    mix = real_texts(texts, seed)
    number, shares = (int(part) for part in share.split("/"))
    batches = balanced_shares(mix.lengths, shares)[number]
    runs = {name: KINDS[kind](mix, batches, dtype) for name, dtype in DTYPES.items()}
    answers.write(json.dumps({"ready": True, "rows": [index for batch in batches for index in batch]}) + "\n")
    for line in sys.stdin:
        order = json.loads(line)
        vectors = runs[order["dtype"]]()
        if order["save"]:
            np.save(Path(order["save"]), vectors)
        answers.write(json.dumps({"done": len(vectors)}) + "\n")


if __name__ == "__main__":
    typer.run(serve)
