"""Scores of relations between the entities found. They run on the host, because the pairs are known
only after the forward.

This is the last step of a relations job, in the worker's threads. Layers and names are those of the
gliner package's relation models.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from libs.kinds.gliner.card import Adjacency
from libs.models.text.heads.extraction.spans import SpanMarker, TwoLayers, folded
from libs.models.text.heads.linear import HeadLinear, check_shape
from libs.models.text.processing.extraction.spans import Candidates

Array = NDArray[np.float32]


class Linking(Protocol):
    """An adjacency between entities, which selects the pairs that are candidates for relations."""

    def __call__(self, entities: Tensor) -> Tensor:
        """Map [entities, size] to [entities, entities] in 0..1."""


class EntityPairScorer(nn.Module):
    """Score pairs of entities for each relation.

    Args:
        linking: Selects the candidate pairs; None for all pairs.
        whole: Linking depends on all candidate spans, not on the pair alone.
    """

    def __init__(
        self, marker: SpanMarker, pair: TwoLayers, linking: Linking | None, *, whole: bool
    ) -> None:
        super().__init__()
        self.marker, self.pair, self._linking, self.whole = marker, pair, linking, whole
        self.requires_grad_(False)

    @torch.inference_mode()
    def forward(
        self,
        words: Array,
        relations: Array,
        spans: Candidates,
        chosen: NDArray[np.int64],
        threshold: float,
    ) -> Array:
        """Return scores [chosen, chosen, relations] of head, tail and relation; 0 for pairs that
        are not candidates.

        Args:
            words: States of one text, [words, size].
            relations: [relations, size]
            chosen: Rows of the entities, at least one, among `spans`.
        """
        starts, ends, rows = (torch.from_numpy(part) for part in (spans.starts, spans.ends, chosen))
        entities = self.marker.forward(torch.from_numpy(words), starts, ends)
        linked = torch.ones(len(rows), len(rows), dtype=torch.bool)
        if self._linking is not None:
            linked = self._linking(entities)[rows][:, rows] >= threshold
        linked.fill_diagonal_(False)
        scores: Array = (
            self._logits(entities[rows], torch.from_numpy(relations)).sigmoid() * linked[:, :, None]
        ).numpy()
        return scores

    def _logits(self, entities: Tensor, relations: Tensor) -> Tensor:
        """Return the dot product of a pair's and a relation's representation, one head entity at a
        time, which bounds memory.
        """
        size = entities.shape[1]
        inner = self.pair.inner
        heads = F.linear(entities, inner.weight[:, :size])
        tails = F.linear(entities, inner.weight[:, size:], inner.bias)
        keys, base = folded(self.pair.outer, relations)
        return torch.stack([torch.addmm(base, (head + tails).relu(), keys.T) for head in heads])


def build_linking(
    kind: Adjacency, state: Mapping[str, Tensor], *, size: int, file: str
) -> Linking | None:
    """Build the linking. Raises ModelBroken for tensors that are missing or have another shape."""
    stem = "relations_rep_layer.relation_rep_layer"
    if kind == "dot":
        return _similar
    if kind == "bilinear":
        project = _linear(state, f"{stem}.proj", (size, size), file)
        return lambda entities: _similar(project.forward(entities))
    if kind == "mlp":
        inner, outer = (
            _linear(state, f"{stem}.mlp.0", (size, size * 2), file),
            _linear(state, f"{stem}.mlp.2", (1, size), file),
        )
        return lambda entities: _by_pairs(inner, outer, entities)
    if kind == "gcn":
        layer, project = (
            _linear(state, f"{stem}.gcn.linear", (size, size), file),
            _linear(state, f"{stem}.proj", (size, size), file),
        )
        return lambda entities: _by_graph(layer, project, entities)
    return None


def _linear(
    state: Mapping[str, Tensor], stem: str, shape: tuple[int, int], file: str
) -> HeadLinear:
    check_shape(state, f"{stem}.weight", shape, file)
    check_shape(state, f"{stem}.bias", shape[:1], file)
    return HeadLinear(
        {name: state[name].cpu() for name in (f"{stem}.weight", f"{stem}.bias")}, stem, "identity"
    )


def _similar(entities: Tensor) -> Tensor:
    return (entities @ entities.T).sigmoid()


def _by_pairs(inner: HeadLinear, outer: HeadLinear, entities: Tensor) -> Tensor:
    """Apply two layers to the concatenated head and tail."""
    size = entities.shape[1]
    heads = F.linear(entities, inner.weight[:, :size])
    tails = F.linear(entities, inner.weight[:, size:], inner.bias)
    return torch.stack([outer.forward((head + tails).relu())[:, 0] for head in heads]).sigmoid()


def _by_graph(layer: HeadLinear, project: HeadLinear, entities: Tensor) -> Tensor:
    """Apply one graph convolution (GCN, arXiv 1609.02907) over the entities' similarities, and
    return the similarities of its outputs.
    """
    edges = _similar(entities) + torch.eye(len(entities))
    scale = edges.sum(dim=1).clamp(min=1e-6).rsqrt()
    moved = layer.forward((scale[:, None] * edges * scale) @ entities).relu()
    return _similar(project.forward(moved))
