"""Decode steps of Qwen3-0.6B with random weights: milliseconds of a step, a token of each sequence,
at 1, 8 and 64 sequences.

Launched eagerly and replayed from CUDA graphs, compared with transformers' `generate` with its
cache. Then, in float32, the tokens of the Triton kernel and graphs are compared with those of steps
that gather their keys and values.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Final

import numpy as np
import torch
import transformers

from benchmarks.gpu import published, roofline
from benchmarks.gpu.context import StepContext
from benchmarks.gpu.graphs import NEVER, GraphTally
from benchmarks.gpu.report import Row
from benchmarks.models.families import POSITIONS, FamilyShape
from libs.kernels.attention.paged import pages_for
from libs.models.generation import DecodeLoop, LanguageModel, SequenceRequest, load_language_model
from libs.models.generation.decoding.rules import Ids
from tests.parity.checkpoints import random_model

NAME: Final = "Qwen3-0.6B"
SEQUENCES: Final = (1, 8, 64)
PROMPT: Final = 128
STEPS: Final = 96
PEER_STEPS: Final = 24
WARM: Final = 8
BOUND_MILLISECONDS: Final = 1.0
EQUAL_PROMPTS: Final = (1, 31, 32, 33, 90, 200, 7, 64)
EQUAL_LAYERS: Final = 4
EQUAL_TOKENS: Final = 40


def run(context: StepContext) -> None:
    (shape,) = published.shapes(context, (NAME,))
    context.measure("tokens in float32", partial(equal, context, shape), seconds=15)
    context.measure(NAME, partial(measure, context, shape), seconds=40)
    context.target(
        "a token of one sequence, Qwen3-0.6B",
        BOUND_MILLISECONDS,
        "ms",
        context.report.number(NAME, "graph_1_ms"),
        at_most=True,
    )


def measure(context: StepContext, shape: FamilyShape) -> Row:
    sequences = SEQUENCES[: 2 if context.is_tiny else None]
    prompt, steps, peer_steps = (8, 4, 2) if context.is_tiny else (PROMPT, STEPS, PEER_STEPS)
    with tempfile.TemporaryDirectory() as name:
        reference = checkpoint(shape, Path(name), torch.bfloat16).to(context.device)
        language_model = load(Path(name), context.device, torch.bfloat16)
    loop = DecodeLoop(language_model, max(sequences) * pages_for(prompt + steps + WARM + 1))
    row: Row = {"prompt": prompt, "steps": steps, "page_bytes": language_model.page_bytes}
    for count in sequences:
        row[f"eager_{count}_ms"] = milliseconds(
            context, loop, prompts(language_model, [prompt] * count), steps
        )
    tally = GraphTally()
    if captured(context, loop, tally):
        for count in sequences:
            row[f"graph_{count}_ms"] = milliseconds(
                context, loop, prompts(language_model, [prompt] * count), steps
            )
    reported: Row = {str(event): count for event, count in tally.reported.items()}
    row |= {
        "graph_bytes": tally.bytes,
        "graph_events": reported,
        "graph_details": list(tally.details),
    }
    for count in sequences:
        ids = (
            torch.from_numpy(np.stack(prompts(language_model, [prompt] * count)))
            .long()
            .to(context.device)
        )
        generated(context, reference, ids, 2)
        first, whole = (
            generated(context, reference, ids, tokens) for tokens in (1, peer_steps + 1)
        )
        row[f"transformers_{count}_ms"] = (whole - first) / peer_steps * 1e3
    if context.rates is None:
        return row
    keys = prompt + steps // 2
    predicted = {
        f"graph_{count}_ms": roofline.step_seconds(context.rates, shape, count, keys) * 1e3
        for count in sequences
    }
    return roofline.compared(row, predicted)


def equal(context: StepContext, shape: FamilyShape) -> Row:
    """The same requests with gathered keys, by the kernel, and by the kernel from graphs."""
    with tempfile.TemporaryDirectory() as name:
        checkpoint(shape, Path(name), torch.float32, layers=2 if context.is_tiny else EQUAL_LAYERS)
        language_model = load(Path(name), context.device, torch.float32)
    lengths = EQUAL_PROMPTS[: 3 if context.is_tiny else None]
    tokens = 4 if context.is_tiny else EQUAL_TOKENS
    pages = sum(pages_for(length + tokens) for length in lengths)
    asked, tally = prompts(language_model, lengths), GraphTally()
    loop = DecodeLoop(language_model, pages)
    by_kernel = texts(loop, asked, tokens)
    by_graph = texts(loop, asked, tokens) if captured(context, loop, tally) else by_kernel
    with gathered():
        wanted = texts(DecodeLoop(language_model, pages), asked, tokens)
    same = [by_kernel == wanted, by_graph == wanted]
    row: Row = {
        "is_equal": same[0],
        "is_equal_from_graphs": same[1],
        "replayed": tally.reported["replayed"],
        "tokens": tokens,
    }
    return (
        row
        if all(same)
        else row | {"error": f"other tokens: {by_kernel}, {by_graph}, gathered {wanted}"[:2000]}
    )


@contextmanager
def gathered() -> Iterator[None]:
    """Steps gather their keys and values, as those do that the kernel does not take."""
    from libs.kernels.attention import paged_triton

    takes = paged_triton.takes
    paged_triton.takes = lambda heads, kv_heads, dim: False
    try:
        yield
    finally:
        paged_triton.takes = takes


def checkpoint(
    shape: FamilyShape, directory: Path, dtype: torch.dtype, layers: int | None = None
) -> transformers.PreTrainedModel:
    """Write the shape with a language head, which is the token table; return transformers' model
    on the CPU.
    """
    model = random_model(
        shape.kind, head="causal_lm", hidden=shape.hidden, layers=layers or shape.layers,
        heads=shape.heads, positions=POSITIONS,
        vocabulary=shape.vocabulary, config={**shape.config, "tie_word_embeddings": True},
    ).to(dtype)  # fmt: skip
    for key in ("eos_token_id", "bos_token_id", "max_length"):
        setattr(model.generation_config, key, None)
    model.generation_config.pad_token_id = 0
    model.save_pretrained(directory)
    return model


def load(directory: Path, device: torch.device, dtype: torch.dtype) -> LanguageModel:
    language_model = load_language_model(directory, device, dtype)
    language_model.max_positions = min(language_model.max_positions, 8192)  # as models are served
    return language_model


def prompts(language_model: LanguageModel, lengths: Sequence[int]) -> list[Ids]:
    random = np.random.default_rng(0)
    return [
        random.integers(5, language_model.vocabulary, length).astype(np.int32) for length in lengths
    ]


def captured(context: StepContext, loop: DecodeLoop, tally: GraphTally) -> bool:
    """Capture a graph for each number of sequences; False: the loop's steps have none, as on a
    CPU.
    """
    made = tally.graphs(context.device, check_every=NEVER)
    graphs = loop.keep_graphs(made.capture, made.owner)
    if graphs is None:
        return False
    with torch.inference_mode():
        while graphs.is_pending:
            graphs.capture_one()
    return True


def texts(loop: DecodeLoop, asked: Sequence[Ids], tokens: int) -> list[list[int]]:
    added = [loop.add(SequenceRequest(ids, most=tokens)) for ids in asked]
    found: dict[int, list[int]] = {id(each): [] for each in added}
    while loop.sequences:
        for written in loop.step():
            found[id(written.sequence)] += written.ids
    return [found[id(each)] for each in added]


def milliseconds(context: StepContext, loop: DecodeLoop, asked: Sequence[Ids], steps: int) -> float:
    """Return the milliseconds of a step in which all sequences generate, after their prompts."""
    added = [loop.add(SequenceRequest(ids, most=steps + WARM + 1)) for ids in asked]
    while not all(each.is_prefilled for each in added):
        loop.step([each for each in added if not each.is_prefilled])
    for _ in range(WARM):
        loop.step()
    context.wait()
    began = time.perf_counter()
    for _ in range(steps):
        loop.step()
    context.wait()
    taken = time.perf_counter() - began
    for each in added:
        loop.cancel(each)
    return taken / steps * 1e3


@torch.inference_mode()
def generated(
    context: StepContext, model: transformers.PreTrainedModel, ids: torch.Tensor, tokens: int
) -> float:
    """Seconds of transformers' `generate`."""
    mask = torch.ones_like(ids)
    return context.timed(
        lambda: model.generate(
            input_ids=ids,
            attention_mask=mask,
            do_sample=False,
            use_cache=True,
            max_new_tokens=tokens,
            pad_token_id=0,
        )
    )
