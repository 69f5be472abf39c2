"""The encoder of extractors and rerankers, DeBERTa-v3-base with random weights in bfloat16, and a
mixture of experts.

DeBERTa: batches of 16,384 tokens in arrival order with the log-normal length mix of
benchmarks/common/texts.py, from token ids on the host to vectors on the host; launches of one of
them, and the longest kernels. Peer: transformers in padded batches of 32, in arrival order and
sorted. "by runs" is the path that launches for each run of equal lengths, in the same rounds: what
the kernel replaces, and a check of its vectors.

Experts: the feed-forward of nomic-embed-text-v2-moe (8 experts of which 2 are used) for 16,384
tokens, in grouped products against all experts computing all tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Final, cast
from unittest.mock import patch

import numpy as np
import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.common.texts import real_texts
from benchmarks.gpu import published
from benchmarks.gpu.context import NotHere, StepContext
from benchmarks.gpu.report import Row
from benchmarks.gpu.steps.profile import kernels
from benchmarks.models.families import (
    FamilyShape,
    packed_run,
    padded_run,
    split_into_batches,
    take_turns,
)
from libs.kernels.linear.grouped import has_grouped
from libs.models import EncodeWork, InputSequence, PackedModel, load_model
from libs.models.layers.experts import Experts
from libs.models.layers.spec import EncoderSpec, LayerSpec
from libs.models.text.families.bert import deberta

BATCH_TOKENS: Final = 16_384
TEXTS: Final = 1024
ROUNDS: Final = 3
TOP: Final = 12
DEBERTA: Final = FamilyShape(
    "DeBERTa-v3-base",
    "deberta-v2",
    768,
    12,
    12,
    config={"intermediate_size": 3072, "position_buckets": 256},
)
PEER_BOUND: Final = 3.0
EXPERTS: Final = 8
MOE: Final = EncoderSpec(
    hidden=768, heads=12, head_size=64, ffn=3072, layers=(LayerSpec(experts=EXPERTS),), norm="post",
    norm_eps=1e-5,
    activation="gelu", experts_used=2,
)  # fmt: skip


def run(context: StepContext) -> None:
    shape = published.tiny(DEBERTA) if context.is_tiny else DEBERTA
    context.measure(DEBERTA.name, partial(measure, context, shape), seconds=25)
    context.measure("nomic-moe experts", partial(experts, context), needs_cuda=True, seconds=5)
    ratio = context.report.number(DEBERTA.name, "times_transformers")
    context.target(f"{DEBERTA.name} / transformers in arrival order", PEER_BOUND, "x", ratio)


def measure(context: StepContext, shape: FamilyShape) -> Row:
    texts, rounds, batch_tokens = (24, 1, 256) if context.is_tiny else (TEXTS, ROUNDS, BATCH_TOKENS)
    directory, reference = published.checkpoint(shape)
    mix = real_texts(texts, directory=directory)
    model = load_model(directory, f"random/{shape.name}", context.device, torch.bfloat16)
    sequences = model.prepare(EncodeWork(mix.texts)).sequences
    by_length = sorted(sequences, key=lambda sequence: -sequence.tokens)
    reference.to(context.device)
    engines: dict[str, Callable[[], object]] = {
        "packed": packed_run(model, sequences, batch_tokens),
        "transformers": padded_run(reference, sequences, context.device),
        "transformers sorted": padded_run(reference, by_length, context.device),
        "by runs": partial(_by_runs, packed_run(model, sequences, batch_tokens)),
    }
    seconds = take_turns(engines, rounds, context.device)
    tokens = sum(sequence.tokens for sequence in sequences)

    def times(peer: str) -> float:
        return median(
            other / mine for mine, other in zip(seconds["packed"], seconds[peer], strict=True)
        )

    batch = split_into_batches(sequences, batch_tokens)[0]
    exact = load_model(directory, f"random/{shape.name}-float32", context.device, torch.float32)
    return {
        "texts": len(mix.texts),
        "tokens": tokens,
        "tokens_per_second": tokens / median(seconds["packed"]),
        "times_transformers": times("transformers"),
        "times_transformers_sorted": times("transformers sorted"),
        "times_by_runs": times("by runs"),
        "distance_from_runs": _distance(model, batch),
        "distance_from_runs_float32": _distance(exact, batch[:64]),
        "seconds": {name: list(each) for name, each in seconds.items()},
        **launches(context, model, batch),
    }


def _by_runs(run: Callable[[], object]) -> object:
    with patch.object(deberta, "has_triton", lambda x: False):
        return run()


def _distance(model: PackedModel, batch: list[InputSequence]) -> float:
    """The largest distance of a vector from the same by runs, relative to its length."""
    got, wanted = (
        np.stack(cast("list[np.ndarray]", vectors)).astype(np.float64)
        for vectors in (
            model.forward("dense", batch),
            _by_runs(lambda: model.forward("dense", batch)),
        )
    )
    return float((np.linalg.norm(got - wanted, axis=1) / np.linalg.norm(wanted, axis=1)).max())


def launches(context: StepContext, model: PackedModel, batch: list[InputSequence]) -> Row:
    """Kernels of one batch."""
    kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if context.has_cuda else [])]
    with profile(activities=kinds, acc_events=True) as profiler:
        model.forward("dense", batch)
        context.wait()
    events = kernels(profiler.key_averages(), on_device=context.has_cuda)
    return {
        "launches": sum(count for _, _, count in events),
        "kernel_seconds": sum(seconds for _, seconds, _ in events),
        "top": [
            {"kernel": name[:120], "seconds": seconds, "count": count}
            for name, seconds, count in events[:TOP]
        ],
    }


@torch.inference_mode()
def experts(context: StepContext) -> Row:
    layer = Experts(MOE, EXPERTS)
    for name, parameter in layer.named_parameters():
        values = torch.randn(parameter.shape, device=context.device, dtype=torch.bfloat16)
        parameter.data = values * (0.1 if "bias" in name else MOE.hidden**-0.5)
    x = torch.randn(BATCH_TOKENS, MOE.hidden, device=context.device, dtype=torch.bfloat16)
    if not has_grouped(x, MOE.hidden, MOE.ffn):
        raise NotHere("grouped products need compute capability 9.0")
    shares = layer.router.forward(x).float().softmax(-1)
    values, chosen = shares.topk(MOE.experts_used, dim=-1)
    spread = torch.zeros_like(shares).scatter(-1, chosen, values).to(x.dtype)
    seconds = take_turns(
        {
            "grouped": lambda: layer.compute_grouped(x, values, chosen),
            "all": lambda: layer.compute_all(x, spread),
        },
        9,
        context.device,
    )
    got, wanted = (
        layer.compute_grouped(x, values, chosen).double(),
        layer.compute_all(x, spread).double(),
    )
    multiplied = 4 * BATCH_TOKENS * MOE.experts_used * MOE.hidden * MOE.ffn
    return {
        "tokens": BATCH_TOKENS,
        "seconds_grouped": median(seconds["grouped"]),
        "seconds_all_experts": median(seconds["all"]),
        "times_all_experts": median(seconds["all"]) / median(seconds["grouped"]),
        "flops_per_second": multiplied / median(seconds["grouped"]),
        "distance": float(((got - wanted).norm(dim=1) / wanted.norm(dim=1)).max()),
    }
