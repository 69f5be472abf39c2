"""Scores of pairs of two spans for a relation (GLiNER2.5): the best heads and tails make pairs, and
the best pairs are scored.

The first layer takes both spans' first and last words and the relation's roles concatenated. Its
products are therefore computed once per span and once per relation, and added for each pair.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from libs.kinds.gliner2.boundary.pairs import BoundaryPairs
from libs.kinds.gliner2.card import RelationSettings
from libs.models.text.heads.linear import HeadDot, linear_layer

State = Mapping[str, Tensor]
_CHUNK_ELEMENTS: Final = 1 << 24  # elements of the hidden layer in memory at a time: 64 MiB


class RelationScorer(nn.Module):
    """Choose the pairs of two spans of each relation, and compute their logits."""

    def __init__(
        self, state: State, stem: str, settings: RelationSettings, *, size: int, file: str
    ) -> None:
        """`size` is that of hidden states. Raises ModelBroken."""
        super().__init__()
        roles = size * (2 if settings.directional else 1)
        self.inner = linear_layer(state, f"{stem}.mlp.0", (size, size * 4 + roles + 2), file)
        self.outer = HeadDot(state, f"{stem}.mlp.3", size, file)
        self.content = _Content(state, stem, size, roles, file) if settings.content else None
        self._settings, self._parts = settings, [size, size, size, size, roles, 1, 1]

    def count(self, spans: int) -> int:
        """Return the number of pairs, valid or not, of a relation in a text with this many
        spans."""
        settings = self._settings
        return min(settings.pairs, min(settings.heads, spans) * min(settings.tails, spans))

    def forward(
        self, words: Tensor, queries: Tensor, spans: BoundaryPairs, likely: Tensor
    ) -> Tensor:
        """Return [relations, count, 3]: rows of the head and of the tail among the spans, -1 for an
        invalid pair, and a probability.

        Args:
            words: [words, size]
            queries: Heads and tails, [relations, 2, size].
            likely: Probabilities [relations, 2, spans].
        """
        heads, tails, valid = self._pairs(spans, likely)
        roles = queries.flatten(1) if self._settings.directional else queries.mean(1)
        first, last, of_tail_first, of_tail_last, of_roles, of_order, of_distance = torch.split(
            self.inner.weight, self._parts, dim=1
        )
        begins, ends = (
            words[spans.starts.clamp_max(len(words) - 1)],
            words[(spans.ends - 1).clamp_min(0)],
        )
        as_head = F.linear(begins, first) + F.linear(ends, last)
        as_tail = F.linear(begins, of_tail_first) + F.linear(ends, of_tail_last)
        named = F.linear(roles, of_roles, self.inner.bias)
        ahead = (spans.starts[tails] - spans.starts[heads]).float()[..., None]
        place = ahead.sign() * of_order[:, 0] + ahead.abs() / len(words) * of_distance[:, 0]
        hidden = F.gelu(as_head[heads] + as_tail[tails] + named[:, None] + place)
        scores = self.outer.forward(hidden)
        if self.content is not None:
            scores = scores + self.content.forward(words, spans, roles, heads, tails)
        rows = torch.stack([heads, tails], dim=-1).masked_fill(~valid[..., None], -1)
        return torch.cat([rows.float(), scores.sigmoid()[..., None]], dim=-1)

    def relations_per_pass(self, spans: int) -> int:
        """Return the number of relations to score together."""
        return max(1, _CHUNK_ELEMENTS // (self.count(spans) * self._parts[0]))

    def _pairs(self, spans: BoundaryPairs, scores: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Choose pairs by scores [relations, 2, spans].

        Returns spans of heads, spans of tails, and whether they are a pair: [relations, count]
        each.
        """
        settings = self._settings
        by_start = (spans.starts * (spans.ends.max() + 1) + spans.ends).argsort(stable=True)
        ranked = scores.masked_fill(~spans.valid, -1)[..., by_start].sort(
            dim=-1, descending=True, stable=True
        )
        order = by_start[ranked.indices]
        heads, head_scores = order[:, 0, : settings.heads], ranked.values[:, 0, : settings.heads]
        tails, tail_scores = order[:, 1, : settings.tails], ranked.values[:, 1, : settings.tails]
        is_pair = (
            (head_scores >= 0)[:, :, None]
            & (tail_scores >= 0)[:, None]
            & (heads[:, :, None] != tails[:, None])
        )
        together = (
            (head_scores[:, :, None] * tail_scores[:, None]).masked_fill_(~is_pair, -1).flatten(1)
        )
        best = together.sort(dim=-1, descending=True, stable=True).indices[
            :, : self.count(scores.shape[-1])
        ]
        width = tails.shape[1]
        return (
            heads.gather(1, best // width),
            tails.gather(1, best % width),
            is_pair.flatten(1).gather(1, best),
        )


class _Content(nn.Module):
    """Compare the means of the words of both spans, by gates and by a layer of the relation."""

    def __init__(self, state: State, stem: str, size: int, roles: int, file: str) -> None:
        super().__init__()
        self.head = linear_layer(state, f"{stem}.head_content_projection", (size, size), file)
        self.tail = linear_layer(state, f"{stem}.tail_content_projection", (size, size), file)
        self.gate = linear_layer(
            state, f"{stem}.relation_content_gate", (size, roles), file, "sigmoid"
        )
        self.linear = linear_layer(state, f"{stem}.content_linear", (1, size * 2 + roles), file)

    def forward(
        self, words: Tensor, spans: BoundaryPairs, roles: Tensor, heads: Tensor, tails: Tensor
    ) -> Tensor:
        """Take the scorer's arguments and heads and tails [relations, pairs]; return [relations,
        pairs]."""
        sums = F.pad(words.cumsum(0), (0, 0, 1, 0))
        means = (sums[spans.ends] - sums[spans.starts]) / (spans.ends - spans.starts).clamp_min(1)[
            :, None
        ]
        head, tail, gate = (
            self.head.forward(means),
            self.tail.forward(means),
            self.gate.forward(roles),
        )
        size = head.shape[1]
        of_head, of_tail, of_roles = torch.split(
            self.linear.weight[0], [size, size, roles.shape[1]]
        )
        named = F.linear(roles, of_roles[None], self.linear.bias)
        together: Tensor = ((head * size**-0.5)[heads] * gate[:, None] * tail[tails]).sum(-1)
        return together + (head @ of_head)[heads] + (tail @ of_tail)[tails] + named
