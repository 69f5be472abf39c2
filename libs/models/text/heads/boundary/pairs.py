"""Which pairs of a start and an end are scored at all, and their scores for every query
(GLiNER2.5's pool of candidates).

A query is a label of entities, a role of a relation or a field of a structure. One text at a time;
nothing waits for the device.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from libs.catalog.kinds.extraction.gliner2 import Boundary
from libs.models.text.heads.linear import HeadDot, HeadNorm, linear_layer

State = Mapping[str, Tensor]

_RESERVED: Final = (
    5000.0  # the package's priority of pairs that a query has reserved, beyond every score
)
_FILM: Final = 64  # the width of the last layer, which no config.json can change
_AT_ONCE: Final = 1 << 24  # elements of the last layers held at a time: 64 MiB


@dataclass(frozen=True, slots=True)
class Text:
    """What one text's pairs are made of.

    `words` [words, size], `values` [words, content size], `inside` [words, own size]; of its
    boundaries `starts`, `ends` (to be compared with queries), `first`, `last` (with each other) and
    `left`, `right` (parts of a pair's state), [boundaries, …] each.
    """

    words: Tensor
    values: Tensor
    inside: Tensor
    starts: Tensor
    ends: Tensor
    first: Tensor
    last: Tensor
    left: Tensor
    right: Tensor


@dataclass(frozen=True, slots=True)
class Queries:
    """`states` [queries, size]; compared with boundaries `starts`, `ends`, with words `inside`,
    [queries, own size] each.
    """

    states: Tensor
    starts: Tensor
    ends: Tensor
    inside: Tensor


@dataclass(frozen=True, slots=True)
class Pairs:
    """`starts`, `ends` [pairs]: boundaries, int64, the end after the start where `valid`."""

    starts: Tensor
    ends: Tensor
    valid: Tensor


class Marginals(nn.Module):
    """How well boundaries start and end, and words are within, what a query asks for."""

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
        """states [queries, size]"""
        projections = (self.start_queries, self.end_queries, self.inside_queries)
        return Queries(states, *(projection.forward(states) for projection in projections))


class PairScorer(nn.Module):
    """Chooses the pairs of a text and scores them: a state for each pair, which every query is
    compared with in two ways.
    """

    def __init__(
        self, state: State, stem: str, settings: Boundary, *, size: int, file: str
    ) -> None:
        """`stem`: of the whole head. Raises ModelBroken."""
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
        """How many pairs a text of so many words has, valid or not."""
        return min(self._pairs, min(self._ends, words + 1) ** 2)

    def choose(self, text: Text, starts: Tensor, ends: Tensor) -> Pairs:
        """The best pairs of the best starts and ends, by the scores of starts and ends [queries,
        boundaries].

        Those that a query has reserved are first; pairs of equal priority stand in the order of
        their starts, then ends.
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
        return Pairs(firsts[best // kept], lasts[best % kept], valid[best])

    def states(self, text: Text, pairs: Pairs) -> Tensor:
        """[pairs, pair size]"""
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
        self, text: Text, pairs: Pairs, queries: Queries, starts: Tensor, ends: Tensor
    ) -> Tensor:
        """starts, ends: as for `choose`. Returns logits [queries, pairs]."""
        states, wanted = self.states(text, pairs), self.query.forward(queries.states)
        scores = (wanted @ states.T).mul_(states.shape[1] ** -0.5)
        scores += starts[:, pairs.starts] + ends[:, pairs.ends]
        scores += _within(queries.inside @ text.inside.T * text.inside.shape[1] ** -0.5, pairs)
        return scores + self._conditioned(states, wanted)

    def _conditioned(self, states: Tensor, wanted: Tensor) -> Tensor:
        """The second way: a query scales and shifts a pair's state before two layers read it.
        [queries, pairs]
        """
        scale, shift = self.film.forward(wanted).chunk(2, dim=-1)
        at_once = max(1, _AT_ONCE // max(1, states.numel()))
        parts = [
            self.outer.forward(self.inner.forward(states * (1 + some[:, None]) + other[:, None]))
            for some, other in zip(
                torch.split(scale, at_once), torch.split(shift, at_once), strict=True
            )
        ]
        return torch.cat(parts)


def _within(inside: Tensor, pairs: Pairs) -> Tensor:
    """The sum of the logits [queries, words] of a pair's words, over the root of how many they are:
    [queries, pairs].

    Sums are of logits less their mean, so that they stay small however long the text is.
    """
    mean = inside.mean(1, keepdim=True)
    sums = F.pad((inside - mean).cumsum(1), (1, 0))
    lengths = (pairs.ends - pairs.starts).float()
    return (sums[:, pairs.ends] - sums[:, pairs.starts] + mean * lengths) * lengths.clamp_min(
        1
    ).rsqrt()
