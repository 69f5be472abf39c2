"""Published shapes with random weights in bfloat16: tokens/s, MFU, and ratios to transformers and
to sentence-transformers.

The texts have the log-normal length mix of benchmarks/common/texts.py. Packed: batches of 16,384
tokens in arrival order, from token ids on the host to vectors on the host; "with tokenising" adds
`prepare` of all texts before. transformers: sdpa, padded batches of 32, in arrival order and
sorted; with flash-attn where it is installed. sentence-transformers: batches of 32, its default,
and of 256, its tokenising counted. Engines take turns within a round, and ratios are medians of the
rounds' own.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Final

import torch

from benchmarks.common.texts import real_texts
from benchmarks.gpu import published, roofline
from benchmarks.gpu.context import StepContext, peak
from benchmarks.gpu.report import Row
from benchmarks.models.families import (
    FamilyShape,
    packed_run,
    padded_run,
    sentence_transformers_run,
    split_into_batches,
    take_turns,
)
from libs.models import EncodeWork, PackedModel, load_model

BATCH_TOKENS: Final = 16_384
TEXTS: Final = 2048
ROUNDS: Final = 3
MFU_BOUNDS: Final = {"BERT-large": 0.5, "ModernBERT-base": 0.38}
"""docs/gpu.md reckons them: small products do not reach the rate of large ones."""

ARRIVAL_BOUND: Final = 3.0
SORTED_BOUND: Final = 1.3
ORDER: Final = (
    "BERT-large",
    "ModernBERT-base",
    "MiniLM-L6",
    "BERT-base",
    "Qwen3-0.6B",
    "EmbeddingGemma-300M",
)
LONG: Final = 512


def run(context: StepContext) -> None:
    context.note(published.FLOPS_SAY)
    found = {shape.name: shape for shape in published.shapes(context)}
    for name in ORDER:
        context.measure(name, partial(measure, context, found[name]), seconds=25)
    for name, bound in MFU_BOUNDS.items():
        mfu = context.report.number(name, "mfu")
        context.target(f"MFU, {name}, {BATCH_TOKENS} tokens per batch", bound, "of peak", mfu)
    for name in ORDER:
        for batch, bound in ((32, ARRIVAL_BOUND), (256, SORTED_BOUND)):
            ratio = context.report.number(name, f"times_sentence_transformers_{batch}")
            context.target(
                f"{name} with tokenising / sentence-transformers, batches of {batch}",
                bound,
                "x",
                ratio,
            )


def _with_tokenising(model: PackedModel, texts: list[str], batch_tokens: int) -> object:
    return packed_run(model, model.prepare(EncodeWork(texts)).sequences, batch_tokens)()


def measure(context: StepContext, shape: FamilyShape) -> Row:
    texts, rounds, batch_tokens = (24, 1, 256) if context.is_tiny else (TEXTS, ROUNDS, BATCH_TOKENS)
    directory, reference = published.checkpoint(shape)
    mix = real_texts(texts, directory=directory)
    model = load_model(directory, f"random/{shape.name}", context.device, torch.bfloat16)
    sequences = model.prepare(EncodeWork(mix.texts)).sequences
    lengths = [sequence.tokens for sequence in sequences]
    device = context.device
    reference.to(device)
    by_length = sorted(sequences, key=lambda sequence: -sequence.tokens)
    engines: dict[str, Callable[[], object]] = {
        "packed": packed_run(model, sequences, batch_tokens),
        "packed with tokenising": partial(_with_tokenising, model, mix.texts, batch_tokens),
        "transformers": padded_run(reference, sequences, device),
        "transformers sorted": padded_run(reference, by_length, device),
    }
    if importlib.util.find_spec("flash_attn") is not None:
        flash = type(reference)._from_config(
            reference.config, attn_implementation="flash_attention_2", dtype=torch.bfloat16
        )
        engines["transformers flash"] = padded_run(flash.eval().to(device), by_length, device)
    for size in (32, 256):
        engines[f"sentence-transformers {size}"] = sentence_transformers_run(
            directory, mix.texts, device, torch.bfloat16, size
        )
    seconds = take_turns(engines, rounds, device)
    # Whole batches of the longest sequences: the most arithmetic for each launch.
    long = [
        sequence for sequence in by_length if sequence.tokens >= min(LONG, by_length[0].tokens) // 2
    ]
    long_lengths = [sequence.tokens for sequence in long]
    long_seconds = take_turns({"long": packed_run(model, long, batch_tokens)}, rounds, device)[
        "long"
    ]
    counted = published.flops(reference, shape, lengths)
    limit = peak(device)
    own = median(seconds["packed"])

    def times(peer: str, engine: str) -> float:
        return median(
            other / mine for mine, other in zip(seconds[engine], seconds[peer], strict=True)
        )

    row: Row = {
        "texts": len(mix.texts),
        "tokens": sum(lengths),
        "batches": len(split_into_batches(sequences, batch_tokens)),
        "tokens_per_second": sum(lengths) / own,
        "flops": counted,
        "flops_per_second": counted / own,
        "mfu": None if limit is None else counted / own / limit,
        "mfu_of_the_longest": (
            None
            if limit is None
            else published.flops(reference, shape, long_lengths) / median(long_seconds) / limit
        ),
        "times_transformers": times("transformers", "packed"),
        "times_transformers_sorted": times("transformers sorted", "packed"),
        "times_transformers_flash": times("transformers flash", "packed")
        if "transformers flash" in seconds
        else None,
        "times_sentence_transformers_32": times(
            "sentence-transformers 32", "packed with tokenising"
        ),
        "times_sentence_transformers_256": times(
            "sentence-transformers 256", "packed with tokenising"
        ),
        "attention_of_transformers": str(getattr(reference.config, "_attn_implementation", "")),
        "packed_seconds": own,
        "seconds": {name: list(each) for name, each in seconds.items()},
    }
    if context.rates is None:
        return row
    predicted = sum(
        roofline.batch_seconds(context.rates, shape, [one.tokens for one in batch])
        for batch in split_into_batches(sequences, batch_tokens)
    )
    return roofline.compared(row, {"packed_seconds": predicted})
