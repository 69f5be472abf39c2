"""Sampling: choose the next token of each sequence by its scores, with transformers' warpers in
their order.

The random numbers of a token depend only on the sequence's key and its number of tokens. A sequence
therefore draws the same tokens alone, in a batch, or again after its worker was lost. Each token of
the vocabulary gets an exponentially distributed number, and the token with the largest ratio of
probability to number is drawn (an exponential race), so rounding in a batch of another shape rarely
changes a choice.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Final

import torch
from torch import Tensor

from libs.models.interface.sequences import TokenScore

NUCLEUS_CANDIDATES: Final = 1024
"""Number of most likely tokens that top-p searches before it sorts the whole vocabulary."""
# SplitMix64 (Steele, Lea and Flood 2014), as signed 64-bit numbers.
_INCREMENT: Final = 0x9E3779B97F4A7C15 - (1 << 64)
_FACTORS: Final = (0xBF58476D1CE4E5B9 - (1 << 64), 0x94D049BB133111EB - (1 << 64))


@dataclass(frozen=True, slots=True)
class Sampler:
    """Sampling options of one sequence.

    Attributes:
        temperature: Above 0.
        top_k: 0 for all tokens.
        top_p: 1 for all tokens.
        min_p: 0 for all tokens.
        key: Seed of the random numbers.
    """

    temperature: float
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    key: bytes = b""


@dataclass(frozen=True, slots=True)
class Draw:
    """The next token of a sampled row of scores.

    Attributes:
        step: Number of tokens generated before it.
    """

    sampler: Sampler
    step: int


def choose(scores: Tensor, draws: Mapping[int, Draw]) -> list[int]:
    """Return the next token of each row of scores [rows, vocabulary], float32: the most likely one,
    or a sample for the rows of `draws`.
    """
    chosen = scores.argmax(dim=1)
    if draws:
        rows = list(draws)
        chosen[rows] = _drawn(
            scores if len(rows) == len(scores) else scores[rows], list(draws.values())
        )
    found: list[int] = chosen.tolist()
    return found


def warp(scores: Tensor, samplers: Sequence[Sampler]) -> Tensor:
    """Divide scores [rows, vocabulary] by the temperature, and set excluded tokens to -inf.

    Equals transformers' TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper and
    MinPLogitsWarper in sequence. All tokens with equal scores at the edge of the nucleus are kept.
    """
    device, width = scores.device, scores.shape[1]
    scores = scores / torch.tensor([each.temperature for each in samplers], device=device)[:, None]
    sizes = [min(each.top_k, width) or width for each in samplers]
    largest = max((size for size in sizes if size < width), default=0)
    if largest:
        top = scores.topk(largest).values
        last = top.gather(
            1, torch.tensor([min(size, largest) - 1 for size in sizes], device=device)[:, None]
        )
        unlimited = torch.tensor([size == width for size in sizes], device=device)[:, None]
        scores = scores.masked_fill(scores < last.masked_fill(unlimited, -torch.inf), -torch.inf)
    if any(each.top_p < 1.0 for each in samplers):
        shares = torch.tensor([each.top_p for each in samplers], device=device)[:, None]
        scores = scores.masked_fill(scores < _nucleus_edge(scores, shares), -torch.inf)
    if any(each.min_p > 0.0 for each in samplers):
        ratios = torch.tensor([each.min_p for each in samplers], device=device)[:, None]
        scores = scores.masked_fill(
            scores < scores.amax(dim=1, keepdim=True) + ratios.log(), -torch.inf
        )
    return scores


def token_scores(
    logprobs: Tensor, chosen: Sequence[int], counts: Sequence[int]
) -> list[TokenScore]:
    """Return the log probability of the chosen token and of the `counts` most likely ones, for each
    row of [rows, vocabulary].
    """
    own = logprobs.gather(1, torch.tensor(chosen, device=logprobs.device)[:, None])[:, 0].tolist()
    top = logprobs.topk(min(max(counts), logprobs.shape[1]))
    tops = zip(top.indices.tolist(), top.values.tolist(), counts, strict=True)
    likeliest = [
        tuple(zip(ids[:count], values[:count], strict=True)) for ids, values, count in tops
    ]
    return [TokenScore(logprob, each) for logprob, each in zip(own, likeliest, strict=True)]


def _nucleus_edge(scores: Tensor, shares: Tensor) -> Tensor:
    """Return the smallest score [rows, 1] of the most likely tokens that together have the share;
    -inf for a share of 1.
    """
    total = scores.logsumexp(dim=1, keepdim=True)
    width = scores.shape[1]
    for size in (min(NUCLEUS_CANDIDATES, width), width):
        top = scores.topk(size).values
        before = (top - total).exp().cumsum(dim=1).roll(1, dims=1)
        before[:, 0] = 0.0
        kept = (before < shares).sum(dim=1, keepdim=True).clamp_min(1)
        is_whole = size == width or bool(((kept < size) | (shares >= 1.0)).all())
        if is_whole:
            break
    return top.gather(1, kept - 1).masked_fill(shares >= 1.0, -torch.inf)


def _drawn(scores: Tensor, draws: Sequence[Draw]) -> Tensor:
    samplers = [draw.sampler for draw in draws]
    warped = warp(scores, samplers)
    ids: Tensor | None = None
    candidates = max(1, int((warped > -torch.inf).sum(dim=1).max()))
    if candidates <= NUCLEUS_CANDIDATES < warped.shape[1]:
        warped, ids = warped.topk(candidates)
    keys = [_step_key(draw.sampler.key, draw.step) for draw in draws]
    places = torch.arange(warped.shape[1], device=scores.device)[None] if ids is None else ids
    uniform = _uniform(torch.tensor(keys, device=scores.device)[:, None], places)
    # -log1p(-u) is exponentially distributed, and exact for small values, which win the race.
    best = (warped - (-torch.log1p(-uniform)).log()).argmax(dim=1, keepdim=True)
    return (best if ids is None else ids.gather(1, best))[:, 0]


def _step_key(key: bytes, step: int) -> int:
    """Return the generator state of a token's random numbers: signed, 64 bits."""
    return int.from_bytes(
        blake2b(step.to_bytes(8, "little"), key=key, digest_size=8).digest(), "little", signed=True
    )


def _uniform(keys: Tensor, places: Tensor) -> Tensor:
    """Return float32 numbers within (0, 1): outputs `places` of the SplitMix64 with these keys."""
    state = keys + (places + 1) * _INCREMENT
    for shift, factor in zip((30, 27), _FACTORS, strict=True):
        state = (state ^ _shifted(state, shift)) * factor
    state = state ^ _shifted(state, 31)
    return ((_shifted(state, 32).to(torch.float32) + 0.5) * 2.0**-32).clamp_max(1.0 - 2.0**-24)


def _shifted(state: Tensor, bits: int) -> Tensor:
    """Shift right logically: torch's shift of signed numbers repeats the sign."""
    return (state >> bits) & ((1 << (64 - bits)) - 1)
