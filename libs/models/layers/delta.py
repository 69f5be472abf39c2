"""The gated delta rule (arXiv 2412.06464) over packed sequences, as Qwen3-Next and Qwen3.5 have it
in place of attention.

A head keeps a matrix `state` [key_size, value_size]. Each token scales it by exp(decay), overwrites
what it holds under the token's key with the token's value, by the share beta, and reads it by the
token's query. Sequences lie end to end: a state begins at zero with each of them, and the
convolution before it does not look across their borders.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from libs.kernels.layout import to_device

CHUNK = 64
"""Tokens whose updates are computed together by matrix products; between chunks there is a
recurrence.
"""


@dataclass(frozen=True, slots=True)
class Chunks:
    """Where the tokens of a batch stand in chunks, of which all first ones come first, then all
    second ones, and so on.

    Within those the longest sequence comes first, so that the sequences that still have a chunk are
    always the first ones. `rows` [chunks * CHUNK] int64: the token in each place; the number of
    tokens where there is none. `places` [tokens] int64: the inverse. `counts`: how many sequences
    have a first chunk, a second and so on. `positions` [tokens] int64: within the sequence.
    """

    rows: Tensor
    places: Tensor
    counts: tuple[int, ...]
    positions: Tensor

    @staticmethod
    def of(lengths: Sequence[int], device: torch.device | str = "cpu") -> Chunks:
        """The chunks of sequences of these lengths, each at least 1."""
        sizes = np.array(lengths, dtype=np.int64)
        starts = np.cumsum(sizes) - sizes
        positions = np.arange(sizes.sum()) - np.repeat(starts, sizes)
        rank = np.empty_like(sizes)
        rank[np.argsort(-sizes, kind="stable")] = np.arange(len(sizes))
        number, offset = np.divmod(positions, CHUNK)
        counts = [
            int((sizes > step * CHUNK).sum()) for step in range(-(-int(sizes.max()) // CHUNK))
        ]
        first = np.cumsum([0, *counts])
        places = (first[number] + np.repeat(rank, sizes)) * CHUNK + offset
        rows = np.full(first[-1] * CHUNK, len(positions), dtype=np.int64)
        rows[places] = np.arange(len(positions))
        rows_, places_, positions_ = (
            to_device(each, device, np.int64) for each in (rows, places, positions)
        )
        return Chunks(rows_, places_, tuple(counts), positions_)


def delta_rule(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, chunks: Chunks
) -> Tensor:
    """The reads of all tokens: [tokens, heads, value_size] float32.

    `q`, `k`: [tokens, heads, key_size]; `v`: [tokens, heads, value_size]; `decay` (a logarithm, at
    most 0) and `beta`: [tokens, heads]. Within a chunk the updates u solve (1 + A) u = beta (v -
    exp(decay since its start) k state), where A is the strictly lower triangle of beta k·k'
    exp(decay between the two tokens).
    """
    q, k, v = (
        _chunked(x, chunks.rows) for x in (q * q.shape[-1] ** -0.5, k, v)
    )  # [chunks, heads, CHUNK, size]
    decay, beta = (_chunked(x[..., None], chunks.rows) for x in (decay, beta))
    since = decay.cumsum(dim=2)  # [chunks, heads, CHUNK, 1], from the chunk's start
    later = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=q.device).triu(1)
    between = (since - since.transpose(2, 3)).masked_fill(later, -torch.inf).exp()
    mixed = (beta * (k @ k.transpose(2, 3)) * between).tril(-1)
    right = torch.cat([beta * v, beta * since.exp() * k], dim=3)
    solved = torch.linalg.solve_triangular(mixed, right, upper=False, unitriangular=True)
    values, keys = solved.split([v.shape[-1], k.shape[-1]], dim=3)
    reads, queries = (q @ k.transpose(2, 3)) * between, q * since.exp()
    total = since[:, :, -1:]
    kept, written = total.exp(), (k * (total - since).exp()).transpose(2, 3)
    state = q.new_zeros(chunks.counts[0], q.shape[1], k.shape[-1], v.shape[-1])
    outputs, start = [], 0
    for count in chunks.counts:
        now = slice(start, start + count)
        state, start = state[:count], start + count
        update = values[now] - keys[now] @ state
        outputs.append(queries[now] @ state + reads[now] @ update)
        state = kept[now] * state + written[now] @ update
    return torch.cat(outputs).transpose(1, 2).flatten(0, 1)[chunks.places]


def causal_convolution(x: Tensor, weight: Tensor, positions: Tensor) -> Tensor:
    """Each channel's weighted sum of a token and those before it in its sequence: [tokens,
    channels] -> the same.

    `weight`: [channels, width], the token's own last. `positions`: [tokens], within the sequence.
    """
    width = weight.shape[1]
    padded = functional.pad(x, (0, 0, width - 1, 0))
    total = x * weight[:, -1]
    for back in range(1, width):
        earlier = padded[width - 1 - back : width - 1 - back + len(x)]
        total = (
            total
            + earlier.masked_fill((positions < back)[:, None], 0.0) * weight[:, width - 1 - back]
        )
    return total


def _chunked(x: Tensor, rows: Tensor) -> Tensor:
    """[tokens, heads, size] -> [chunks, heads, CHUNK, size], zero where a chunk has no token."""
    placed = torch.cat([x, x.new_zeros(1, *x.shape[1:])])[rows]
    return placed.view(-1, CHUNK, *x.shape[1:]).transpose(1, 2)
