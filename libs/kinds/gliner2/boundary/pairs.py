"""The choice of candidate pairs of a start and an end, and their scores for every query
(GLiNER2.5).

A query is a label of entities, a role of a relation or a field of a structure. Texts are computed
one at a time; nothing waits for the device.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from libs.kinds.gliner2.card import Boundary
from libs.models.text.heads.linear import HeadDot, HeadNorm, linear_layer

State = Mapping[str, Tensor]

_RESERVED: Final = 5000.0  # priority of pairs reserved by a query in the package, above every score
_FILM: Final = 64  # the width of the last layer, fixed in the package
_CHUNK_ELEMENTS: Final = 1 << 24  # elements of the last layers in memory at a time: 64 MiB


@dataclass(frozen=True, slots=True)
class TextBoundaries:
    """The inputs of one text's pairs."""

    words: Tensor
    """[words, size]"""
    values: Tensor
    """[words, content size]"""
    inside: Tensor
    """[words, own size]"""
    starts: Tensor
    """Boundaries as starts, compared with queries."""
    ends: Tensor
    """Boundaries as ends, compared with queries."""
    first: Tensor
    """Boundaries as starts, compared with `last`."""
    last: Tensor
    """Boundaries as ends, compared with `first`."""
    left: Tensor
    """The start's part of a pair's state, for each boundary."""
    right: Tensor
    """The end's part of a pair's state, for each boundary."""


@dataclass(frozen=True, slots=True)
class Queries:
    """The states of queries and their projections."""

    states: Tensor
    """[queries, size]"""
    starts: Tensor
    """[queries, own size], compared with boundaries as starts."""
    ends: Tensor
    """[queries, own size], compared with boundaries as ends."""
    inside: Tensor
    """[queries, own size], compared with words."""


@dataclass(frozen=True, slots=True)
class BoundaryPairs:
    """Pairs of boundaries, int64 [pairs]. The end follows the start where `valid`."""

    starts: Tensor
    ends: Tensor
    valid: Tensor


class Marginals(nn.Module):
    """Scores of a query for boundaries as starts and ends, and for words as inner words."""

    def __init__(
        self, state: State, stem: str, settings: Boundary, *, size: int, file: str
    ) -> None:
        super().__init__()
        own = settings.size
        self.starts = linear_layer(state, f"{stem}.start_boundary_projection", (own, own), file)
        self.ends = linear_layer(state, f"{stem}.end_boundary_projection", (own, own), file)
        self.inside = linear_layer(state, f"{stem}.inside_text_projection", (own, size), file)
        self.start_queries = linear_layer(
            state, f"{stem}.start_query_projection", (own, size), file
        )
        self.end_queries = linear_layer(state, f"{stem}.end_query_projection", (own, size), file)
        self.inside_queries = linear_layer(
            state, f"{stem}.inside_query_projection", (own, size), file
        )

    def queries(self, states: Tensor) -> Queries:
        """Project the states of queries, [queries, size]."""
        projections = (self.start_queries, self.end_queries, self.inside_queries)
        return Queries(states, *(projection.forward(states) for projection in projections))


class BoundaryPairScorer(nn.Module):
    """Choose the pairs of a text and score them: each pair has a state that every query is compared
    with in two ways.
    """

    def __init__(
        self, state: State, stem: str, settings: Boundary, *, size: int, file: str
    ) -> None:
        """`stem` is that of the whole head. Raises ModelBroken."""
        super().__init__()
        own, wide = settings.size, settings.pair_size
        builder, scorer = f"{stem}.shared_pool_builder", f"{stem}.shared_pool_scorer"
        self.first = linear_layer(state, f"{builder}.start_projection", (own, own), file)
        self.last = linear_layer(state, f"{builder}.end_projection", (own, own), file)
        self.left = linear_layer(state, f"{scorer}.start_projection", (wide, own), file)
        self.right = linear_layer(state, f"{scorer}.end_projection", (wide, own), file)
        self.length = linear_layer(state, f"{scorer}.length_projection", (wide, 3), file)
        self.prior = linear_layer(state, f"{scorer}.prior_projection", (wide, 1), file)
        self.values = linear_layer(
            state, f"{scorer}.content_pooler.value_projection", (settings.content_size, size), file
        )
        self.content_norm = HeadNorm(
            state, f"{scorer}.content_pooler.layer_norm", settings.content_size, file
        )
        self.content = linear_layer(
            state, f"{scorer}.content_projection", (wide, settings.content_size), file
        )
        self.norm = HeadNorm(state, f"{scorer}.candidate_norm", wide, file)
        self.query = linear_layer(state, f"{scorer}.query_projection", (wide, size), file)
        self.film = linear_layer(state, f"{scorer}.film", (wide * 2, wide), file)
        self.inner = linear_layer(state, f"{scorer}.film_output.0", (_FILM, wide), file, "gelu")
        self.outer = HeadDot(state, f"{scorer}.film_output.3", _FILM, file)
        self._ends, self._pairs, self._reserved = settings.ends, settings.pairs, settings.reserved

    def count(self, words: int) -> int:
        """Return the number of pairs, valid or not, of a text of this many words."""
        return min(self._pairs, min(self._ends, words + 1) ** 2)

    def choose(self, text: TextBoundaries, starts: Tensor, ends: Tensor) -> BoundaryPairs:
        """Choose the best pairs of the best starts and ends, by scores [queries, boundaries].

        Pairs reserved by a query are first. Pairs of equal priority are in the order of their
        starts, then ends.
        """
        any_start, any_end = starts.amax(0), ends.amax(0)
        kept = min(self._ends, len(any_start))
        firsts = any_start.sort(descending=True, stable=True).indices[:kept].sort().values
        lasts = any_end.sort(descending=True, stable=True).indices[:kept].sort().values
        fits = (text.first[firsts] @ text.last[lasts].T) * text.first.shape[1] ** -0.5
        valid = (lasts > firsts[:, None]).flatten()
        shared = (fits + any_start[firsts, None] + any_end[lasts]).flatten()
        own = (
            (starts[:, firsts, None] + ends[:, None, lasts] + fits)
            .flatten(1)
            .masked_fill_(~valid, -torch.inf)
        )
        reserved = min(self._reserved, len(shared))
        chosen = own.topk(reserved, dim=1).indices.flatten()
        bonus = torch.arange(reserved, 0, -1, device=shared.device, dtype=shared.dtype) + _RESERVED
        shared = shared.scatter_reduce(0, chosen, bonus.repeat(len(own)), "amax").masked_fill_(
            ~valid, -torch.inf
        )
        best = shared.sort(descending=True, stable=True).indices[: self._pairs]
        return BoundaryPairs(firsts[best // kept], lasts[best % kept], valid[best])

    def states(self, text: TextBoundaries, pairs: BoundaryPairs) -> Tensor:
        """Return the states of pairs, [pairs, pair size]."""
        lengths = (pairs.ends - pairs.starts).clamp_min(1).float()
        shapes = torch.stack(
            [lengths.log1p(), lengths / max(1, len(text.words)), lengths.rsqrt()], dim=-1
        )
        fits = (text.first[pairs.starts] * text.last[pairs.ends]).sum(
            -1, keepdim=True
        ) * text.first.shape[1] ** -0.5
        sums = F.pad(text.values.cumsum(0), (0, 0, 1, 0))
        means = (sums[pairs.ends] - sums[pairs.starts]) / lengths[:, None]
        x = (
            text.left[pairs.starts]
            + text.right[pairs.ends]
            + self.length.forward(shapes)
            + self.prior.forward(fits)
        )
        return self.norm.forward(x + self.content.forward(self.content_norm.forward(means)))

    def forward(
        self,
        text: TextBoundaries,
        pairs: BoundaryPairs,
        queries: Queries,
        starts: Tensor,
        ends: Tensor,
    ) -> Tensor:
        """Return logits [queries, pairs]. `starts` and `ends` are those of `choose`."""
        states, projected = self.states(text, pairs), self.query.forward(queries.states)
        scores = (projected @ states.T).mul_(states.shape[1] ** -0.5)
        scores += starts[:, pairs.starts] + ends[:, pairs.ends]
        scores += _within(queries.inside @ text.inside.T * text.inside.shape[1] ** -0.5, pairs)
        return scores + self._film_scores(states, projected)

    def _film_scores(self, states: Tensor, queries: Tensor) -> Tensor:
        """Score pairs by feature-wise modulation (FiLM): each query scales and shifts the states of
        the pairs before two layers read them.

        Returns [queries, pairs].
        """
        scale, shift = self.film.forward(queries).chunk(2, dim=-1)
        chunk = max(1, _CHUNK_ELEMENTS // max(1, states.numel()))
        parts = [
            self.outer.forward(self.inner.forward(states * (1 + scales[:, None]) + shifts[:, None]))
            for scales, shifts in zip(
                torch.split(scale, chunk), torch.split(shift, chunk), strict=True
            )
        ]
        return torch.cat(parts)


def _within(inside: Tensor, pairs: BoundaryPairs) -> Tensor:
    """Return the sum of the logits [queries, words] of a pair's words, divided by the root of the
    number of words: [queries, pairs].

    The mean is subtracted from the logits, so that sums stay small for a long text.
    """
    mean = inside.mean(1, keepdim=True)
    sums = F.pad((inside - mean).cumsum(1), (1, 0))
    lengths = (pairs.ends - pairs.starts).float()
    return (sums[:, pairs.ends] - sums[:, pairs.starts] + mean * lengths) * lengths.clamp_min(
        1
    ).rsqrt()
