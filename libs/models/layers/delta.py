"""The gated delta rule (arXiv 2412.06464) over packed sequences, which replaces attention in
Qwen3-Next and Qwen3.5.

A head keeps a matrix `state` [key_size, value_size]. Each token scales the state by exp(decay),
replaces the share beta of the value stored under its key with its own value, and reads the state
with its query. Sequences lie end to end: each begins with a state of zeros.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from libs.kernels.layout import to_device

CHUNK = 64
"""Number of tokens updated together by matrix products; a recurrence connects the chunks."""


@dataclass(frozen=True, slots=True)
class DeltaChunks:
    """The positions of a batch's tokens in chunks: all first chunks, then all second chunks, and so
    on.

    Each group begins with the longest sequence. The sequences that still have a chunk are therefore
    always the first ones.
    """

    rows: Tensor
    """The token in each place, or the number of tokens where the place is empty: [chunks * CHUNK]
    int64."""
    places: Tensor
    """The inverse of `rows`: [tokens] int64."""
    ranks: Tensor
    """Each sequence's place in a group, [sequences] int64: 0 for the longest."""
    order: Tensor
    """The inverse of `ranks`."""
    counts: tuple[int, ...]
    """Number of sequences that have a first chunk, a second chunk and so on."""

    @staticmethod
    def from_lengths(lengths: Sequence[int], device: torch.device | str = "cpu") -> DeltaChunks:
        """Divide sequences of these lengths into chunks. Each length is at least 1."""
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
        rows_, places_, ranks, order = (
            to_device(each, device, np.int64) for each in (rows, places, rank, np.argsort(rank))
        )
        return DeltaChunks(rows_, places_, ranks, order, tuple(counts))


def delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor,
    beta: Tensor,
    chunks: DeltaChunks,
    state: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the reads of all tokens, [tokens, heads, value_size] float32, and the states after the
    sequences, [sequences, heads, key_size, value_size].

    Within a chunk the updates u solve (1 + A) u = beta (v - exp(decay since its start) k state),
    where A is the strictly lower triangle of beta k·k' exp(decay between the two tokens).

    Args:
        q: [tokens, heads, key_size]
        k: [tokens, heads, key_size]
        v: [tokens, heads, value_size]
        decay: A logarithm, at most 0: [tokens, heads].
        beta: [tokens, heads]
        state: The states before the sequences; None for zeros.
    """
    # [chunks, heads, CHUNK, size]
    q, k, v = (_chunked(x, chunks.rows) for x in (q * q.shape[-1] ** -0.5, k, v))
    decay, beta = (_chunked(x[..., None], chunks.rows) for x in (decay, beta))
    since = decay.cumsum(dim=2)  # [chunks, heads, CHUNK, 1], from the chunk's start
    later = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=q.device).triu(1)
    yield_point = (since - since.transpose(2, 3)).masked_fill(later, -torch.inf).exp()
    mixed = (beta * (k @ k.transpose(2, 3)) * yield_point).tril(-1)
    right = torch.cat([beta * v, beta * since.exp() * k], dim=3)
    solved = torch.linalg.solve_triangular(mixed, right, upper=False, unitriangular=True)
    values, keys = solved.split([v.shape[-1], k.shape[-1]], dim=3)
    reads, queries = (q @ k.transpose(2, 3)) * yield_point, q * since.exp()
    total = since[:, :, -1:]
    kept, written = total.exp(), (k * (total - since).exp()).transpose(2, 3)
    state = (
        q.new_zeros(chunks.counts[0], q.shape[1], k.shape[-1], v.shape[-1])
        if state is None
        else state.index_select(0, chunks.order)
    )
    outputs, ended, start = [], [], 0
    for count in chunks.counts:
        ended.append(state[count:])
        now = slice(start, start + count)
        state, start = state[:count], start + count
        update = values[now] - keys[now] @ state
        outputs.append(queries[now] @ state + reads[now] @ update)
        state = kept[now] * state + written[now] @ update
    after = torch.cat([state, *reversed(ended)]).index_select(0, chunks.ranks)
    return torch.cat(outputs).transpose(1, 2).flatten(0, 1)[chunks.places], after


def delta_step(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Return what `delta_rule` returns for sequences of one token each."""
    state = state * decay.exp()[..., None, None]
    update = beta[..., None] * (v - torch.einsum("shk,shkv->shv", k, state))
    state = state + k[..., None] * update[..., None, :]
    return torch.einsum("shk,shkv->shv", q * q.shape[-1] ** -0.5, state), state


def _chunked(x: Tensor, rows: Tensor) -> Tensor:
    """Gather [tokens, heads, size] as [chunks, heads, CHUNK, size], with zeros in empty places."""
    placed = torch.cat([x, x.new_zeros(1, *x.shape[1:])])[rows]
    return placed.view(-1, CHUNK, *x.shape[1:]).transpose(1, 2)
