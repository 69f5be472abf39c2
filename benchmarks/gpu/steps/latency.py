"""One query of 12 tokens, again and again with nothing else going on: p50 and p99 of its forward
pass, and of all that a worker does.

Then batches of 1, 8 and 32 such queries, forward alone, launched eagerly and replayed from CUDA
graphs.

The forward ends when the vector is on the host. Peers: transformers' forward of the same ids and
its mean on the host, and the whole `encode` of sentence-transformers.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Final

import torch

from benchmarks.common.report import percentile
from benchmarks.gpu import published, roofline
from benchmarks.gpu.context import StepContext
from benchmarks.gpu.graphs import NEVER, GraphTally
from benchmarks.gpu.report import Row
from benchmarks.models.families import FamilyShape, padded_run, sentence_transformers_run
from libs.models import EncodeWork, InputSequence, PackedModel, Prepared, load_model

TOKENS: Final = 12
QUERIES: Final = 300
PEER_QUERIES: Final = 60
"""A query takes the peers tens of milliseconds."""

WARM: Final = 20
BOUND_SECONDS: Final = 0.0008
BATCHES: Final = (1, 8, 32)
NAMES: Final = ("ModernBERT-base", "MiniLM-L6", "BERT-base", "BERT-large", "Qwen3-0.6B")


def run(context: StepContext) -> None:
    found = {shape.name: shape for shape in published.shapes(context, NAMES)}
    for name in NAMES:
        context.measure(name, partial(measure, context, found[name]), seconds=10)
    held = context.report.number("ModernBERT-base", "forward_p50_ms")
    context.target(
        "one query of 12 tokens, ModernBERT-base, forward p50",
        BOUND_SECONDS * 1e3,
        "ms",
        held,
        at_most=True,
    )
    held = context.report.number("ModernBERT-base", "graph_1_p50_ms")
    context.target("the same from a CUDA graph", BOUND_SECONDS * 1e3, "ms", held, at_most=True)


def measure(context: StepContext, shape: FamilyShape) -> Row:
    queries = 5 if context.is_tiny else QUERIES
    directory, reference = published.checkpoint(shape)
    reference = reference.to(context.device)
    model = load_model(directory, f"random/{shape.name}", context.device, torch.bfloat16)
    text = query(lambda words: model.prepare(EncodeWork([words])).tokens)
    prepared = model.prepare(EncodeWork([text]))

    def whole() -> object:
        job = model.prepare(EncodeWork([text]))
        return model.finish(job, model.forward(job.head, job.sequences))

    runs: dict[str, Callable[[], object]] = {
        "forward": lambda: model.forward(prepared.head, prepared.sequences),
        "whole": whole,
        "transformers": padded_run(reference, prepared.sequences, context.device),
        "sentence_transformers": sentence_transformers_run(
            directory, [text], context.device, torch.bfloat16
        ),
    }
    row: Row = {"tokens": prepared.tokens, "queries": queries}
    for what, once in runs.items():
        taken = _taken(once, min(queries, PEER_QUERIES) if "transformers" in what else queries)
        row[f"{what}_p50_ms"], row[f"{what}_p99_ms"] = (
            percentile(taken, share) * 1e3 for share in (0.5, 0.99)
        )
    row |= graphs(context, model, prepared, queries)
    if context.rates is None:
        return row
    predicted = {
        f"graph_{count}_p50_ms": roofline.query_seconds(
            context.rates, shape, prepared.tokens, count
        )
        * 1e3
        for count in BATCHES
    }
    return roofline.compared(row, predicted)


def graphs(context: StepContext, model: PackedModel, query: Prepared, queries: int) -> Row:
    """Each batch eagerly, then from its graph."""
    row: Row = {}
    tally = GraphTally()
    for way in ("eager", "graph"):
        if way == "graph":
            model.keep_graphs(tally.graphs(context.device, check_every=NEVER))
        for count in BATCHES:
            batch = query.sequences * count
            if way == "graph":
                capture(model, query, batch)
            taken = _taken(partial(model.forward, query.head, batch), queries)
            row[f"{way}_{count}_p50_ms"], row[f"{way}_{count}_p99_ms"] = (
                percentile(taken, share) * 1e3 for share in (0.5, 0.99)
            )
    reported: Row = {str(event): count for event, count in tally.reported.items()}
    return row | {
        "graph_bytes": tally.bytes,
        "graph_events": reported,
        "graph_details": list(tally.details),
    }


def capture(model: PackedModel, query: Prepared, batch: list[InputSequence]) -> None:
    """Capture what waits, the batch's graph included, as an idle worker does."""
    model.forward(query.head, batch)
    while model.awaits_capture:
        model.capture_graph()


def query(tokens: Callable[[str], int]) -> str:
    """A text of TOKENS tokens, special ones included, or the shortest beyond."""
    words = "a b c d e f g h i j k l m n o p".split()  # noqa: SIM905
    return next(
        text
        for count in range(1, len(words) + 1)
        if tokens(text := " ".join(words[:count])) >= TOKENS
    )


def _taken(once: Callable[[], object], queries: int) -> list[float]:
    seconds = []
    for number in range(WARM + queries if queries > WARM else queries + 1):
        began = time.perf_counter()
        once()
        seconds.append(time.perf_counter() - began)
        if number < (WARM if queries > WARM else 1):
            seconds.clear()
    return seconds
